"""Sluice under systemd, as an admin sets it up: Debian's tree boots by systemd-nspawn with Slurm's units and Sluice's.

One machine is controller and node. It has simulated GPUs and cgroups of version 2. What differs from hardware: the
libraries of simulated drivers, /dev below it, and the view of cgroups that this kernel needs (a drop-in for slurmd).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest

import gpu_sim
from dev_cluster.slurm_tree import SlurmTree
from gres_probe.machine import Machine as Kernel
from policy.compiled import FILE_NAME, CompiledPolicy, Tenant
from policy.document import parse
from policy.service_jobs import CALLERS_FILE, compile_services
from policy.service_jobs import FILE_NAME as SERVICES_FILE
from sluice.base.run import run_command
from sluice.plugin.builder import build_plugins
from sluice.plugin.site import find_plugin_dir
from sluice.plugin.sources import SourcesUnavailableError, distribution_source
from tests.integration.booted import (
    HYBRID,
    SLUICE,
    SOURCES,
    CannotBootError,
    Machine,
    installed,
    nspawn,
    slurm_conf,
    unified_hierarchy,
)
from tests.integration.settled import until
from tests.integration.simulated import ESCAPE, FILL, SIM, simulate_driver
from tests.integration.versions import NATIVE_FIRST

pytestmark = pytest.mark.cluster

_ROOT = Path(__file__).resolve().parents[2]
_LIMIT = 2048  # MiB
_HEALTH = "/usr/libexec/sluice/sluice-health"
_PLATFORM = """name: boot
description: two L40S, and far more memory than the machine that pretends to have them
cpu:
  sockets: {0.sockets}
  cores_per_socket: {0.cores_per_socket}
  threads_per_core: {0.threads_per_core}
  numa_nodes: 1
  memory_mib: 4194304
drivers:
  nvidia: {{version: 550.90.07, runtime: 12040}}
gpus:
  - {{model: l40s-48gb, pci: '0000:01:00.0', numa: 0, under: 'pci0000:00/0000:00:01.1'}}
  - {{model: l40s-48gb, pci: '0000:41:00.0', numa: 0, under: 'pci0000:40/0000:40:01.1'}}
"""


@pytest.fixture(scope="module", params=NATIVE_FIRST)
def machine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """Set up, and booted to its multi-user.target."""
    newer = request.param != "native"
    tree = SlurmTree(root=request.getfixturevalue("trixie_root" if newer else "bookworm_root"))
    assert tree.root is not None
    folder = tmp_path_factory.mktemp("boot")
    plugins, sim = folder / "plugins", folder / "sim"
    plugins.mkdir()
    try:
        source = distribution_source(tree.version(), suite=tree.suite())
    except SourcesUnavailableError as error:
        cannot(f"no sources of Slurm: {error}")
    build_plugins(source, plugins, plugin_dir=find_plugin_dir(tree.root), root=tree.root)
    (folder / "boot.yaml").write_text(_PLATFORM.format(Kernel().cpu_layout()))
    gpu_sim.write_node_state(sim, gpu_sim.load_platform(folder / "boot.yaml"), "sluice")
    binds = [f"--bind-ro={plugins}:/root/plugins", f"--bind={sim}:{SIM}", *installed(folder, tree.root)]
    try:
        with nspawn(tree.root, folder, binds) as made:
            _set_up(made, sim)
            made.run("systemctl", "start", "--no-block", "multi-user.target")
            made.wait(lambda: made.is_active("multi-user.target"))
            made.wait(lambda: made.run("sinfo", "--noheader", "--format=%t", check=False) == "idle")
            yield made
    except CannotBootError as error:
        cannot(str(error))


def cannot(why: str) -> NoReturn:
    """These tests cannot run here; where they must, as in CI, that is a failure."""
    if os.environ.get("SLUICE_BOOT") == "require":
        pytest.fail(why)
    pytest.skip(why)


def _set_up(machine: Machine, sim: Path) -> None:
    """What the admin guide says, before the units start for the first time."""
    # The machine: its name and address, its users, its GPUs.
    machine.write("/etc/hosts", "127.0.0.1 localhost\n192.0.2.1 sluice\n")
    machine.shell("ip link set lo up; ip address add 192.0.2.1/32 dev lo; useradd --create-home alice")
    simulate_driver(machine, sim)
    # Slurm
    machine.shell(
        "mkdir -p /var/log/slurm /var/spool/slurmctld /var/spool/slurmd;"
        "chown slurm /var/log/slurm /var/spool/slurmctld;"
        "systemctl disable mariadb slurmdbd; systemctl enable munge slurmctld slurmd"
    )
    more = ("TaskPlugin=task/cgroup", "JobAcctGatherType=jobacct_gather/linux", "Include sluice.plugins.conf")
    machine.write("/etc/slurm/slurm.conf", slurm_conf("boot", *more))
    machine.write("/etc/slurm/cgroup.conf", "ConstrainDevices=yes\n")
    machine.write("/etc/slurm/gres.conf", "Include gres.sluice.conf\n")
    machine.write("/etc/slurm/plugstack.conf", "include /etc/slurm/plugstack.conf.d/*.conf\n")
    # Sluice
    machine.shell(
        f"ln -s {SLUICE} /usr/local/bin/; mkdir -p /usr/libexec;"
        f"ln -s {SOURCES}/prolog_epilog/programs /usr/libexec/sluice;"
        f"cp {SOURCES}/etc/systemd/sluice-* /etc/systemd/system/; mkdir -p /var/lib/sluice/inventory;"
        f"{SLUICE} probe --json --sys-root {SIM}/sys >/var/lib/sluice/inventory/sluice.json;"
        f"touch /etc/slurm/nodes.sluice.conf /etc/slurm/gres.sluice.conf; {SLUICE} gres write;"
        f"{SLUICE} plugin install --limits --build /root/plugins; {SLUICE} plugin level admit;"
    )
    machine.write(
        f"/etc/slurm/{FILE_NAME}", CompiledPolicy(source="test", tenants=[Tenant(account="physics")]).render()
    )
    machine.shell("systemctl daemon-reload; systemctl enable sluice-agent sluice-controllerd sluice-explaind")


# ---- the order of a boot ----


def test_slurmd_starts_when_the_agent_answers(machine: Machine) -> None:
    """The guard, which is the unit's main process, runs for a second and more before its agent answers."""
    begun = int(machine.shown("sluice-agent", "ExecMainStartTimestampMonotonic"))
    answers = machine.logged_at("sluice-agent", "action=ready")
    active = int(machine.shown("sluice-agent", "ActiveEnterTimestampMonotonic"))
    slurmd = int(machine.shown("slurmd", "ExecMainStartTimestampMonotonic"))
    assert begun < answers < slurmd and begun + 300_000 < active < slurmd
    assert machine.shown("sluice-agent", "StatusText") == "the agent answers"
    assert "action=refused" not in machine.journal("sluice-agent")


