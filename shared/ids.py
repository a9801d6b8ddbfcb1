"""Names that are safe as one token of a NATS subject."""

from __future__ import annotations

import re
import secrets
import time

from shared.errors import InvalidInputError

_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"


def new_id(kind: str) -> str:
    """A fresh name such as ``w-7k2m9x4q``: the kind, a dash, 40 random bits."""
    return f"{kind}-" + "".join(secrets.choice(_ALPHABET) for _ in range(8))


def new_run_id() -> str:
    """A fresh run name that sorts by the time it was made: ``20260131-142233-x7k2``."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    return f"{stamp}-" + "".join(secrets.choice(_ALPHABET) for _ in range(4))


def is_token(text: str) -> bool:
    """Whether the text can stand as one token of a subject (and as a folder's name)."""
    return bool(_TOKEN.match(text))


def check_token(text: str, what: str) -> str:
    """The text itself, if it can be one token of a subject.

    Raises:
        InvalidInputError: it can't; ``what`` says in the message whose name it is.
    """
    if not is_token(text):
        raise InvalidInputError(
            f"{what} {text!r} must be 1 to 64 characters of A-Z, a-z, 0-9, '_' and '-'"
        )
    return text
