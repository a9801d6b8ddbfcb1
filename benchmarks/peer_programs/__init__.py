"""Programs that do the dummy task with other means; each runs in an environment of its own.

They import nothing of ours: the first argument is the number of agents, the second the wait in
seconds. A line ``begin`` says that imports and servers are up; after an answer on standard input
the task starts: make the agents, call each once, take every answer. Then a line of JSON with
what came, and after another answer the program ends.
"""
