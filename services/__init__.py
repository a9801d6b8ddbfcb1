"""The other services, a folder each: director, models, recorder."""
