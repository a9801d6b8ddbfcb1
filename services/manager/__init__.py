"""The manager: a web page over an installation's hosts, runs and models, and the same as JSON."""
