"""The Slurm of Debian sid, 26.05 or a later one: what the other modules that `make test-sid` runs there do not have.

Its plugins are built from public headers alone: job_submit and SPANK. Controllers take over, a cluster without MUNGE.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dev_cluster.cluster import DevCluster
from gres_probe.lint import RULES, Severity
from policy.compiled import CompiledPolicy, Tenant
from sluice.base.errors import SluiceError
from sluice.base.run import run_command
from sluice.base.slurm_version import SlurmVersion, format_slurm_version, parse_slurm_version
from sluice.plugin import install as installation
from sluice.plugin.builder import PluginBuild, build_plugins, find_source, read_build, write_manifest
from sluice.plugin.install import Places
from sluice.plugin.site import find_plugin_dir, read_site_options
from sluice.plugin.sources import SlurmSource
from sluice.plugin.status import check
from sluice.slurm import connect
from tests.integration.plugin_site import DESCRIPTION, PluginSite
from tests.integration.private_slurm import NODE, entered, free_ports, head, running, wrappers
from tests.integration.settled import PATIENCE, until
from tests.integration.topology_cases import CASES

pytestmark = [pytest.mark.cluster, pytest.mark.sid]
MakeCluster = Callable[..., DevCluster]
NAMES = {"job_submit_sluice.so", "libsluice_controller.so", "spank_sluice.so", "spank_sluice_limit.so"}


@pytest.fixture(scope="module")
def version(sid_root: Path) -> SlurmVersion:
    return parse_slurm_version(run_command(["chroot", sid_root, "slurmctld", "-V"]).stdout)


@pytest.fixture(scope="module")
def source(sid_root: Path, version: SlurmVersion) -> SlurmSource:
    try:
        return find_source(version, installed=sid_root / "usr/include", suite="sid")
    except SluiceError as error:
        if version[:2] == (26, 5):
            raise
        pytest.skip(f"sid has moved on: {error}")


@pytest.fixture(scope="module")
def build(source: SlurmSource, sid_root: Path, tmp_path_factory: pytest.TempPathFactory) -> PluginBuild:
    output = tmp_path_factory.mktemp("built")
    return build_plugins(source, output, plugin_dir=find_plugin_dir(sid_root), root=sid_root)


@pytest.fixture(scope="module")
def site(
    sid_root: Path, version: SlurmVersion, make_shared_cluster: MakeCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PluginSite]:
    """A site of stock Slurm; the tests follow its life in order."""
    cluster = make_shared_cluster(DESCRIPTION, root=sid_root)
    yield PluginSite(cluster, tmp_path_factory.mktemp("destdir"), version, sid_root)


def test_slurmctld_refuses_plugins_of_another_version(
    site: PluginSite, build: PluginBuild, source: SlurmSource, sid_root: Path, tmp_path: Path
) -> None:
    """Down to the last digit; by itself, where neither `install` nor the guard is in its way."""
    major, minor, micro = build.slurm
    shutil.copytree(source.folder / "slurm", tmp_path / "slurm")
    header = tmp_path / "slurm/slurm_version.h"
    before, after = (f"0x{major:02x}{minor:02x}{number:02x}" for number in (micro, micro + 1))
    text = header.read_text()
    assert before in text
    header.write_text(text.replace(before, after))
    next_one = SlurmSource(tmp_path, (major, minor, micro + 1), whole=False)
    cache = tmp_path / "cache"
    other = build_plugins(next_one, tmp_path / "other", plugin_dir=site.stock, root=sid_root, cache=cache)
    with pytest.raises(SluiceError, match=r"plugins fit one version only"):
        site.install(other)
    write_manifest(other.folder, build.slurm)
    site.install(read_build(other.folder))
    site.include()
    site.cluster.stop_daemon("slurmctld@ctl1")
    site.cluster.start_daemon("slurmctld@ctl1")
    daemons = site.cluster.daemons
    until(lambda: next(one for one in daemons() if one.name == "slurmctld@ctl1").status is not None)
    said = site.cluster.log_tail("slurmctld@ctl1", 20)
    assert f"job_submit_sluice.so version ({format_slurm_version(next_one.version)})" in said, said
    site.install(build)
    site.cluster.start_daemon("slurmctld@ctl1")
    site.wait_up()


def test_public_headers_give_job_submit_and_spank(site: PluginSite, build: PluginBuild, sid_root: Path) -> None:
    assert set(build.files) == NAMES
    assert site.loaded() == NAMES - {"spank_sluice.so", "spank_sluice_limit.so"}
    assert site.report()["plugins"] == ["job_submit"] and site.report()["level"] == "off"
    slurmctld, stock = sid_root / "usr/sbin/slurmctld-wlm", sid_root / site.stock.relative_to("/")
    places = Places(conf=site.cluster.layout.slurm, search=site.cluster.layout.folder / "search", systemd=None)
    findings = check(places, read_site_options(site.conf), slurm=site.version, slurmctld=slurmctld, stock=stock)
    assert [one for one in findings if one.kind != "ok"] == []
    done = site.cluster.run(["srun", "-n1", "-w", "n2", "hostname"], user="alice")
    assert (done.stdout, done.stderr) == ("n2\n", "")


def test_they_admit(site: PluginSite) -> None:
    site.set_policy(CompiledPolicy(source="test", tenants=[Tenant(account="physics", run_time_s=600)]))
    installation.write_level(site.places, "admit")
    site.wait(lambda: site.report()["level"] == "admit")

    def run(*words: str, user: str = "alice") -> subprocess.CompletedProcess[str]:
        return site.cluster.run(list(words), user=user, check=False)

    sbatch = ("sbatch", "-o", "/dev/null", "--parsable", "-H", "-A", "physics")
    assert "may run a job for 00:10:00 at most" in run(*sbatch, "-t", "20", "--wrap", "true").stderr
    unnamed = run("sbatch", "-H", "-t", "20", "--wrap", "true")  # whose its default account would be
    assert unnamed.returncode != 0 and "must name its account: submit with -A ACCOUNT" in unnamed.stderr
    job = run(*sbatch, "-t", "5", "--wrap", "true").stdout.strip()
    change = ("scontrol", "update", f"JobId={job}")
    refused = run(*change, "TimeLimit=20")
    assert refused.returncode != 0 and "a job's request cannot be changed; cancel the job" in refused.stderr
    assert run(*change, "Comment=again").returncode == 0
    assert run(*change, "TimeLimit=20", user="root").returncode == 0
    run("scancel", job)


@pytest.mark.parametrize("level", ["shadow", "place"])
def test_they_do_no_more(site: PluginSite, level: str) -> None:
    """Limits hold all the same: the file may be of before an upgrade of Slurm."""
    installation.write_level(site.places, "off")
    site.wait(lambda: site.report()["level"] == "off")
    installation.write_level(site.places, level)
    site.wait(lambda: site.report()["level_error"])
    assert f'"{level}": the plugins for this Slurm only admit' in site.report()["level_error"]
    assert site.report()["level"] == "admit"
    installation.write_level(site.places, "admit")
    site.wait(lambda: not site.report()["level_error"])


def test_uninstalled(site: PluginSite) -> None:
    installation.uninstall(site.places, read_site_options(site.conf))
    site.restart(guard=False)
    assert site.loaded() == set()


def test_the_backup_takes_over(make_cluster: MakeCluster, sid_root: Path) -> None:
    """Stock Slurm's own, as `sluice failover status` and `sluice doctor` tell of it."""
    nodes = [{"names": "g-1", "platform": "dgx-h100"}]
    description = {"nodes": nodes, "accounts": [{"name": "physics"}], "agent": True, "controllerd": True}
    users = [{"name": "alice", "accounts": ["physics"]}]
    cluster = make_cluster({**description, "users": users}, root=sid_root)

    def status(host: str) -> str:
        return cluster.run(["sluice", "failover", "status"], node=host, cwd="/", check=False).stdout

    assert cluster.run(["sluice", "lint"], node="ctl1", cwd="/", check=False).returncode == 0
    until(lambda: "leader: ctl1" in status("ctl2"))
    running = int(cluster.run(["sbatch", "--parsable", "-G1", "--wrap", "sleep 600"], user="alice", cwd="/tmp").stdout)
    until(lambda: "RUNNING" in cluster.run(["squeue", "-h", "-o", "%T"]).stdout)
    assert "PROBLEM /run/sluice-cluster/state/assoc_usage: not saved yet" in status("ctl2")
    # The remedy: without it the backup ends with "No Assoc usage file". It also saves that the job runs.
    cluster.run(["scontrol", "reconfigure"])
    until(lambda: "PROBLEM" not in status("ctl2"))
    cluster.stop_daemon("slurmctld@ctl1", number=signal.SIGKILL)
    until(lambda: "leader: ctl2" in status("ctl2"), timeout=PATIENCE)
    assert cluster.run(["srun", "hostname"], user="alice").stdout == "g-1\n"
    assert cluster.run(["squeue", "-h", "-t", "R", "-o", "%i"]).stdout == f"{running}\n"
    cluster.run(["scancel", str(running)])


