"""What is known of the stack in this working directory: its record under ``.populace/``."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

from shared.errors import InvalidInputError
from shared.service import DEFAULT_URL
from shared.settings import Settings


@dataclass
class ProcessRecord:
    """A process that was started."""

    name: str
    pid: int
    created: float
    """The operating system's start time of the process, so that a reused number is noticed."""


@dataclass
class StackRecord:
    """A stack that was started here."""

    nats_url: str
    embedded_broker: bool
    since: float
    version: str
    processes: list[ProcessRecord] = field(default_factory=list)


def record_file(settings: Settings) -> Path:
    """Where the record lies."""
    return settings.home / "stack.json"


def read_record(settings: Settings) -> StackRecord | None:
    """The record, or None if no stack was started here.

    Raises:
        InvalidInputError: the file can't be read.
    """
    path = record_file(settings)
    try:
        raw = json.loads(path.read_text())
        processes = [ProcessRecord(**p) for p in raw.pop("processes")]
        return StackRecord(processes=processes, **raw)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InvalidInputError(
            f"the stack's record {str(path)!r} can't be read ({error}); "
            "run 'populace down', which removes it"
        ) from None


def write_record(settings: Settings, record: StackRecord) -> None:
    """Replace the record at once, so that a reader never sees half of it."""
    path = record_file(settings)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    draft.write_text(json.dumps(asdict(record), indent=1))
    draft.replace(path)


def page_file(settings: Settings) -> Path:
    """Where the manager writes its page's address."""
    return settings.home / "manager.url"


def token_file(settings: Settings) -> Path:
    """Where the manager writes the token that it has made, if none was set."""
    return settings.home / "manager.token"


def page_address(settings: Settings) -> str | None:
    """The address of the manager's page, if one was started here."""
    try:
        return page_file(settings).read_text().strip() or None
    except OSError:
        return None


def broker_url(settings: Settings) -> str:
    """The broker to connect to: the setting, else the stack's here, else NATS's default."""
    if settings.nats_url:
        return settings.nats_url
    record = read_record(settings)
    return record.nats_url if record is not None else DEFAULT_URL
