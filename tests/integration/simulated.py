"""Simulated GPUs in a machine that boots, by the package sluice-dev-cluster, and programs that use them."""

from __future__ import annotations

from pathlib import Path

import gpu_sim
from tests.integration.booted import HYBRID, Machine

SIM = "/var/lib/sluice-sim"
"""Where a machine with `simulate_driver` has the state of its GPUs."""
_VIEW = Path(__file__).resolve().parents[2] / "dev_cluster/cgroup_view/libcgroup_view.so"

_PLATFORM = """name: machine
description: {gpus} GPUs of a kind
cpu: {{sockets: 1, cores_per_socket: {cores}, threads_per_core: 1, numa_nodes: 1, memory_mib: 2048}}
drivers:
  nvidia: {{version: 550.90.07, runtime: 12040}}
gpus:
"""
_GPU = "  - {{model: {model}, pci: '0000:{bus:02x}:00.0', numa: 0, under: 'pci0000:00/0000:00:{bus:02x}.1'}}\n"
# In /run, as in a driver: what was changed since the boot is gone after the next one.
_PROGRAM = """#!/opt/sluice/bin/python3
import os, socket, subprocess
from pathlib import Path
import gpu_sim
state = Path("/run/sluice-sim")
if not (state / "state").exists():
    gpu_sim.write_node_state(state, gpu_sim.load_platform("/etc/sluice-sim.yaml"), socket.gethostname())
    os.symlink(state, "/dev/sluice-sim")
    # The driver lists there which files belong to MIG instances. Nobody can make files in /proc.
    subprocess.run(["mount", "--bind", state / "proc/driver", "/proc/driver"], check=True)
os.umask(0)
files = {file.path: file for file in gpu_sim.device_files(state)}
caps = files.get("/dev/nvidia-caps/nvidia-cap1")
instances = [(f"/dev/nvidia-caps/nvidia-cap{n}", 0o444, caps.major, n) for n in range(3, 200)] if caps else []
for name, mode, major, minor in [(f.path, f.mode, f.major, f.minor) for f in files.values()] + instances:
    path = Path(name)
    path.parent.mkdir(exist_ok=True, mode=0o755)
    if not path.exists():
        os.mknod(path, 0o020000 | mode, os.makedev(major, minor))
"""
# What a vendor's driver does when it is loaded. The files of MIG instances are there before the instances are.
_SERVICE = """[Unit]
Description=Simulated GPUs
Before=sluice-mig.service sluice-probe.service sluice-agent.service slurmd.service

[Service]
Type=oneshot
ExecStart=/usr/local/sbin/sluice-sim

[Install]
WantedBy=multi-user.target
"""
FILL = "/usr/local/lib/fill.py"
"""Takes so many MiB and prints how many it got, and the last code; waits so many seconds."""
_FILL_TEXT = """
import ctypes as c, sys, time
cu, context, address, got, code = c.CDLL("libcuda.so.1"), c.c_void_p(), c.c_uint64(), 0, 0
assert cu.cuInit(0) == 0 and cu.cuDevicePrimaryCtxRetain(c.byref(context), 0) == 0 and cu.cuCtxSetCurrent(context) == 0
while got < int(sys.argv[1]) and (code := cu.cuMemAlloc_v2(c.byref(address), c.c_size_t(2 << 20))) == 0:
    got += 2
print(got, code, flush=True)
time.sleep(float(sys.argv[2]) if sys.argv[2:] else 0)
"""
ESCAPE = "/usr/local/lib/escape.sh"
"""A mount namespace of the user's own, in which nothing is preloaded: the watchdog alone holds it."""
_ESCAPE_TEXT = """#!/bin/sh
exec unshare -Urm sh -c 'mount --bind /dev/null /etc/ld.so.preload && exec env -i "$@"' x "$@"
"""


def simulate_driver(machine: Machine, state: Path) -> None:
    """Device files and libraries of a driver whose state, which is outside, the machine has at SIM; without a package.

    And what slurmd needs on a kernel that lists cgroups of version 1.
    """
    files = "".join(
        f"c {file.path} {file.mode & 0o777:o} root root - {file.major}:{file.minor}\n"
        for file in gpu_sim.device_files(state)
    )
    machine.write("/etc/tmpfiles.d/gpu.conf", f"L /dev/sluice-sim - - - - {SIM}\n{files}")
    libraries = Path(gpu_sim.__file__).parent / "lib"
    machine.copy([*libraries.glob("*.so*"), _VIEW], "/usr/local/lib")
    machine.shell("systemd-tmpfiles --create /etc/tmpfiles.d/gpu.conf; ldconfig")
    if HYBRID:
        preloaded = f"[Service]\nEnvironment=LD_PRELOAD=/usr/local/lib/{_VIEW.name}\n"
        machine.write("/etc/systemd/system/slurmd.service.d/view.conf", preloaded)
    _write_programs(machine)


def _write_programs(machine: Machine) -> None:
    machine.write(FILL, _FILL_TEXT)
    machine.write(ESCAPE, _ESCAPE_TEXT, "755")


def gpu_platform(model: str, count: int, cores: int) -> str:
    """A platform's file."""
    gpus = "".join(_GPU.format(model=model, bus=number + 1) for number in range(count))
    return _PLATFORM.format(gpus=count, cores=cores) + gpus


def simulate_gpus(machine: Machine, model: str, count: int, cores: int) -> None:
    """GPUs in a machine that has the package sluice-dev-cluster, at once and after each boot."""
    machine.write("/etc/sluice-sim.yaml", gpu_platform(model, count, cores))
    machine.write("/usr/local/sbin/sluice-sim", _PROGRAM, "755")
    machine.write("/etc/systemd/system/sluice-sim.service", _SERVICE)
    _write_programs(machine)
    machine.shell(
        "echo /opt/sluice/lib/python3.*/site-packages/gpu_sim/lib >/etc/ld.so.conf.d/sluice-sim.conf; ldconfig;"
        "systemctl daemon-reload; systemctl enable --now sluice-sim.service"
    )
