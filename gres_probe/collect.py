"""Transport of inventories from the nodes to the controller: a drop folder, and fetching them from each node.

A drop folder holds one file for each node, ``<node>.json``. It may be on a file system that many can write to, so
nothing in it is trusted: no links are followed, size, owner and mode are checked, and the content is validated.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

from gres_probe.children import read_all
from gres_probe.inventory import NODE_NAME, Inventory
from gres_probe.machine import natural
from sluice.base.errors import SluiceError, UsageError
from sluice.base.files import write_atomic
from sluice.base.text import one_line

DEFAULT_DIR = Path("/var/lib/sluice/inventory")
MOST_BYTES = 4 << 20  # an inventory of 16 GPUs with 7 instances each takes 0.2 MiB
_EXIT_CODES = (0, 1)  # of `sluice probe` that printed an inventory: all well, or some GPU could not be read


@dataclass(slots=True)
class Collected:
    """Inventories by node, in order of the nodes, and why others are missing."""

    inventories: dict[str, Inventory] = field(default_factory=dict)
    failures: dict[str, SluiceError] = field(default_factory=dict)


def write_inventory(folder: Path, inventory: Inventory) -> Path:
    """Put a node's inventory into a drop folder, in one step; the folder is made where it is missing.

    Returns the file's path. Raises SluiceError where it cannot be written or the node's name is not a file name.
    """
    if not NODE_NAME.fullmatch(inventory.node):
        raise UsageError(f"node {inventory.node!r}: not a name of a node", remedy="give it one with --node")
    path = folder / f"{inventory.node}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(path, inventory.to_json() + "\n", follow_links=False)
    except OSError as error:
        raise SluiceError(
            f"{path}: {error.strerror}", remedy="name a folder that you may write to: --drop, --inventory-dir"
        ) from error
    return path


def load_inventories(
    folder: Path, nodes: Iterable[str] | None = None, *, owners: Collection[int] | None = None
) -> Collected:
    """Read a drop folder: all of it in natural order, or the given nodes in their order.

    `owners` are the user IDs whose files are trusted, default root and the caller. A file that is not trusted,
    not valid or missing is a failure of its node and does not stop the others. Raises SluiceError when the folder
    itself cannot be read.
    """
    believed = {0, os.geteuid()} if owners is None else set(owners)
    collected = Collected()
    try:
        folder_descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise SluiceError(
            f"{folder}: {error.strerror}", remedy="collect inventories (sluice inventory collect) or name their folder"
        ) from error
    try:
        if nodes is None:
            names = (name.removesuffix(".json") for name in os.listdir(folder_descriptor) if name.endswith(".json"))
            nodes = sorted((name for name in names if NODE_NAME.fullmatch(name)), key=natural)
        for node in nodes:
            try:
                collected.inventories[node] = _load(folder_descriptor, folder, node, believed)
            except SluiceError as error:
                collected.failures[node] = error
    finally:
        os.close(folder_descriptor)
    return collected


def _load(folder_descriptor: int, folder: Path, node: str, believed: Collection[int]) -> Inventory:
    source = str(folder / f"{node}.json")
    if not NODE_NAME.fullmatch(node):
        raise UsageError(f"node {node!r}: not a name of a node", remedy="write it as in Slurm, e.g. node[01-04]")
    try:
        descriptor = os.open(
            f"{node}.json", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder_descriptor
        )
    except FileNotFoundError as error:
        raise SluiceError(
            f"{source}: no inventory of {node}", remedy=f"fetch it: sluice inventory collect {node}"
        ) from error
    except OSError as error:
        raise SluiceError(f"{source}: {error.strerror}", remedy="use a regular file, not a link") from error
    try:
        _believe(os.fstat(descriptor), source, believed)
        with os.fdopen(os.dup(descriptor), "rb") as file:
            data = file.read(MOST_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(data) > MOST_BYTES:
        raise SluiceError(f"{source}: more than {MOST_BYTES >> 20} MiB", remedy="remove it and probe the node again")
    inventory = Inventory.from_json(data, source=source)
    if inventory.node != node:
        raise SluiceError(f"{source}: belongs to node {inventory.node!r}", remedy="remove it and probe the node again")
    return inventory


def _believe(status: os.stat_result, source: str, owners: Collection[int]) -> None:
    """Refuse a file that is not a regular one, or that others than the owners could have written."""
    if not stat.S_ISREG(status.st_mode):
        raise SluiceError(f"{source}: not a regular file", remedy="remove it")
    if status.st_uid not in owners:
        raise SluiceError(
            f"{source}: belongs to user {status.st_uid}", remedy="chown it to root, or name the owner with --owner"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise SluiceError(f"{source}: others than its owner can write it", remedy=f"chmod go-w {source}")


def remote_shell_command(rsh: Sequence[str], program: Sequence[str]) -> Callable[[str], list[str]]:
    """How to probe a node over a remote shell such as ``ssh``, whose far end is a shell that splits words again."""

    def command(node: str) -> list[str]:
        return [*rsh, node, *(shlex.quote(word) for word in (*program, "probe", "--json", "--node", node))]

    return command


def srun_command(program: Sequence[str], gpus: Mapping[str, str]) -> Callable[[str], list[str]]:
    """How to probe a node with srun: a job that has all of the node's GPUs, so the node must be idle by then.

    `gpus` asks for all GPUs that Slurm knows of a node, such as ``gpu:h100:8``: a job does not see any other.
    """

    def command(node: str) -> list[str]:
        words = ["srun", "--quiet", "--job-name=sluice-probe", "--exclusive", "--nodes=1", "--ntasks=1", "--chdir=/"]
        words += ["--immediate=10", "--time=2", f"--nodelist={node}"]
        if gpus.get(node):
            words.append(f"--gres={gpus[node]}")
        return [*words, *program, "probe", "--json", "--node", node]

    return command


def collect(
    nodes: Iterable[str], command: Callable[[str], list[str]], *, timeout: float = 30.0, fanout: int = 32
) -> Generator[tuple[str, Inventory | SluiceError], None, None]:
    """Probe remote nodes, `fanout` at a time, each within `timeout` seconds; results come as they are ready.

    `command` gives the words of the program that probes one node, which is started without a shell. What a node sends
    is bounded and validated like a file of a drop folder.
    """
    wanted = list(dict.fromkeys(nodes))
    running: set[subprocess.Popen[bytes]] = set()
    with ThreadPoolExecutor(max_workers=max(1, min(fanout, len(wanted)))) as pool:
        futures = {pool.submit(_fetch, node, command, timeout, running): node for node in wanted}
        try:
            for future in as_completed(futures):
                try:
                    yield futures[future], future.result()
                except SluiceError as error:
                    yield futures[future], error
        finally:  # when the caller is interrupted or stops reading, programs still running are ended
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(running):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)


def _fetch(
    node: str, command: Callable[[str], list[str]], timeout: float, running: set[subprocess.Popen[bytes]]
) -> Inventory:
    if not NODE_NAME.fullmatch(node):
        raise UsageError(f"node {node!r}: not a name of a node", remedy="write it as in Slurm, e.g. node[01-04]")
    words = command(node)
    deadline = time.monotonic() + timeout
    try:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # so that what it started can be ended with it
        )
    except OSError as error:
        raise SluiceError(f"{node}: {words[0]}: {error.strerror}", remedy="name another with --rsh") from error
    running.add(process)
    try:
        assert process.stdout is not None and process.stderr is not None  # noqa: S101 - pipes, as asked for above
        out, err = process.stdout.fileno(), process.stderr.fileno()
        # Only standard output has to end: a shared ssh connection keeps standard error open in the background.
        outputs = read_all([out, err], deadline=deadline, limit=MOST_BYTES, until=[out])
        if len(outputs[out].data) > MOST_BYTES:
            raise SluiceError(f"{node}: sent more than {MOST_BYTES >> 20} MiB", remedy="run sluice probe on the node")
        try:
            code = process.wait(max(0.0, deadline - time.monotonic())) if outputs[out].ended else None
        except subprocess.TimeoutExpired:
            code = None
        if code is None:
            raise SluiceError(f"{node}: no answer within {timeout:g} s", remedy="check the node, or raise --timeout")
        if code not in _EXIT_CODES or not outputs[out].data:
            said = outputs[err].data[-2000:].decode(errors="replace").strip().splitlines()
            raise SluiceError(f"{node}: {one_line(said[-1]) if said else f'{words[0]}: exit status {code}'}")
        inventory = Inventory.from_json(bytes(outputs[out].data), source=node)
    finally:
        running.discard(process)
        _end(process)
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
    if inventory.node != node:
        raise SluiceError(f"{node}: answered as node {inventory.node!r}", remedy="check its host name")
    return inventory


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a program and what it started: first with SIGTERM, so that srun cancels its job."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
