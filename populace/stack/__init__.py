"""A stack: the processes that the scripts start on one machine, and their records."""