def test_all_units_are_active_and_none_was_started_twice(machine: Machine) -> None:
    units = ["munge", "slurmctld", "slurmd", "sluice-agent", "sluice-controllerd", "sluice-explaind"]
    assert [unit for unit in units if not machine.is_active(unit)] == []
    assert {unit: machine.shown(unit, "NRestarts") for unit in units} == dict.fromkeys(units, "0")
    failed = machine.run("systemctl", "list-units", "--failed", "--plain", "--no-legend").splitlines()
    assert [line for line in failed if "sluice" in line or "slurm" in line or "munge" in line] == []


def test_the_node_registers_with_the_memory_that_sluice_wrote(machine: Machine) -> None:
    """This machine's, although the simulated platform has 4 TiB."""
    total = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    memory = int(machine.run("sinfo", "--noheader", "--format=%m"))
    assert memory <= int(total.split()[1]) // 1024 < memory + 1024


def test_the_doctor_reports_what_this_site_and_kernel_lack_and_nothing_else(machine: Machine) -> None:
    checks = json.loads(machine.run("sluice", "doctor", "--json", check=False))["answers"]
    found = {(one["check"], one["verdict"]) for one in checks if one["verdict"] != "ok"}
    forced = {("cgroup", "fail")} if HYBRID else set()
    missing = {("cgroup", "warn"), ("backup-controller", "warn"), ("accounting", "fail"), ("backups", "warn")}
    missing |= {("services", "skip"), ("batches", "skip"), ("traces", "skip")}  # there are none
    assert found - {("time", "warn"), ("drivers", "skip"), ("rdma", "skip")} == forced | missing, checks
    said = "\n".join(one["what"] for one in checks)
    assert "no eBPF" not in said and ("hybrid cgroups" in said) is HYBRID


# ---- jobs ----


def srun(machine: Machine, *words: str, check: bool = True) -> str:
    """A step of alice's."""
    return machine.run("srun", "--quiet", *words, user="alice", check=check)


def test_a_job_has_the_memory_that_it_asked_for_and_no_more(machine: Machine) -> None:
    filled, code = srun(machine, "--gpu-mem=2G", "python3", FILL, "9999").split()
    assert _LIMIT - 600 < int(filled) < _LIMIT and code == "2"  # its context counts; 2: out of memory


