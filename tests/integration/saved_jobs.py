"""Jobs that are saved as they run: what they do and say, and how their nodes are set up for it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dev_cluster.cluster import DevCluster
from dev_cluster.layout import INSIDE, THIS_SYSTEM
from policy.checkpoint import NodeCheckpoint, NodeSystem
from policy.compiled import CompiledPolicy, Global
from policy.node import NodePolicy
from sluice.slurm.control import SAVE_WORDS
from tests.integration.jobs import sbatch, shown
from tests.integration.settled import start_again, until

NODE = "n1"
POLICY = CompiledPolicy(generated_s=0, source="test", settings=Global(checkpoint_system=True))
CRIU = Path(os.environ.get("SLUICE_CRIU") or Path(__file__).parents[2] / "build/criu/criu")
# Counts in the memory of its GPU, next to a pattern, and says nothing more when the pattern is lost. It does not end
# while there is a file "hold".
GPU_COUNTER = """#!/usr/bin/python3
import ctypes as c, os, sys, time
cu = c.CDLL("libcuda.so.1")
def ok(code):
    assert code == 0, code
def take(address, size):
    found = c.create_string_buffer(size)
    ok(cu.cuMemcpyDtoH_v2(found, address, c.c_size_t(size)))
    return found.raw
context, pattern_at, count_at, pattern = c.c_void_p(), c.c_uint64(), c.c_uint64(), os.urandom(1 << 20)
ok(cu.cuInit(0)), ok(cu.cuDevicePrimaryCtxRetain(c.byref(context), 0)), ok(cu.cuCtxSetCurrent(context))
ok(cu.cuMemAlloc_v2(c.byref(pattern_at), c.c_size_t(256 << 20))), ok(cu.cuMemAlloc_v2(c.byref(count_at), c.c_size_t(8)))
ok(cu.cuMemcpyHtoD_v2(pattern_at, pattern, c.c_size_t(len(pattern))))
ok(cu.cuMemsetD8_v2(count_at, 0, c.c_size_t(8)))
kept = open("kept", "a")
{more}
while True:
    count = int.from_bytes(take(count_at, 8), "little")
    assert take(pattern_at, len(pattern)) == pattern
    assert open("/proc/self/stat").read().split()[0] == str(os.getpid())
    while count == {last} and os.path.exists("hold"):
        time.sleep(0.1)
    if count == {last}:
        break
    print(count, flush=True)
    print(count, file=kept, flush=True)
    ok(cu.cuMemcpyHtoD_v2(count_at, (count + 1).to_bytes(8, "little"), c.c_size_t(8)))
    time.sleep(0.1)
print(len(open("kept").readlines()), flush=True)
sys.exit(7)
"""
# Counts, with a file that is written, a lock, and a child.
COUNTER = """#!/bin/bash
exec 5>>kept
exec 6>lock; flock -n 6 || echo lock is taken
trap 'echo got USR1' USR1
for ((i = 0; i < {last}; i++)); do
    read -r pid _ </proc/self/stat; [ $pid = $$ ] || echo "no /proc"
    echo $i; echo $i >&5; sleep 0.1
