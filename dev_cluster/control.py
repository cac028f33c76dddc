"""Talking to a cluster's process 1 from outside."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

from dev_cluster.layout import Layout
from dev_cluster.processes import start_time
from sluice.base.errors import SluiceError


def connect_unix(path: Path, *, timeout: float) -> socket.socket:
    """A stream connection to a socket in a folder of any depth (a socket's own path may have 107 bytes at most)."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout)
        connection.connect(f"/proc/self/fd/{folder}/{path.name}")
    except OSError:
        connection.close()
        raise
    finally:
        os.close(folder)
    return connection


def init_pid(layout: Layout) -> int | None:
    """The pid, as seen from here, of the cluster's process 1; None when it does not run."""
    try:
        record = json.loads(layout.init.read_text())
        pid, started = int(record["pid"]), int(record["started"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return pid if start_time(pid) == started else None


def ask(layout: Layout, do: str, *, timeout: float = 60, **fields: Any) -> Any:
    """One request to process 1 and its answer. Raises SluiceError when it does not run or refuses."""
    try:
        with connect_unix(layout.socket, timeout=timeout) as connection, connection.makefile("rw") as stream:
            stream.write(json.dumps({"do": do, **fields}) + "\n")
            stream.flush()
            line = stream.readline()
    except PermissionError as error:
        raise SluiceError(f"{layout.socket}: {error.strerror}", remedy="run it as root, e.g. with sudo") from error
    except OSError as error:
        raise SluiceError(
            f"{layout.folder}: the cluster does not run ({error.strerror or error})",
            remedy=f"remove it with: sluice cluster down --dir {layout.folder}",
        ) from error
    if not line:
        raise SluiceError(f"{layout.folder}: the cluster has just ended")
    answer = json.loads(line)
    if "error" in answer:
        raise SluiceError(answer["error"])
    return answer["ok"]
