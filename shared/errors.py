"""The exception tree's trunk: everything that Populace raises on purpose is a PopulaceError.

The agents' branch (what a scenario author meets) stands in ``populace.errors``.
"""

from __future__ import annotations


class PopulaceError(Exception):
    """Any error that Populace raises on purpose; its text is one sentence for a person."""


class InvalidInputError(PopulaceError):
    """Something that a person wrote can't be used: a file, a setting, an argument."""


class CodeError(InvalidInputError):
    """A class or module can't be loaded by its import path, or may not be."""


class CodecError(PopulaceError):
    """A value can't be written to the wire, or bytes from the wire can't be read."""


class BusError(PopulaceError):
    """The message bus could not do what was asked."""


class BusUnavailableError(BusError):
    """No broker answers at the given address."""


class BusDisconnectedError(BusError):
    """The connection was lost while an answer was awaited; it may or may not have been done."""


class BusTimeoutError(BusError):
    """A request or acknowledgement did not come back in time."""


class NoRespondersError(BusError):
    """Nobody listens on the subject that was asked."""


class BusOverflowError(BusError):
    """More is waiting to be sent than the bus may hold."""


class PayloadTooLargeError(BusError):
    """One indivisible item is larger than the broker takes in a message."""


class RevisionConflictError(BusError):
    """A key-value entry changed since it was read, or exists already."""


class RemoteError(PopulaceError):
    """A service refused a control request; the text is the service's own sentence."""
