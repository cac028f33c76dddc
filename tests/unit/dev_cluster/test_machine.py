"""Ports, processes and programs of this machine."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dev_cluster.layout import MARKER, Layout
from dev_cluster.ports import claim_ports, listens
from dev_cluster.processes import kill, marked, start_time
from dev_cluster.slurm_tree import SlurmTree
from sluice.base.errors import SluiceError, UsageError


def test_claims_do_not_overlap_and_end_with_their_holder() -> None:
    first, second = claim_ports(100), claim_ports(3)
    assert set(range(first.base, first.base + 100)).isdisjoint(range(second.base, second.base + 3))
    with pytest.raises(SluiceError, match=f"port {first.base}: taken by another program or cluster"):
        claim_ports(1, base=first.base)
    first.close()
    claim_ports(1, base=first.base).close()
    second.close()


def test_a_taken_port_is_named_or_avoided() -> None:
    free = claim_ports(4)
    free.close()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free.base + 2))
        taken.listen()
        with pytest.raises(SluiceError, match=f"port {free.base + 2}: taken"):
            claim_ports(4, base=free.base)
        other = claim_ports(4)
        assert not other.base <= free.base + 2 < other.base + 4
        other.close()


@pytest.mark.parametrize("base", [65530, 65535])
def test_ports_beyond_the_last_one(base: int) -> None:
    with pytest.raises(SluiceError, match=f"port_base {base}: 10 ports are needed"):
        claim_ports(10, base=base)


def test_listens_sees_listeners_without_connecting() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.9.9", 0))
        port = listener.getsockname()[1]
        assert not listens("127.0.9.9", port)
        listener.listen()
        assert listens("127.0.9.9", port)
        assert not listens("127.0.9.8", port)
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_processes_are_found_by_their_marker_and_distinguished_by_their_start(tmp_path: Path) -> None:
    sleep = ["/bin/sleep", "60"]
    with (
        subprocess.Popen(sleep, env={MARKER: str(tmp_path)}) as ours,
        subprocess.Popen(sleep, env={MARKER: f"{tmp_path}2"}) as other,
    ):
        try:
            assert marked(tmp_path) == [ours.pid]
            assert start_time(ours.pid) is not None
            assert kill(ours.pid, timeout=10)
            assert start_time(ours.pid) is None  # though its parent, this process, has not waited for it yet
            assert marked(tmp_path) == []
            assert start_time(other.pid) is not None
        finally:
            other.kill()
            ours.kill()
    assert kill(ours.pid, timeout=1)  # it is gone
    assert start_time(os.getpid()) == start_time(os.getpid())


def test_the_cgroup_follows_from_the_folder() -> None:
    assert Layout(Path("/a")).cgroup == Layout(Path("/a")).cgroup != Layout(Path("/b")).cgroup


def test_a_prefix_without_slurm(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"--slurm-prefix {tmp_path}: no sbin/slurmctld there"):
        SlurmTree(tmp_path).check(accounting=True)
    with pytest.raises(UsageError, match=f"--root {tmp_path}: no system tree; make one with tools/debian-tree"):
        SlurmTree(root=tmp_path).check(accounting=True)


def test_programs_of_a_prefix_come_first(tmp_path: Path) -> None:
    for name in ("sbin/slurmctld", "sbin/slurmd", "sbin/slurmdbd"):
        (tmp_path / "opt/slurm" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "opt/slurm" / name).touch(mode=0o755)
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").touch()
    tree = SlurmTree(Path("/opt/slurm"), tmp_path)
    assert tree.program("slurmctld") == "/opt/slurm/sbin/slurmctld"
    assert tree.path.startswith("/opt/slurm/bin:/opt/slurm/sbin:/usr/local/sbin:")
    with pytest.raises(UsageError, match="sinfo, srun, munged, ldconfig: not installed in"):
        tree.check(accounting=False)
    assert tree.source is None
    (tmp_path / "opt/slurm/src").mkdir()
    (tmp_path / "opt/slurm/src/config.h").touch()
    assert tree.source == tmp_path / "opt/slurm/src"


def test_build_slurm_refuses_what_it_cannot_build(tmp_path: Path) -> None:
    tool = Path(__file__).parents[3] / "tools/build-slurm"
    sources = tmp_path / "sources"
    sources.mkdir()
    tag, prefix = "slurm-23-02-8-1", tmp_path / "prefix"

    def refused(*words: str | Path) -> str:
        done = subprocess.run([tool, *words], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        return done.stderr

    assert "tools/build-slurm TAG SOURCE [PREFIX]" in refused(tag)
    assert "TAG 23.02.8: not a tag of Slurm's; write it as slurm-25-11-7-1" in refused("23.02.8", sources, prefix)
    assert f"SOURCE {sources}: no git repository with the tag {tag}, and no folder with Slurm's sources" in refused(
        tag, sources, prefix
    )
    (sources / "META").write_text("  Meta:\t1\n  Version:\t22.05.8\n")
    assert f"SOURCE {sources}: Slurm 22.05.8, and not 23.02.8; name the sources of {tag}" in refused(
        tag, sources, prefix
    )
    assert not prefix.exists()
    assert f"PREFIX {sources}: not empty, and no finished build" in refused(tag, sources, sources)
    assert (sources / "META").exists()


def test_debian_tree_refuses_what_it_did_not_make(tmp_path: Path) -> None:
    tool = Path(__file__).parents[3] / "tools/debian-tree"
    (tmp_path / "thesis").touch()
    for words, what in (
        ([], "usage: tools/debian-tree"),
        (["--colour", "x"], "usage: tools/debian-tree"),
        ([str(tmp_path)], f"{tmp_path}: exists and is no finished tree; remove it, or name another folder"),
    ):
        refused = subprocess.run([tool, *words], capture_output=True, text=True, check=False)
        assert refused.returncode == 2
        assert what in refused.stderr
    groups = dict(re.findall(r"^(\w+): (.*)$", tool.with_name("debian-packages.txt").read_text(), re.MULTILINE))
    (tmp_path / ".sluice-tree").write_text(f"trixie {groups['cluster']} {groups['tree']} \n")
    assert subprocess.run([tool, tmp_path], check=False).returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [".sluice-tree", "thesis"]


_FAILS_LATE = """
set -e
mount -t tmpfs none /dev && mknod /dev/null c 1 3
mkdir /dev/shm && touch /dev/shm/others && mount --bind /dev/shm /dev/shm
mkdir "$1/bin"
cd "$1/bin"
printf '#!/bin/sh\nmkdir $3; cd $3; mkdir -p etc/dpkg/dpkg.cfg.d etc/apt/apt.conf.d usr/sbin proc dev\n' >debootstrap
printf '#!/bin/sh\ntest -c "$1/dev/null" && echo no such package >&2\nexit 100\n' >chroot
printf '#!/bin/sh\ncase $1 in indextargets) echo Packages main http://localhost/debian/;; esac\n' >apt-get
chmod 755 *
PATH=$1/bin:$PATH "$2" "$1/tree" || echo status $?
ls /dev /dev/shm
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts")
def test_debian_tree_that_fails_leaves_the_systems_devices(tmp_path: Path) -> None:
    """They are mounted in what it removes. In a namespace of its own, with a /dev of its own."""
    tool = Path(__file__).parents[3] / "tools/debian-tree"
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", _FAILS_LATE, "sh", tmp_path, tool]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "no such package" in ran.stderr and "status 100" in ran.stdout
    assert ran.stdout.split()[2:] == ["/dev:", "null", "shm", "/dev/shm:", "others"]
    assert [path.name for path in tmp_path.iterdir()] == ["bin"]


def test_the_command_starts_without_heavy_modules() -> None:
    program = "import sys, dev_cluster.commands.cluster; print('pydantic' in sys.modules, 'yaml' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
        == "False False\n"
    )
