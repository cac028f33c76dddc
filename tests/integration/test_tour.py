"""The admin guide as a new administrator follows it: from stock Slurm to level place, an upgrade, and back.

A controller and two nodes, each booted by systemd, Debian's Slurm with accounting, Sluice from its packages alone. What
is run is what the guide says (`guide.py`). With SLUICE_TEST_SCALE=full: it builds packages twice.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest

import gpu_sim
from tests.integration.booted import DEBIAN_CONF, CannotBootError, Machine, connect, nspawn
from tests.integration.guide import commands
from tests.integration.package_builds import build, clone, committed_later, installable, kept_packages
from tests.integration.simulated import FILL, SIM, gpu_platform, simulate_driver

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3600)]

_ADDRESSES = {"ctl": "192.0.2.1", "n1": "192.0.2.2", "n2": "192.0.2.3"}
_HOSTS = {"the controller": ["ctl"], "each node": ["n1", "n2"], "all hosts": list(_ADDRESSES)}
_STOCK = {
    "slurm.conf": f"""ClusterName=tour
SlurmctldHost=ctl
{DEBIAN_CONF}TaskPlugin=task/cgroup
JobAcctGatherType=jobacct_gather/linux
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=ctl
AccountingStorageTRES=gres/gpu,gres/shard
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=100
PriorityType=priority/multifactor
ReturnToService=2
NodeName=n[1-2] CPUs={os.cpu_count()} RealMemory=1000
PartitionName=main Nodes=ALL Default=YES
""",
    "gres.conf": "# no GPUs yet\n",
    "cgroup.conf": "ConstrainDevices=yes\n",
    "plugstack.conf": "# no plugins\n",
    "slurmdbd.conf": """AuthType=auth/munge
DbdHost=ctl
SlurmUser=slurm
LogFile=/var/log/slurm/slurmdbd.log
PidFile=/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StoragePass=tour
StorageUser=slurm
""",
}
_DATABASE = """
mariadb-install-db --user=mysql >/dev/null
systemctl start mariadb
mariadb -e "create database slurm_acct_db; grant all on slurm_acct_db.* to slurm@localhost identified by 'tour'"
systemctl start slurmdbd
until sacctmgr -n list cluster >/dev/null 2>&1; do sleep 0.3; done
sacctmgr -i add cluster tour >/dev/null
sacctmgr -i add account physics >/dev/null
sacctmgr -i add user alice account=physics >/dev/null
"""
# What dpkg, Slurm, its database and a running system keep.
_NOT_OURS: tuple[str, ...] = (
    "/proc",
    "/sys",
    "/dev",
    "/run",
    "/tmp",
    "/var/tmp",
    "/root",
    "/var/lib/dpkg",
    "/var/lib/apt",
)
_NOT_OURS += ("/var/lib/mysql", "/var/lib/systemd", "/var/log", "/var/cache", "/var/spool")


class Tour:
    """The site's machines, by name."""

    def __init__(self, suite: str, machines: dict[str, Machine]) -> None:
        self.suite = suite
        self.machines = machines
        self.machine = machines["ctl"]
        self.nodes = [machines["n1"], machines["n2"]]
        self.packages = ""

    def follow(self, heading: str) -> None:
        """Run a section of the admin guide."""
        for hosts, script in commands(heading):
            for name in _HOSTS[hosts]:
                self.machines[name].run("bash", "-euc", f"cd {self.packages}\n{script}")

    def bring(self, packages: Sequence[Path], folder: str) -> None:
        """Packages to each machine, for what is followed next."""
        for machine in self.machines.values():
            machine.copy(packages, folder)
        self.packages = folder

    def is_in_service(self) -> None:
        """The nodes have registered with this slurmctld: before, it tells no prolog of the job's GPUs."""
        shown = ("scontrol", "show", "nodes")
        self.machine.wait(lambda: "SlurmdStartTime=None" not in self.machine.run(*shown, check=False))
        self.machine.wait(lambda: set(self.machine.run("sinfo", "-hNo", "%t", check=False).split()) == {"idle"})

    def srun(self, *words: str) -> str:
        """A job of alice's."""
        return self.machine.run("srun", "--quiet", *words, user="alice")

    def has_stock_jobs(self) -> None:
        self.is_in_service()
        assert sorted(self.srun("-N2", "hostname").split()) == ["n1", "n2"]

    def limits(self, request: str) -> None:
        """A job gets 2 GiB of a GPU, its context included, and no more."""
        self.is_in_service()
        said = self.srun(request, "python3", FILL, "9999")
        ((filled, code),) = filled_by_tasks(said)
        assert 1400 < int(filled) < 2048 and code == "2", said  # 2: out of memory


@pytest.fixture(scope="module", params=["bookworm", "trixie"])
def tour(request: pytest.FixtureRequest, full_scale: bool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tour]:
    """Stock Slurm in service, and the packages at hand."""
    if not full_scale:
        pytest.skip("packages, twice: SLUICE_TEST_SCALE=full")
    suite = request.param
    tree = request.getfixturevalue(f"{suite}_root")
    folder = tmp_path_factory.mktemp("tour")
    shared = folder / "slurm"
    shared.mkdir()
    for name, text in _STOCK.items():
        (shared / name).write_text(text)
    (shared / "munge.key").write_bytes(bytes(range(128)))
    try:
        with ExitStack() as up:
            machines = {name: up.enter_context(_booted(name, tree, folder)) for name in _ADDRESSES}
            connect({_ADDRESSES[name]: machine for name, machine in machines.items()})
            site = Tour(suite, machines)
            for name, machine in machines.items():
                machine.patience = 300.0  # three machines install packages, of which Python makes byte code
                _set_up(name, machine, folder / f"{name}-sim")
            _start(site)
            site.bring(kept_packages(suite), "/root/packages")
            yield site
    except CannotBootError as error:
        pytest.skip(str(error))


