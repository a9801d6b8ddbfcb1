"""What every process of Populace shares: subjects, messages, codec, bus, settings, logs.

Nothing in here knows of agents. Imports run one way: services, then ``populace``, then
``shared``; this package imports neither of the others.
"""

__version__ = "0.1.0"