def test_a_process_over_the_limit_is_ended_and_its_slurmstepd_is_not(machine: Machine) -> None:
    """The tasks' status reaches srun, and the batch script goes on with its next step."""
    steps = f"srun --quiet {ESCAPE} python3 {FILL} 8192 60; echo status $?; srun --quiet echo next"
    machine.write("/tmp/over.sh", f"#!/bin/sh\necho job $SLURM_JOB_ID; {steps}\n", "755")
    machine.run("sbatch", "--wait", "--gpu-mem=2G", "--output=/tmp/over.out", "/tmp/over.sh", user="alice")
    said = machine.run("cat", "/tmp/over.out")
    assert "limit 2G; step 0 is ended" in said and "status 137" in said and said.endswith("next"), said
    record = machine.run("sluice", "agent", "record", said.split()[1])
    assert "returned clean" in record and " end " in record


def test_a_job_opens_its_gpu_and_no_other(machine: Machine) -> None:
    tries = 'for gpu in 0 1; do (exec 3<>/dev/nvidia$gpu) 2>&1 | grep -o "No such device or\\|not permitted"; done'
    assert sorted(srun(machine, "--gpus=1", "sh", "-c", tries).splitlines()) == ["No such device or", "not permitted"]


# ---- restarts ----


@contextmanager
def running_job(machine: Machine) -> Iterator[subprocess.Popen[str]]:
    """A job that holds 1,000 MiB of its 2 GiB, and at a line of input escapes and takes more."""
    job = f"python3 {FILL} 1000 120 & read -r line && {ESCAPE} python3 {FILL} 8192 60"
    words = machine.command("srun", "--quiet", "--gpu-mem=2G", "sh", "-c", job, user="alice")
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "1000 0\n"
            yield process
        finally:
            process.kill()
            machine.run("scancel", "--full", "--user=alice")
            machine.wait(lambda: not machine.run("squeue", "--noheader"))


def is_ended(job: subprocess.Popen[str]) -> None:
    """What the job does next is over its limit."""
    said, _ = job.communicate("\n", timeout=60)
    assert "step 0 is ended" in said, said


def test_a_restart_of_the_unit_keeps_limits_and_is_done_when_the_agent_answers(machine: Machine) -> None:
    with running_job(machine) as job:
        machine.run("systemctl", "restart", "sluice-agent")
        assert "limiter" in machine.run("sluice", "agent", "status").splitlines()[-1]  # at once, with the job's limit
        is_ended(job)
    assert machine.shown("sluice-agent", "NRestarts") == "0"


def test_systemd_starts_a_guard_again_that_was_killed(machine: Machine) -> None:
    before = machine.shown("sluice-agent", "MainPID")
    with running_job(machine) as job:
        machine.run("systemctl", "kill", "--kill-who=main", "--signal=KILL", "sluice-agent")
        machine.wait(lambda: machine.shown("sluice-agent", "NRestarts") == "1" and machine.is_active("sluice-agent"))
        assert machine.shown("sluice-agent", "MainPID") != before
        is_ended(job)


def test_a_controllerd_that_is_not_there_costs_one_line(machine: Machine) -> None:
    def lines(words: str) -> list[str]:
        return [line for line in machine.journal("sluice-agent")[before:].splitlines() if words in line]

    before = len(machine.journal("sluice-agent"))  # a node that asks while it stops reports it then
    machine.run("systemctl", "stop", "sluice-controllerd")
    try:
        for _ in range(3):  # each ends with a record to send, a health report and one of what runs
            srun(machine, "--gpu-mem=2G", "true")
            machine.run(_HEALTH, check=False)
        machine.wait(lambda: lines("no controller accepts"))
        time.sleep(6)  # the courier has tried three times
        assert len(lines("no controller accepts")) == 1, lines("no controller accepts")
    finally:
        machine.run("systemctl", "start", "sluice-controllerd")
    machine.wait(lambda: lines("action=sent records=") and lines("action=recovered"))
    assert len(lines("no controller accepts")) == 1, lines("no controller accepts")


# ---- a model as a service ----