@pytest.mark.parametrize("name", CASES)
def test_lint_says_what_slurmctld_says_of_topology_yaml(sid_root: Path, tmp_path: Path, name: str) -> None:
    more, text, expected = CASES[name]
    ports = free_ports(2)
    (tmp_path / "slurm.conf").write_text(
        f"{head(tmp_path, ports[0])}NodeName=n1 {NODE} Port={ports[1]}\n"
        f"PartitionName=main Nodes=ALL Default=YES {more}\n"
    )
    (tmp_path / "topology.yaml").write_text(text)
    (tmp_path / "cgroup.conf").write_text("IgnoreSystemd=yes\nCgroupPlugin=disabled\n")
    (tmp_path / "state").mkdir()
    ready = "Running as primary controller"
    with entered(sid_root, tmp_path) as inside:
        command = [*inside, "slurmctld", "-D", "-f", tmp_path / "slurm.conf"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as slurmctld:
            assert slurmctld.stderr is not None
            lines = []
            for line in slurmctld.stderr:
                lines.append(line)
                if ready in line:
                    slurmctld.kill()
                    break
    said = "".join(lines)
    rules = [RULES[code] for code in expected]
    assert (ready not in said) == any(rule.severity is Severity.FATAL for rule in rules), said
    assert all(re.search(rule.says, said) for rule in rules), said


def test_without_munge(sid_root: Path, tmp_path: Path) -> None:
    """AuthType=auth/slurm: Sluice reads Slurm through its commands, and needs nothing more."""
    ports = free_ports(2)
    given = head(tmp_path, ports[0]).replace("auth/none", "auth/slurm").replace("cred/none", "auth/slurm")
    (tmp_path / "slurm.conf").write_text(
        f"{given}NodeName=n1 {NODE} Port={ports[1]}\nPartitionName=main Nodes=ALL Default=YES\n"
    )
    key = tmp_path / "slurm.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    with entered(sid_root, tmp_path) as inside:
        run_command([*inside, "mount", "-t", "tmpfs", "tmpfs", "/run"])
        run_command([*inside, "mkdir", "/run/slurm", "/run/slurmctld"])
        with running(tmp_path, ["n1"], inside):
            client = connect(conf=tmp_path, prefix=wrappers(tmp_path / "commands", inside), backend="text")
            config = client.config()
            assert (config["AuthType"], config["CredType"]) == ("auth/slurm", "auth/slurm")
            assert [node.state for node in client.nodes()] == ["idle"]
            environment = os.environ | {"SLURM_CONF": str(tmp_path / "slurm.conf")}
            said = subprocess.run([*inside, "srun", "id", "-un"], env=environment, capture_output=True, text=True)
            assert said.stdout == "root\n", said.stderr
