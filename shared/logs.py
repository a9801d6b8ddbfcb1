"""Log set-up: readable on a terminal, one JSON object a line otherwise."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import sys
from collections import deque
from typing import Any

import structlog

from shared.settings import Settings

_KEPT = 1000
_TAIL = 256 << 10
_last: deque[str] = deque(maxlen=_KEPT)


class _Keeper(logging.Handler):
    """Keeps the last lines, for those who ask for them."""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one."""
        with contextlib.suppress(Exception):
            _last.append(self.format(record))


def last_log_lines(count: int) -> list[str]:
    """What this process logged last, oldest first.

    Where standard error is a file, its end is read: what child processes wrote is there as well.
    """
    if count < 1:
        return []
    try:
        status = os.fstat(2)
        if stat.S_ISREG(status.st_mode):
            with open("/proc/self/fd/2", "rb") as file:
                file.seek(max(0, status.st_size - _TAIL))
                return file.read().decode("utf-8", "replace").splitlines()[-count:]
    except OSError:
        pass
    return list(_last)[-count:]


def configure_logs(settings: Settings, *, service: str) -> None:
    """Send structlog and the standard library's loggers to standard error, in one shape."""
    shared_steps: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    pretty = settings.log_format == "console" or (
        settings.log_format == "auto" and sys.stderr.isatty()
    )
    final: list[Any] = (
        [structlog.dev.ConsoleRenderer()]
        if pretty
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared_steps,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *final],
        )
    )
    root = logging.getLogger()
    keeper = _Keeper()
    keeper.setFormatter(handler.formatter)
    root.handlers[:] = [handler, keeper]
    root.setLevel(settings.log_level.upper())
    # These say at "info" what our own lines say already.
    for noisy in ("nats", "aiohttp.access", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    structlog.configure(
        processors=[*shared_steps, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(service=service)


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """A logger that takes key-value pairs."""
    logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(name)
    return logger
