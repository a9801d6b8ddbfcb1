"""Worker processes, and what starts, follows and ends them: for agents and for environments.

``host`` is the resident that has them started, ``process`` what they do, ``nursery`` the process
that forks them and ``forking`` its owner's side, ``lifeline`` ends them with their parent, and
``pool`` is the side of a run that has some.
"""