_URL, _CERTIFICATE, _ENOUGH = "https://192.0.2.1:6825/v1", "/etc/sluice/gateway.pem", "/var/tmp/enough"
_CLIENTS = f"{SOURCES}/tests/integration/gateway_clients.py"
_ENGINE = f"{SOURCES}/tests/integration/small_engine.py"
_SERVING = ("sluice-actd", "sluice-replicad", "sluice-gateway", "sluice-gateway-rpc")
_SERVICES = f"""version: 1
tenants:
  physics: {{members: [alice]}}
services:
  words:
    tenant: physics
    user: alice
    engine: openai
    command: [/usr/bin/python3, {_ENGINE}, '{{socket}}', '{{service}}', '0.05', {_ENOUGH}]
    cpus: 1
    memory: 100M
    replicas: {{least: 1, most: 1, slots: 16}}
    walltime: 1h
"""
_DROP_IN = f"""[Service]
ExecStart=
ExecStart=/opt/sluice/bin/sluice gateway --address 192.0.2.1 --certificate {_CERTIFICATE} --key /etc/sluice/gateway.key
"""


@dataclass(frozen=True)
class Serving:
    """The machine with a service and its gateway; `key`: alice's."""

    machine: Machine
    folder: Path
    key: str

    def certify(self) -> None:
        """Another certificate."""
        where = ["-keyout", self.folder / "key", "-out", self.folder / "pem"]
        name = ["-subj", "/CN=sluice", "-addext", "subjectAltName=IP:192.0.2.1"]
        made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        run_command([*made, "-days", "2", *where, *name])
        self.machine.write("/etc/sluice/gateway.key", (self.folder / "key").read_text(), "640")
        self.machine.write(_CERTIFICATE, (self.folder / "pem").read_text())
        self.machine.run("chgrp", "sluice-gateway", "/etc/sluice/gateway.key")

    def shows(self) -> str:
        """The gateway's certificate, as clients see it."""
        code = "import ssl; print(ssl.get_server_certificate(('192.0.2.1', 6825)), end='')"
        return f"{self.machine.run('/opt/sluice/bin/python3', '-c', code)}\n"

    @contextmanager
    def client(self, do: str) -> Iterator[subprocess.Popen[str]]:
        """One that has begun: it has said its first line."""
        words = ["/opt/sluice/bin/python3", _CLIENTS, do, _URL, self.key, "words", _CERTIFICATE]
        with subprocess.Popen(
            self.machine.command(*words, user="alice"),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        ) as process:  # fmt: skip
            try:
                yield process
            finally:
                process.kill()

    @contextmanager
    def stream(self) -> Iterator[Callable[[], None]]:
        """One in the middle of a stream, which must be whole in the end; a call waits for twenty more numbers."""
        self.machine.run("rm", "-f", _ENOUGH)
        said: list[str] = []

        def go_on() -> None:
            assert process.stdout is not None
            said.extend(process.stdout.readline().strip() for _ in range(20))
            assert said[-1].isdecimal(), said

        with self.client("stream") as process:
            go_on()
            yield go_on
            go_on()
            self.machine.run("touch", _ENOUGH)
            assert process.stdout is not None
            said += process.stdout.read().split()  # not communicate(), which would pass over what is read ahead
        count = len(said) - 3
        assert said == [*map(str, range(1, count + 1)), "stop", "tokens", str(count)]

    def processes(self, unit: str = "sluice-gateway") -> set[str]:
        """Of a unit, its main one first."""
        return set(self.machine.run("cat", f"/sys/fs/cgroup/system.slice/{unit}.service/cgroup.procs").split())


