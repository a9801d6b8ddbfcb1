"""Log set-up: readable on a terminal, one JSON object a line otherwise."""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog

from shared.settings import Settings


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
    root.handlers[:] = [handler]
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
