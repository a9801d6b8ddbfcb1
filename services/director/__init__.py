"""The director: takes scenarios by request and by event, and plays each in a process of its own."""
