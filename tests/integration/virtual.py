"""Virtual machines under QEMU: Debian as installed with its own kernel, systemd, cgroups of version 2, on a disk of
their own that survives reboots and power cuts.

By emulation (TCG), which works everywhere and is slow: a boot takes a minute. SLUICE_QEMU_ACCEL=kvm where that works.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sluice.base.run import run_command
from tests.integration.booted import CannotBootError, Machine

ROOT = Path(__file__).resolve().parents[2]
_SSH = ("-q", "-F", "none", "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null")
_BOOT_S = 600


def machine_image(suite: str, *, group: str = "cloud", add: str = "") -> Path:
    """The folder that tools/machine-image makes, kept in build/machines; `group`: of packages, with the kernel; `add`:
    one more package. Raises CannotBootError.
    """
    for program in ("qemu-system-x86_64", "qemu-img", "ssh"):
        if shutil.which(program) is None:
            raise CannotBootError(f"{program} is missing: tools/install-packages virtual")
    name = "-".join([suite, *([group] if group != "cloud" else []), *([add] if add else [])])
    folder = ROOT / "build/machines" / name
    words = [ROOT / "tools/machine-image", "--suite", suite, "--group", group, *(["--add", add] if add else []), folder]
    made = run_command(words, check=False, timeout=1800)
    if made.returncode != 0:
        raise CannotBootError(f"no image of Debian {suite}: {made.stderr.strip()[-500:]}")
    return folder


class VirtualMachine(Machine):
    """A machine of an image's disk; `folder` has what it writes there, its console and the connection to it."""

    init = "systemd, QEMU"
    patience = 600.0

    def __init__(self, image: Path, folder: Path, suite: str, *, memory_mib: int = 1536) -> None:
        super().__init__(0, ROOT / "build" / suite)
        self.folder = folder
        self._image = image
        self._memory_mib = memory_mib
        self._qemu: subprocess.Popen[bytes] | None = None
        self._master: subprocess.Popen[bytes] | None = None
        self._port = 0
        folder.mkdir()
        disk = ["qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b", image / "disk.raw", folder / "disk"]
        run_command(disk, timeout=60)

    def command(self, *words: str, user: str = "") -> list[str]:
        """The command line of a program in the machine."""
        become = ["setpriv", "--reuid", user, "--regid", user, "--init-groups"] if user else []
        environment = ["env", "-i", "-C", "/", "PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C.UTF-8"]
        return [*self._ssh(), shlex.join([*environment, *become, *words])]

    def _ssh(self, *options: str) -> list[str]:
        control = ["-o", f"ControlPath={self.folder}/ssh", "-o", "ConnectTimeout=20"]
        return [
            "ssh",
            *_SSH,
            *control,
            "-i",
            str(self._image / "key"),
            "-p",
            str(self._port),
            *options,
            "root@127.0.0.1",
        ]

    def power_on(self) -> None:
        """Boot, and wait for multi-user.target. Raises CannotBootError."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        accel = os.environ.get("SLUICE_QEMU_ACCEL", "tcg,thread=multi")
        words = ["setpriv", "--pdeathsig", "KILL", "qemu-system-x86_64", "-accel", accel]
        words += ["-cpu", "host" if accel == "kvm" else "max", "-smp", "2", "-m", str(self._memory_mib)]
        words += ["-nodefaults", "-no-user-config", "-display", "none", "-serial", f"file:{self.folder}/console"]
        words += ["-kernel", f"{self._image}/vmlinuz", "-initrd", f"{self._image}/initrd"]
        words += ["-append", "root=/dev/vda console=ttyS0 net.ifnames=0 mitigations=off panic=-1"]
        words += ["-drive", f"file={self.folder}/disk,if=virtio,format=qcow2,cache=writeback"]
        words += ["-netdev", f"user,id=user,restrict=on,hostfwd=tcp:127.0.0.1:{self._port}-:22"]
        words += ["-device", "virtio-net-pci,netdev=user,romfile=", "-device", "virtio-rng-pci"]
        with (self.folder / "qemu").open("wb") as said:
            self._qemu = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
        self._connect("")

    def _connect(self, boot_before: str) -> None:
        """Wait until another boot than `boot_before` has reached its multi-user.target."""
        assert self._qemu is not None
        deadline = time.monotonic() + _BOOT_S
        while self._qemu.poll() is None and time.monotonic() < deadline:
            self._hang_up()
            self._master = subprocess.Popen(
                self._ssh("-M", "-N", "-o", "ServerAliveInterval=10"),
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            while self._master.poll() is None and time.monotonic() < deadline:
                time.sleep(0.5)
                with suppress(Exception):
                    if (self.folder / "ssh").exists() and self._is_up(boot_before):
                        return
            time.sleep(0.5)
        console = (self.folder / "console").read_text(errors="replace")[-1500:]
        raise CannotBootError(f"QEMU boots no machine here: {(self.folder / 'qemu').read_text()}{console}")

    def _is_up(self, boot_before: str) -> bool:
        return self.boot_id() != boot_before and self.is_active("multi-user.target")

    def _hang_up(self) -> None:
        if self._master is not None:
            self._master.kill()
            self._master.wait()
        (self.folder / "ssh").unlink(missing_ok=True)

    def boot_id(self) -> str:
        """Differs with each boot."""
        return self.run("cat", "/proc/sys/kernel/random/boot_id")

    def reboot(self) -> None:
        """As its administrator does it."""
        before = self.boot_id()
        self.run("systemctl", "reboot", check=False)
        self._connect(before)

    def power_cut(self) -> None:
        """What was in its memory is lost, what its disk had acknowledged is not."""
        if self._qemu is not None:
            self._qemu.send_signal(signal.SIGKILL)
            self._qemu.wait()
            self._qemu = None
        self._hang_up()


@contextmanager
def virtual_machine(folder: Path, suite: str, *, group: str = "cloud") -> Iterator[VirtualMachine]:
    """One that has booted; `group` as for `machine_image`. Raises CannotBootError."""
    machine = VirtualMachine(machine_image(suite, group=group), folder, suite)
    try:
        machine.power_on()
        yield machine
    finally:
        machine.power_cut()