@pytest.fixture(scope="module")
def serving(machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> Serving:
    """Set up as docs/serve-operations.md and docs/serve-gateway.md say; the gateway listens when systemctl returns."""
    policy = compile_services(parse(_SERVICES))
    for user in ("sluice-serve", "sluice-gateway"):
        machine.run("adduser", "--quiet", "--system", "--group", user)
    machine.write(f"/etc/slurm/{SERVICES_FILE}", policy.render())
    machine.write(f"/etc/slurm/{CALLERS_FILE}", policy.render_callers(), "640")
    machine.run("chgrp", "sluice-serve", f"/etc/slurm/{CALLERS_FILE}")
    made = f"mkdir -p /etc/sluice; {SLUICE} token create alice --for 1h --scope serve 2>/dev/null"
    found = Serving(machine, tmp_path_factory.mktemp("serving"), machine.shell(made))
    machine.run("chgrp", "sluice-gateway", "/etc/sluice/tokens.json")
    found.certify()
    machine.write("/etc/systemd/system/sluice-gateway.service.d/site.conf", _DROP_IN)
    machine.shell(
        f"systemctl daemon-reload; systemctl restart sluice-controllerd; systemctl start {' '.join(_SERVING)}"
    )
    return found


def test_a_service_is_answered_by_a_job_through_units_that_have_no_rights(serving: Serving) -> None:
    machine = serving.machine
    with serving.stream():
        assert machine.run("squeue", "--noheader", "--format=%u %T") == "alice RUNNING"
    assert [unit for unit in _SERVING if not machine.is_active(unit)] == []
    assert {machine.shown(unit, "NRestarts") for unit in _SERVING} == {"0"}
    for unit in _SERVING[1:]:
        user = "sluice-serve" if unit == "sluice-replicad" else "sluice-gateway"
        uid = machine.run("id", "--user", user)
        for process in serving.processes(unit):
            lines = machine.run("cat", f"/proc/{process}/status").splitlines()
            status = {name: words.split() for name, _, words in (line.partition(":") for line in lines)}
            assert status["Uid"] == [uid] * 4 and status["NoNewPrivs"] == ["1"] and status["Seccomp"] == ["2"], status
            assert {int(status[name][0], 16) for name in ("CapEff", "CapPrm", "CapBnd", "CapAmb")} == {0}
        inside = ["nsenter", "--mount", "--target", machine.shown(unit, "MainPID")]
        assert machine.run(*inside, "ls", "-A", "/etc/munge") == "", "MUNGE's key"
        assert "Read-only file system" in machine.run(*inside, "touch", "/etc/slurm/slurm.conf", check=False)


def test_a_reload_drops_no_connection_and_takes_the_certificate_that_is_there(serving: Serving) -> None:
    machine = serving.machine
    main, before = machine.shown("sluice-gateway", "MainPID"), serving.processes()
    assert serving.shows() == (serving.folder / "pem").read_text()
    with serving.client("crowd") as crowd, serving.stream():
        assert crowd.stdout is not None and crowd.stdout.readline() == "begun\n"
        machine.run("systemctl", "reload", "sluice-gateway")
        machine.wait(lambda: len(serving.processes() - before) >= 2)
        machine.run("systemctl", "restart", "sluice-replicad")  # the gateway goes on with what it knew
        machine.wait(lambda: "answers again" in machine.journal("sluice-gateway"))
        assert crowd.stdin is not None
        crowd.stdin.close()
        *_, last = crowd.stdout.read().splitlines()  # each of them says that it has begun
        number, _, failed = last.partition(" ")
        assert int(number) > 2 and failed == "[]"
    serving.certify()
    machine.run("systemctl", "reload", "sluice-gateway")
    machine.wait(lambda: serving.shows() == (serving.folder / "pem").read_text())
    machine.wait(lambda: not before & serving.processes() - {main})
    with serving.stream():
        pass
    assert machine.shown("sluice-gateway", "MainPID") == main and machine.shown("sluice-gateway", "NRestarts") == "0"


def test_a_restart_waits_for_streams(serving: Serving) -> None:
    machine = serving.machine
    main = machine.shown("sluice-gateway", "MainPID")
    with serving.stream():
        machine.run("systemctl", "restart", "--no-block", "sluice-gateway")
        machine.wait(lambda: machine.shown("sluice-gateway", "ActiveState") == "deactivating")
    machine.wait(lambda: machine.is_active("sluice-gateway"))
    assert machine.shown("sluice-gateway", "MainPID") != main
    with serving.stream():
        pass


def test_streams_outlive_a_gateways_parent_that_was_killed(serving: Serving) -> None:
    machine = serving.machine
    with serving.stream():
        machine.run("systemctl", "kill", "--kill-who=main", "--signal=KILL", "sluice-gateway")
        machine.wait(
            lambda: machine.shown("sluice-gateway", "NRestarts") == "1" and machine.is_active("sluice-gateway")
        )
    with serving.stream():
        pass


# ---- what is left ----


def test_nothing_is_left_of_a_machine_whose_test_is_killed(bookworm_root: Path, tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from tests.integration.booted import nspawn\n"
        "with nspawn(Path(sys.argv[1]), Path(sys.argv[2])) as machine:\n"
        "    print(machine.pid, flush=True); time.sleep(600)\n"
    )
    words = [sys.executable, "-c", program, str(bookworm_root), str(tmp_path)]
    with subprocess.Popen(words, cwd=_ROOT, stdout=subprocess.PIPE, text=True) as test:
        try:
            assert test.stdout is not None
            pid = test.stdout.readline().strip()
            unified = unified_hierarchy()
            if not pid or unified is None:
                cannot("no machine boots here")
            group = unified / f"sluice-test-{test.pid}-sluice"
            assert group.is_dir() and Path(f"/proc/{pid}").is_dir()
        finally:
            test.kill()
    until(lambda: not group.exists())
    assert not Path(f"/proc/{pid}").exists()
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()
