"""The agent host: one per machine, the parent of the worker processes that hold agents.

It starts workers, gives them to runs, notices when one dies, and ends those whose run's owner
is gone. It shows itself as ``agent_host`` through NATS's service protocol.
"""