done
wc -l <kept
exit 7
"""


def saving_cluster(
    make: Callable[..., DevCluster],
    folder: Path,
    platform: str,
    *,
    nodes: str = NODE,
    users: Sequence[str] = ("alice",),
    slurm_conf: str = "",
    root: Path | None = None,
) -> DevCluster:
    """Nodes of a platform with agents, and slurmctld that admits such jobs: `set_policy` is next. Skips without CRIU.

    `root`: the tree of another system, with its Slurm.
    """
    if not CRIU.exists():
        pytest.skip(f"{CRIU}: no CRIU; fetch it with: tools/criu build/criu")
    described = folder / "platform.yaml"
    described.write_text(platform)
    return make(
        {
            "nodes": [{"names": nodes, "platform": str(described)}],
            "controllers": 1,
            "accounting": False,
            "agent": True,
            "sluice": {"level": "admit", "policy": POLICY.render()},
            "users": [{"name": name} for name in users],
            "slurm_conf": slurm_conf,
        },
        root=root,
    )


def set_policy(cluster: DevCluster, system: dict[str, Any] | None) -> None:
    """`system`: what is not as by default; None: the site does not save jobs."""
    of_node = None if system is None else NodeSystem(criu=seen(cluster, CRIU), **system)
    policy = NodePolicy(checkpoint=NodeCheckpoint(system=of_node))
    (cluster.slurm_conf_dir() / "sluice.node.json").write_text(policy.render())


def seen(cluster: DevCluster, path: Path) -> str:
    """What this machine's file is called on the cluster's hosts."""
    return str(path) if cluster.facts["root"] is None else f"{THIS_SYSTEM}{path}"


def can_save(cluster: DevCluster) -> bool:
    return cluster.run(["test", "-e", "/run/sluice/checkpoint"], node=NODE, check=False).returncode == 0


class Counter:
    """A job that counts, and what it has written."""

    def __init__(
        self, cluster: DevCluster, name: str, *words: str, last: int = 90, user: str = "alice", script: str = COUNTER
    ) -> None:
        self.cluster = cluster
        self.last = last
        self.folder = cluster.folder / "home" / user / name
        self.folder.mkdir()
        self.folder.chmod(0o777)
        (self.folder / "job").write_text(script.replace("{last}", str(last)).replace("{more}", ""))
        self.output = self.folder / "out"
        inside = INSIDE / "home" / user / name
        command = ["--checkpoint=system", "-D", str(inside), "-o", f"{inside}/out", *words, f"{inside}/job"]
        self.id = sbatch(cluster, *command, user=user)

    def words(self) -> list[str]:
        return self.output.read_text().split("\n")[:-1] if self.output.exists() else []

    def counts(self, least: int) -> None:
        """Wait until it has."""
        until(lambda: str(least) in self.words(), timeout=60, shows=self.all_said)

    def all_said(self) -> object:
        """What helps when it is not as it should be."""
        nodes = self.cluster.run(["sinfo", "-hNo", "%N %T %E"], check=False).stdout
        return self.words(), nodes, shown(self.cluster, self.id), self.cluster.log_tail(f"agent@{NODE}", 40)

    def save(self) -> None:
        self.cluster.run(["scancel", *SAVE_WORDS, self.id])

    def start_again(self) -> None:
        until(
            lambda: shown(self.cluster, self.id),
            lambda now: now["JobState"] == "PENDING" and now["Restarts"] == "1",
            timeout=30,
            shows=self.all_said,
        )
        start_again(self.cluster, self.id)

    def goes_on(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Until it runs again, or on, whatever was killed."""

        moved: set[str] = set()

        def settled() -> bool:
            meanwhile()
            now = shown(self.cluster, self.id)
            if now["JobState"] == "PENDING" and now["Restarts"] not in moved:
                moved.add(now["Restarts"])
                self.cluster.run(["scontrol", "update", f"JobId={self.id}", "StartTime=now+2"])
            return str(self.last - 1) in self.words()

        until(settled, timeout=90, shows=self.all_said)

    def ended(self) -> dict[str, str]:
        now = until(lambda: shown(self.cluster, self.id), lambda now: now["JobState"] in ("COMPLETED", "FAILED"))
        assert "no /proc" not in self.words(), self.all_said()
        return dict(now)

    def is_exact(self) -> bool:
        numbers = [int(word) for word in self.words() if word.isdecimal()]
        return numbers == [*range(self.last), self.last]

    def check_last_run(self) -> None:
        """Complete and in order, whether it went on or began again from its start: nothing is lost in it, or twice."""
        words = self.words()
        begin = len(words) - 1 - words[::-1].index("0")
        numbers = [int(word) for word in words[begin:] if word.isdecimal()]
        assert numbers[:-1] == [*range(self.last)], self.all_said()


def images(cluster: DevCluster) -> Path:
    return cluster.folder / "nodes" / NODE / "checkpoints/images"


# In the node, as its root: the process that listens for slurmd's programs, or what it has started.
KILL = """
import glob, os, socket, struct, sys
asked = socket.socket(socket.AF_UNIX)
asked.connect("/run/sluice/agent.sock")
agent = struct.unpack("3i", asked.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
children = [int(pid) for name in glob.glob(f"/proc/{agent}/task/*/children") for pid in open(name).read().split()]
for pid in [agent] if sys.argv[1] == "agent" else children:
    if pid == agent or b"dump" in open(f"/proc/{pid}/cmdline", "rb").read():
        os.kill(pid, 9)
"""


