"""Machines under QEMU on this host: a folder for each, with its disk, its pid file and its monitor's socket.

They are processes of their own, which this one finds again by the folders. A folder's machine runs as long as its pid
file is locked. What differs between shapes and nodes are words of QEMU's command line.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
import shlex
import shutil
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path

from sluice.base.errors import SluiceError
from sluice.base.files import write_atomic
from sluice.base.run import CommandError
from sluice.base.text import one_line
from sluice.fleet.driver import DriverSite, Failure, Machine, Order, ProviderError, check_program
from sluice.fleet.drivers import qemu

_SETTINGS = (
    "accel", "append", "folder", "image", "image_tool", "initrd", "kernel", "nodes", "options", "qemu", "shapes",
    "stop_within", "user_data",
)  # fmt: skip
_FACTS, _ENDING = "machine.json", "ending"
_ID = re.compile(r"vm-[0-9a-f]{12}")
_STOP_S = 15
_FORGOTTEN_S = 3600.0  # for which one that has ended is listed
_TURN_S = 30.0  # for which a call waits for the one before; nothing was asked when it is over
_SETTLED_S = 60.0  # until a start that an earlier process has begun is over
_CONSOLE_BYTES = 65_536


class Vm:
    """The driver."""

    def __init__(self, site: DriverSite) -> None:
        site.only(*_SETTINGS)
        self._site = site
        self._qemu = Path(site.setting("qemu", "/usr/bin/qemu-system-x86_64"))
        self._tool = Path(site.setting("image_tool", "/usr/bin/qemu-img"))
        check_program(self._qemu)
        if "image" in site.settings:
            check_program(self._tool)
        self._shapes, self._nodes = self._words_by("shapes"), self._words_by("nodes")
        self._options = site.settings.get("options", [])
        self._stop_s = site.settings.get("stop_within", _STOP_S)
        if not isinstance(self._options, list) or not isinstance(self._stop_s, int):
            raise SluiceError(
                f"pool {site.pool}: settings.options is not a list, or settings.stop_within not a number",
                remedy="write options: ['-nic', 'tap,ifname={node},script=no,downscript=no'], stop_within: 15",
            )
        self._folder = qemu.own_folder(Path(site.setting("folder", str(site.state))) / f"vm-{site.pool}@{site.cluster}")
        self._host = socket.gethostname()
        self._lock = threading.Lock()  # a list has no machine that has just not begun

    def _words_by(self, name: str) -> dict[str, list[str]]:
        given = self._site.settings.get(name, {})
        with suppress(ValueError):  # quotes that do not end
            if isinstance(given, Mapping):
                return {key: shlex.split(str(words)) for key, words in given.items()}
        raise SluiceError(
            f"pool {self._site.pool}: settings.{name} {given!r:.80}: not words of QEMU's command line by name",
            remedy=f"write {name}: {{NAME: '-smp 4 -m 8192'}}",
        )

    def launch(self, order: Order) -> Machine:
        """As `Driver.launch`."""
        if order.shape not in self._shapes:
            raise ProviderError("refused", f"settings.shapes has no {order.shape!r}; name it in the policy")
        machine = Machine(f"vm-{order.token[:12]}", order.token, order.node, order.shape, order.zone)
        folder = self._folder / machine.id
        with self._turn():
            if (folder / _FACTS).exists() and self._lives(folder):
                return machine
            try:
                folder.mkdir(mode=0o700, exist_ok=True)
                facts = {"machine": asdict(machine), "host": self._host}
                write_atomic(folder / _FACTS, json.dumps(facts) + "\n")
                (folder / _ENDING).unlink(missing_ok=True)  # of the one that the token had before
                qemu.start(self._qemu, self._words(order, folder), folder)
            except (OSError, qemu.QemuError, CommandError) as error:
                if qemu.running(folder) is None:
                    shutil.rmtree(folder, ignore_errors=True)
                raise ProviderError(self._kind(order, error), one_line(f"QEMU: {error}")[:300]) from error
        return machine

    @contextmanager
    def _turn(self) -> Iterator[None]:
        if not self._lock.acquire(timeout=_TURN_S):
            raise ProviderError("throttled", "QEMU: an earlier start has not ended yet")
        try:
            yield
        finally:
            self._lock.release()

    def _kind(self, order: Order, error: Exception) -> Failure:
        """Of why there is no machine: this host is full, this node's devices are not free, or the words are wrong."""
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT)
        if full or "Cannot allocate memory" in str(error) or "No space left" in str(error):
            return "no_capacity"
        return "broken" if order.node in self._nodes else "refused"

    def _words(self, order: Order, folder: Path) -> list[str]:
        """QEMU's, in its folder. Raises OSError, CommandError."""
        words = ["-machine", f"q35,accel={self._site.setting('accel', 'kvm')}", "-cpu", "max"]
        words += ["-name", order.node, "-device", "virtio-rng-pci"]
        words += ["-chardev", f"ringbuf,id=console,size={_CONSOLE_BYTES}", "-serial", "chardev:console"]
        for name in ("kernel", "initrd", "append"):
            if name in self._site.settings:
                words += [f"-{name}", self._site.setting(name)]
        if "image" in self._site.settings:
            words += qemu.disk(self._tool, Path(self._site.setting("image")), folder)
        if "user_data" in self._site.settings:
            text = _text(Path(self._site.setting("user_data"))).replace("{node}", order.node)
            words += qemu.seed(folder, {"instance-id": order.token, "local-hostname": order.node}, text)
        words += [*self._options, *self._shapes[order.shape], *self._nodes.get(order.node, [])]
        mac = hashlib.sha256(f"{self._site.cluster}/{order.node}".encode()).hexdigest()
        named = {"{node}": order.node, "{mac}": f"52:54:00:{mac[:2]}:{mac[2:4]}:{mac[4:6]}"}
        return [_filled(word, named) for word in words]

    def terminate(self, machine: str) -> None:
        """As `Driver.terminate`: presses the machine's power button; called again after `stop_within`, kills it."""
        folder = self._folder / machine
        with self._turn():
            if not _ID.fullmatch(machine) or not folder.exists() or not self._lives(folder):
                return
            if (host := self._facts(folder)[1]) != self._host:
                raise ProviderError("broken", f"{machine} runs on {host}: only fleetd there can end it")
            ending = folder / _ENDING
            if not ending.exists():
                ending.touch()
                with suppress(qemu.QemuError):  # one that does not listen is killed
                    qemu.ask(folder, "system_powerdown")
            if not 0 <= time.time() - ending.stat().st_mtime < self._stop_s:
                qemu.kill(folder)

    def machines(self) -> list[Machine]:
        """As `Driver.machines`. One that has ended is listed so for a while, as providers do."""
        with self._turn():
            folders = [one for one in self._folder.glob("vm-*") if (one / _FACTS).exists()]
            return [self._seen(folder) for folder in folders]

    def _seen(self, folder: Path) -> Machine:
        machine, _ = self._facts(folder)
        if self._lives(folder):
            return machine
        age = time.time() - folder.stat().st_mtime
        if not 0 <= age < _FORGOTTEN_S:
            shutil.rmtree(folder, ignore_errors=True)
        elif age > _SETTLED_S:
            qemu.clean(folder)
        return replace(machine, ending=True)

    def _facts(self, folder: Path) -> tuple[Machine, str]:
        """The machine of a folder, and the host that it runs on. Raises ProviderError."""
        try:
            facts = json.loads((folder / _FACTS).read_text())
            return Machine(**facts["machine"]), facts["host"]
        except (OSError, ValueError, TypeError, KeyError) as error:
            words = f"{folder / _FACTS}: {error!r:.80}; end its machine's QEMU yourself, and remove the folder"
            raise ProviderError("unknown", words) from error

    def _lives(self, folder: Path) -> bool:
        """Another host's machines count as there: nobody here can see them."""
        return self._facts(folder)[1] != self._host or qemu.running(folder) is not None


def _text(path: Path) -> str:
    """Its content. Raises OSError."""
    try:
        return path.read_text()
    except UnicodeDecodeError as error:
        raise OSError(errno.EILSEQ, "not UTF-8", str(path)) from error


def _filled(word: str, named: Mapping[str, str]) -> str:
    for name, value in named.items():
        word = word.replace(name, value)
    return word


def make(site: DriverSite) -> Vm:
    """The entry point. Raises SluiceError."""
    return Vm(site)
