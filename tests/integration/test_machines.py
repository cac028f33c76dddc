"""Sluice from its packages in a virtual machine: Debian's kernel and Slurm, limits of the kernel, a reboot, power cuts.

Simulated GPUs. With SLUICE_TEST_SCALE=full, or `make test-machines`.
"""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest

from policy.node import NodePolicy
from policy.node_limits import NodeLimits
from tests.integration.booted import CannotBootError
from tests.integration.machine_site import cancel_all, is_in_service, sbatch, set_up, srun
from tests.integration.simulated import ESCAPE, FILL
from tests.integration.virtual import VirtualMachine, virtual_machine

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(7200)]

_LAYOUT = ("3g.40gb", "3g.40gb")


@pytest.fixture(scope="module", params=["bookworm", "trixie"])
def machine(
    request: pytest.FixtureRequest, full_scale: bool, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VirtualMachine]:
    """Set up by the admin guide from packages alone, then started again: it comes up by itself."""
    if not full_scale:
        pytest.skip("a virtual machine: SLUICE_TEST_SCALE=full")
    try:
        with virtual_machine(tmp_path_factory.mktemp("machine") / "sluice", request.param) as made:
            set_up(made, request.param)
            made.reboot()
            is_in_service(made)
            yield made
    except CannotBootError as error:
        pytest.skip(str(error))


# ---- what the kernel enforces ----


def test_the_machine_is_debian_with_its_own_kernel_and_unified_cgroups(machine: VirtualMachine) -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+.*-amd64", machine.run("uname", "-r"))
    assert (
        machine.run("cat", "/proc/self/cgroup").startswith("0::/")
        and machine.run("ps", "-o", "comm=", "1") == "systemd"
    )
    controllers = machine.run("cat", "/sys/fs/cgroup/cgroup.controllers").split()
    assert {"cpuset", "cpu", "memory"} <= set(controllers)
    failed = machine.run("systemctl", "list-units", "--failed", "--plain", "--no-legend")
    assert failed == ""


def test_a_task_runs_on_the_cores_that_it_was_given(machine: VirtualMachine) -> None:
    count = "import os; print(len(os.sched_getaffinity(0)))"
    group = "cat /sys/fs/cgroup$(cut -d: -f3 /proc/self/cgroup)/cpuset.cpus.effective;"
    group += "taskset -pc 0-1 $$ >/dev/null || true;"
    assert srun(machine, "--cpus-per-task=2", "python3", "-c", count) == "2"
    cores, after = srun(machine, "--cpus-per-task=1", "sh", "-c", f'{group} python3 -c "{count}"').splitlines()
    assert re.fullmatch(r"[01]", cores) and after == "1"  # it cannot take the other one either


def test_a_task_has_the_memory_that_it_asked_for(machine: VirtualMachine) -> None:
    take = "import sys; held = bytearray(int(sys.argv[1]) << 20); print(len(held) >> 20)"
    assert srun(machine, "--mem=300", "python3", "-c", take, "200") == "200"
    said = srun(machine, "--mem=100", "python3", "-c", take, "400", check=False)
    assert "400" not in said.split() and re.search(r"oom|Out Of Memory", said, re.IGNORECASE), said


def test_what_a_step_used_is_gathered_from_its_cgroup(machine: VirtualMachine) -> None:
    take = "import time; held = bytearray(150 << 20); time.sleep(3600)"
    job = sbatch(machine, "--mem=300", f"--wrap=srun python3 -c '{take}'")

    def most() -> float:
        said = machine.run("sstat", "--noheader", "--parsable2", "--format=MaxRSS", "--jobs", f"{job}.0", check=False)
        found = re.fullmatch(r"([\d.]+)([KMG]?)", said)
        return float(found[1]) / {"": 1 << 20, "K": 1 << 10, "M": 1, "G": 2**-10}[found[2]] if found else 0

    try:
        machine.wait(lambda: most() >= 150)
        assert most() < 2.2 * 150  # 22.05 adds anon_thp to anon, which includes it: huge pages count twice
    finally:
        cancel_all(machine)


# ---- GPUs ----


def test_a_job_opens_its_gpu_and_no_other(machine: VirtualMachine) -> None:
    tries = 'for gpu in 0 1; do (exec 3<>/dev/nvidia$gpu) 2>&1 | grep -o "No such device or\\|not permitted"; done'
    assert sorted(srun(machine, "--gpus=1", "sh", "-c", tries).splitlines()) == ["No such device or", "not permitted"]


def test_a_job_has_the_gpu_memory_that_it_asked_for_and_no_more(machine: VirtualMachine) -> None:
    filled, code = srun(machine, "--gpu-mem=2G", "python3", FILL, "9999").split()
    assert 1400 < int(filled) < 2048 and code == "2"  # its context counts; 2: out of memory