# There, too: kills, at random moments, what saves and resumes jobs; how often each.
STORM = """
import collections, glob, json, os, random, socket, struct, sys, time
seconds, kinds, found = float(sys.argv[1]), sys.argv[2:], collections.Counter()
def agent():
    try:
        with socket.socket(socket.AF_UNIX) as asked:
            asked.connect("/run/sluice/agent.sock")
            return [struct.unpack("3i", asked.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]]
    except OSError:
        return []
def named(*words):
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            found = open(path, "rb").read().decode(errors="replace").split(chr(0))
        except OSError:
            continue
        if all(word in found for word in words):
            yield int(path.split("/")[2])
helper = "/run/sluice-cluster/programs/sluice-checkpoint"
look = {
    "agent": agent,
    "dump": lambda: named("dump", "--tree"),
    "restore": lambda: named("restore", "--leave-stopped"),
    "driver": lambda: named("prolog_epilog.checkpoint.cuda"),
    "helper": lambda: [*named(helper, "save"), *named(helper, "resume")],
}
end = time.monotonic() + seconds
while time.monotonic() < end:
    time.sleep(random.uniform(0, 0.1))
    kind = random.choice(kinds)
    for pid in list(look[kind]())[:1]:
        try:
            os.kill(pid, 9)
            found[kind] += 1
        except ProcessLookupError:
            continue
        time.sleep(random.uniform(0, 1.5))
print(json.dumps(found))
"""


def storm(cluster: DevCluster, seconds: float, kinds: Sequence[str]) -> dict[str, int]:
    """SIGKILLs for so long; how many hit which kind."""
    said = cluster.run(["/usr/bin/python3", "-c", STORM, str(seconds), *kinds], node=NODE, timeout=seconds + 60)
    return dict(json.loads(said.stdout))


# There, too: kills, once it has begun, a step that is a process with these words, or a file; or the agent meanwhile; or
# ("unanswered") the process, while the agent cannot answer it: says "late" where it has been answered before.
KILL_IN = """
import glob, os, socket, struct, sys, time
victim, step = sys.argv[1], sys.argv[2].split("+")  # this process has not these words itself
begin, notes = time.time(), sys.argv[3] + "/.*.runs*"  # one that is just written, too
def agent():
    with socket.socket(socket.AF_UNIX) as asked:
        asked.connect("/run/sluice/agent.sock")
        return [struct.unpack("3i", asked.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]]
def found():
    if step[0].startswith("/"):
        return glob.glob(step[0])
    pids = []
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            words = open(path, "rb").read().decode(errors="replace").split(chr(0))
        except OSError:
            continue
        if all(word in words for word in step):
            pids.append(int(path.split("/")[2]))
    return pids
def runs(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False
killer = agent() if victim == "agent" else []
print(flush=True)
end = time.monotonic() + 60
while not (seen := found()) and time.monotonic() < end:
    time.sleep(0.001)
if victim == "unanswered":
    (hung,) = agent()
    os.kill(hung, 19)
    time.sleep(0.5)
    late = any(os.stat(path).st_mtime >= begin for path in glob.glob(notes))
for pid in killer or seen:
    try:
        os.kill(pid, 9)
    except ProcessLookupError:
        if victim != "unanswered":
            sys.exit("it ended before it was killed")
        late = True
if victim == "unanswered":
    while any(map(runs, seen)) and time.monotonic() < end:  # on a busy machine it takes a while to die
        time.sleep(0.001)
    os.kill(hung, 18)
    print("late" if late else "in time")
sys.exit(not seen)
"""


@contextmanager
def killed_in(cluster: DevCluster, node: str, victim: str, *step: str) -> Iterator[list[str]]:
    """Meanwhile that step begins on the node, and its process, or the agent, gets a SIGKILL. What is said of that."""
    folder = str(INSIDE / "nodes" / node / "checkpoints" / "work")
    words = cluster.command(["/usr/bin/python3", "-c", KILL_IN, victim, "+".join(step), folder], node=node)
    said: list[str] = []
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as killer:
        assert killer.stdout is not None and killer.stdout.readline()
        yield said
        assert killer.wait(90) == 0, f"{step} was not seen"
        said += killer.stdout.read().splitlines()


def kill(cluster: DevCluster, what: str) -> None:
    """With SIGKILL; the guard starts the next agent."""
    cluster.run(["/usr/bin/python3", "-c", KILL, what], node=NODE, check=False)
