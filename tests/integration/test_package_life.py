"""The Debian packages: built twice, installed on a system without a compiler, used, upgraded, removed and purged.

With SLUICE_TEST_SCALE=full: the checked out commit, for this Debian and its Slurm. Needs the network, as `make deb`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice.base.run import CommandError, run_command
from sluice.plugin.sources import release_name
from tests.integration.package_builds import build, clone, committed_later

ROOT = Path(__file__).parents[2]
LIMITER = "/opt/sluice/lib/python3.*/site-packages/sluice/core/libsluice_limit.so"
# What dpkg, apt and the dynamic linker keep about all packages.
_NOT_OURS = ("/proc", "/sys", "/dev", "/tmp", "/run/lock", "/var/lib/dpkg", "/var/log", "/var/cache", "/var/lib/apt")
_ENTER = 'mount -t proc proc "$1/proc"; mount --rbind /dev "$1/dev"; exec chroot "$@"'
_CONF = """ClusterName=packages
SlurmctldHost=localhost
AuthType=auth/none
StateSaveLocation=/var/spool/slurmctld
SlurmUser=root
SelectType=select/cons_tres
NodeName=n1 NodeHostname=localhost
PartitionName=p Nodes=ALL Default=YES
"""

pytestmark = [
    pytest.mark.skipif(os.environ.get("SLUICE_TEST_SCALE") != "full", reason="a quarter of an hour"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    pytest.mark.timeout(3600),
]


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(clone(tmp_path_factory.mktemp("first") / "checkout"))


class Host:
    """A system tree with Slurm and Python, without a compiler."""

    def __init__(self, tree: Path) -> None:
        self.tree = tree

    def run(self, *words: str) -> str:
        command = ["unshare", "--mount", "--pid", "--fork", "--propagation", "private", "sh", "-euc", _ENTER, "sh"]
        return run_command([*command, self.tree, *words], timeout=600).stdout

    def dpkg(self, *words: str) -> str:
        return self.run("env", "DEBIAN_FRONTEND=noninteractive", "dpkg", *words)

    def refuses(self, *words: str) -> str:
        with pytest.raises(CommandError) as refused:
            self.dpkg(*words)
        return refused.value.what + refused.value.stderr

    def install(self, packages: Path, names: list[str]) -> None:
        shutil.rmtree(self.tree / "debs", ignore_errors=True)
        shutil.copytree(packages, self.tree / "debs")
        files = [path for name in names for path in (self.tree / "debs").glob(f"{name}_*.deb")]
        self.dpkg("-i", *(f"/debs/{path.name}" for path in files))

    def files(self) -> set[str]:
        prune = [word for path in (*_NOT_OURS, "/debs") for word in ("-path", path, "-o")][:-1]
        return set(self.run("find", "/", "-xdev", "(", *prune, ")", "-prune", "-o", "-print").splitlines())


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    tree = tmp_path_factory.mktemp("host") / "tree"
    run_command([ROOT / "tools/debian-tree", "--suite", release_name(), tree], timeout=900)
    yield Host(tree)
    shutil.rmtree(tree, ignore_errors=True)


def test_the_same_commit_gives_the_same_bytes_in_another_folder(packages: Path, tmp_path: Path) -> None:
    again = build(clone(tmp_path / "a-folder-with-another-name", packages.parent))
    names = sorted(path.name for path in packages.iterdir())
    assert len(names) >= 7 and names == sorted(path.name for path in again.iterdir())
    differing = [name for name in names if (packages / name).read_bytes() != (again / name).read_bytes()]
    assert differing == []


def test_a_host_from_installation_to_purge(packages: Path, host: Host, tmp_path: Path) -> None:
    (plugins,) = {re.sub(r"_.*", "", path.name) for path in packages.glob("sluice-plugins-??.??_*.deb")}
    names = ["sluice", "sluice-agent", "sluice-controller", plugins, "sluice-dev-cluster"]
    (host.tree / "etc/slurm").mkdir(exist_ok=True)
    (host.tree / "etc/slurm/slurm.conf").write_text(_CONF)
    (host.tree / "var/spool/slurmctld").mkdir(exist_ok=True)
    for compiler in ("gcc", "cc", "cmake"):
        assert not list((host.tree / "usr/bin").glob(compiler))
    before = host.files()
    enabled = set((host.tree / "etc/systemd/system").rglob("*"))
    host.install(packages, names)
    assert set((host.tree / "etc/systemd/system").rglob("*")) == enabled, "a unit is enabled"

    scripts = "".join(path.read_text() for path in (host.tree / "var/lib/dpkg/info").glob("sluice*.p*"))
    daemons = {"'sluice-agent.service'", "'sluice-controllerd.service' 'sluice-explaind.service'"}
    assert set(re.findall(r"try-restart (.*) >", scripts)) == daemons and "invoke start" not in scripts

    # the command, the core, the plugins
    assert host.run("sluice", "--version").startswith("sluice ")
    assert host.run("/opt/sluice/bin/python3", "-c", "from sluice.core import version; print(version())").strip()
    assert "Commands:" in host.run("sluice", "cluster", "--help")
    host.run("sluice", "plugin", "install")
    with (host.tree / "etc/slurm/slurm.conf").open("a") as conf:
        conf.write("Include sluice.plugins.conf\n")
    assert '"origin": "package"' in host.run("sluice", "plugin", "status", "--json")
    assert "problem" not in host.run("sluice", "plugin", "check")
    ran = host.run("sh", "-c", "timeout 8 slurmctld -D -c 2>&1 || true")
    assert "fatal" not in ran, ran
    assert list((host.tree / "var/spool/slurmctld").glob("sluice.status.*")), ran
    assert "--gpu-mem=" in host.run("srun", "--help")

    # an upgrade: what the administrator changed stays, and so does the path that running jobs have
    logrotate = host.tree / "etc/logrotate.d/sluice"
    logrotate.write_text(logrotate.read_text().replace("weekly", "daily"))
    record = host.tree / "var/lib/sluice/records/7.json"
    record.parent.mkdir(parents=True)
    record.write_text("{}")
    job = host.tree / "run/sluice/limit/job_7"
    job.mkdir(parents=True)
    watch = f"p=$(echo {LIMITER}); : > /tmp/gone; while [ -e /tmp/watch ]; do [ -e $p ] || echo gone >> /tmp/gone; done"
    (host.tree / "tmp/watch").touch()
    newer = build(committed_later(clone(tmp_path / "newer", packages.parent)))
    watcher = subprocess.Popen(["chroot", host.tree, "sh", "-c", watch])
    host.install(newer, names)
    (host.tree / "tmp/watch").unlink()
    assert watcher.wait(timeout=60) == 0 and (host.tree / "tmp/gone").read_text() == ""
    assert "daily" in logrotate.read_text() and record.exists()
    assert '"origin": "other"' in host.run("sluice", "plugin", "status", "--json")  # until it is installed again
    assert "not what the installed package has" in host.run("sluice", "plugin", "check")
    host.run("sluice", "plugin", "install")
    assert '"origin": "package"' in host.run("sluice", "plugin", "status", "--json")

    # removal waits for jobs and plugins, keeps records; purge leaves nothing
    assert "jobs with GPU limits run here (job_7)" in host.refuses("--remove", *names)
    job.rmdir()
    assert "sluice plugin uninstall" in host.refuses("--remove", *names)
    host.install(newer, names)  # those that were removed before the refusal
    (host.tree / "etc/slurm/slurm.conf").write_text(_CONF)
    host.run("sluice", "plugin", "uninstall")
    host.dpkg("--remove", *names)
    assert record.exists() and logrotate.exists()
    assert not (host.tree / "usr/bin/sluice").exists()
    host.dpkg("--purge", *names)
    left = {path for path in host.files() - before if not path.startswith(("/var/spool/slurmctld", "/etc/slurm"))}
    assert left == set()
