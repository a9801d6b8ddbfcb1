"""Every message of the installation, one module per conversation.

``scenario`` and ``control`` are pydantic models: few messages, each validated. ``batch`` is
the data plane: plain columns behind one header, checked once per batch. ``model`` lies
between: batches of prompts and their answers.
"""
