"""The engine: callers, workers, shards, and the driver of agents' coroutines.

Scenario authors need nothing from here; services use ``Worker`` and ``Caller``.
"""