def _booted(name: str, tree: Path, folder: Path) -> AbstractContextManager[Machine]:
    """One of the site's machines, with two GPUs."""
    sim, platform, own = folder / f"{name}-sim", folder / "gpus.yaml", folder / name
    own.mkdir()
    platform.write_text(gpu_platform("l40s-48gb", 2, cores=2))
    gpu_sim.write_node_state(sim, gpu_sim.load_platform(platform), name)
    return nspawn(tree, own, [f"--bind={folder / 'slurm'}:/etc/slurm", f"--bind={sim}:{SIM}"], name=name)


def _set_up(name: str, machine: Machine, sim: Path) -> None:
    """What the site has before Sluice."""
    hosts = "".join(f"{address} {other}\n" for other, address in _ADDRESSES.items())
    machine.write("/etc/hosts", f"127.0.0.1 localhost\n{hosts}")
    machine.write("/etc/apt/apt.conf.d/unattended", 'APT::Get::Assume-Yes "true";\n')
    machine.shell(
        "useradd --uid 2001 --create-home alice; rm -f /usr/sbin/policy-rc.d;"
        "install -o munge -m 400 /etc/slurm/munge.key /etc/munge/munge.key;"
        "mkdir -p /var/log/slurm /var/spool/slurmctld /var/spool/slurmd;"
        "chown slurm /var/log/slurm /var/spool/slurmctld; systemctl disable mariadb slurmdbd slurmctld slurmd"
    )
    if name != "ctl":
        simulate_driver(machine, sim)
    machine.shell("systemctl daemon-reload; systemctl start munge")


def _start(site: Tour) -> None:
    site.machine.shell(
        "chown slurm /etc/slurm/slurmdbd.conf; chmod 600 /etc/slurm/slurmdbd.conf; rm /etc/slurm/munge.key"
    )
    site.machine.shell(f"{_DATABASE}\nsystemctl start slurmctld")
    for node in site.nodes:
        node.shell("systemctl start slurmd")


def _files(machine: Machine) -> set[str]:
    prune = [word for path in _NOT_OURS for word in ("-path", path, "-o")][:-1]
    return set(machine.run("find", "/", "-xdev", "(", *prune, ")", "-prune", "-o", "-print").splitlines())


def _configuration(controller: Machine) -> list[str]:
    """Slurm's files, and what slurmctld has in force."""
    shown = controller.shell("cd /etc/slurm; ls -A; cat *.conf; scontrol show config").splitlines()
    return [line for line in shown if not line.startswith(("BOOT_TIME", "Configuration data", "NEXT_JOB_ID"))]


def filled_by_tasks(said: str) -> list[tuple[str, str]]:
    """MiB and the driver's code that FILL printed in each task; the agent's warnings may be next to them."""
    return re.findall(r"^(\d+) (\d+)$", said, re.MULTILINE)


def upgrade_under_a_job(tour: Tour, packages: Sequence[Path]) -> None:
    """On each node a task holds 500 MiB before; what it gets after is what is left of its 2 GiB."""
    steps = f"python3 {FILL} 500 3600 & read -r line; python3 {FILL} 9999"
    words = ("srun", "--quiet", "-N2", "--gpu-mem=2G", "sh", "-c", steps)
    with subprocess.Popen(
        tour.machine.command(*words, user="alice"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as job:
        assert job.stdout is not None
        assert [job.stdout.readline() for _ in tour.nodes] == ["500 0\n"] * 2
        tour.bring(packages, "/root/newer")
        tour.follow("From packages")
        tour.follow("Upgrade")
        said, _ = job.communicate("\n", timeout=120)
    ends = filled_by_tasks(said)
    assert len(ends) == 2 and all(0 < int(filled) < 1548 and code == "2" for filled, code in ends), said
    assert job.returncode == 0


def test_from_stock_slurm_to_place_and_back(tour: Tour, tmp_path: Path) -> None:
    controller = tour.machine
    tour.has_stock_jobs()
    configuration = _configuration(controller)
    before = {name: _files(machine) for name, machine in tour.machines.items()}

    tour.follow("From packages")
    tour.has_stock_jobs()  # nothing of Slurm has changed

    tour.follow("Observe, and GRES that Sluice writes")
    tour.has_stock_jobs()
    assert controller.run("sinfo", "-hNo", "%G").count("gpu:l40s:2") == 2

    tour.follow("Enforce")
    tour.limits("--gres=shard:2048")

    tour.follow("Admit")
    tour.limits("--gpu-mem=2G")

    tour.follow("Shadow")
    tour.limits("--gpu-mem=2G")
    assert "Jobs that Sluice would have started earlier" in controller.run("sluice", "shadow", "report")

    tour.follow("Place")
    tour.limits("--gpu-mem=2G")
    assert '"level": "place"' in controller.run("sluice", "plugin", "status", "--json")

    newer = build(committed_later(clone(tmp_path / "newer")), tour.suite)
    upgrade_under_a_job(tour, installable(newer))
    tour.limits("--gpu-mem=2G")
    assert '"origin": "package"' in controller.run("sluice", "plugin", "status", "--json")

    # and back
    tour.follow("Uninstall")
    tour.has_stock_jobs()
    assert _configuration(controller) == configuration
    for name, machine in tour.machines.items():
        assert _files(machine) - before[name] == set(), name
