"""The garbage collector, set for processes that hold very many objects for long."""

from __future__ import annotations

import gc


def settle_collector() -> None:
    """Look for garbage rarely, and never among what is here already.

    Agents, calls and answers are held by the hundred thousand and rarely form cycles; with the
    usual settings the collector walks through all of them again and again.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 1000)
