"""Worker processes, and what starts, follows and ends them: for agents and for environments.

``host`` is the resident that starts them, ``process`` their own main program, ``nursery`` forks
them, ``lifeline`` ends them with their parent, and ``pool`` is the side of a run that has some.
"""