def test_a_process_that_escapes_the_limiter_is_ended(machine: VirtualMachine) -> None:
    steps = f"srun --quiet {ESCAPE} python3 {FILL} 8192 60; echo status $?; srun --quiet echo next"
    machine.write("/tmp/over.sh", f"#!/bin/sh\necho job $SLURM_JOB_ID; {steps}\n", "755")
    machine.run("sbatch", "--wait", "--gpu-mem=2G", "--output=/tmp/over.out", "/tmp/over.sh", user="alice")
    said = machine.run("cat", "/tmp/over.out")
    assert "limit 2G; step 0 is ended" in said and "status 137" in said and said.endswith("next"), said


# ---- a reboot ----


def layouts(machine: VirtualMachine) -> list[str]:
    """Of each GPU, as the driver has it."""
    program = (
        "import json; from pathlib import Path; from gpu_sim.fields import get_values;"
        "print(json.dumps([get_values(Path('/run/sluice-sim'), gpu)['mig_layout'] for gpu in (0, 1)]))"
    )
    return [str(one) for one in json.loads(machine.run("/opt/sluice/bin/python3", "-c", program))]


def test_a_layout_of_mig_instances_comes_back_with_the_machine(machine: VirtualMachine) -> None:
    machine.write("/etc/slurm/sluice.node.json", NodePolicy(limits=NodeLimits(mig={"sluice:0": _LAYOUT})).render())
    first = machine.run("sluice", "mig", "apply", check=False)
    assert "restart slurmctld and the node's slurmd" in first
    machine.shell("systemctl restart slurmctld; systemctl restart slurmd")
    machine.wait(lambda: "nothing to change" in machine.run("sluice", "mig", "apply", check=False))
    machine.wait(lambda: machine.run("sinfo", "--noheader", "--format=%t") == "idle")
    laid_out, gres = layouts(machine), machine.run("cat", "/etc/slurm/gres.sluice.conf")
    assert laid_out[0].split(",") == list(_LAYOUT) and gres.count("nvidia-cap") >= 2

    machine.reboot()
    is_in_service(machine)
    assert layouts(machine) == laid_out and machine.run("cat", "/etc/slurm/gres.sluice.conf") == gres
    assert "3g.40gb" in machine.journal("sluice-mig")
    assert machine.run("sinfo", "--noheader", "--format=%t") == "idle"
    shown = machine.run("sinfo", "--noheader", "--format=%G")
    kind = re.search(r"gpu:([^:(]*3g[^:(]*):2", shown)
    assert kind, shown
    assert machine.shell("sluice probe --drop /var/lib/sluice/inventory 2>/dev/null; sluice gres write --diff") == ""
    filled, code = srun(machine, f"--gres=gpu:{kind[1]}:1", "python3", FILL, "99999").split()
    assert 38000 < int(filled) < 41000 and code == "2"


# ---- power cuts ----


class Submissions:
    """Jobs that are submitted one after the other, until the machine is gone; `acknowledged`: their numbers."""

    def __init__(self, machine: VirtualMachine) -> None:
        submit = "while :; do sbatch --parsable --requeue --mem=10 --output=/dev/null --wrap='sleep 3600'; done"
        self.acknowledged: list[int] = []
        self._process = subprocess.Popen(
            machine.command("sh", "-c", submit, user="alice"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.endswith("\n"):
                self.acknowledged.append(int(line))

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()


@pytest.mark.parametrize("cut", [1, 2])
def test_no_acknowledged_job_is_lost_when_the_power_is_cut(machine: VirtualMachine, cut: int) -> None:
    """With jobs that hold GPU memory, submissions under way and the failover journal: all comes back without hands."""
    laid_out = layouts(machine)
    held = [int(sbatch(machine, "--mem=50", "--gpu-mem=1G", f"--wrap=python3 {FILL} 500 3600")) for _ in range(2)]
    machine.wait(lambda: len(machine.run("squeue", "--noheader", "--states=running").splitlines()) >= 2)
    submissions = Submissions(machine)
    try:
        machine.wait(lambda: len(submissions.acknowledged) >= 5 * cut)
        time.sleep(1.7 * cut)  # at another moment of what slurmctld saves now and then
    finally:
        machine.power_cut()
        submissions.end()
    acknowledged = {*held, *submissions.acknowledged}
    machine.power_on()
    is_in_service(machine)
    assert layouts(machine) == laid_out
    known = {int(word) for word in machine.run("squeue", "--noheader", "--states=all", "--format=%A").split()}
    assert acknowledged <= known, acknowledged - known
    waiting = machine.run("squeue", "--noheader", "--states=pending,running,completing", "--format=%A").split()
    assert acknowledged <= set(map(int, waiting))  # none has ended: those that ran are requeued
    refused = [line for line in machine.journal("sluice-agent").splitlines() if "level=error" in line]
    assert refused == []
    cancel_all(machine)
    machine.wait(lambda: machine.run("sinfo", "--noheader", "--format=%t") == "idle")
    assert srun(machine, "--gpu-mem=2G", "python3", FILL, "1000").split() == ["1000", "0"]
