"""dev_cluster with real daemons: what is inside, and that nothing of it is left behind."""

from __future__ import annotations

import fcntl
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from dev_cluster.cluster import DevCluster
from dev_cluster.control import init_pid
from dev_cluster.description import ClusterDescription, parse_description
from dev_cluster.layout import MARKER
from sluice.base.errors import SluiceError, UsageError
from sluice.base.run import CommandError

pytestmark = pytest.mark.cluster

MakeCluster = Callable[..., DevCluster]

SLUICE = [sys.executable, "-m", "sluice.main"]
SMALL = {
    "sluice": False,
    "nodes": [
        {"names": "n1", "platform": "none"},
        {"names": "n2", "platform": "none", "config": "own"},
        {"names": "n3", "platform": "none", "config": "configless"},
    ],
    "accounts": [{"name": "physics"}, {"name": "atoms", "parent": "physics"}, {"name": "biology"}],
    "users": [
        {"name": "alice", "accounts": ["atoms", "biology"]},
        {"name": "bob", "uid": 3000, "accounts": ["biology"]},
    ],
}
TINY = {"nodes": [{"names": "n1", "platform": "none"}], "controllers": 1, "accounting": False, "sluice": False}


def traces(folder: Path) -> list[str]:
    """Whatever exists because of the cluster in `folder`: files, mounts, cgroups, processes and their namespaces."""
    cluster = DevCluster(folder)
    found = [str(path) for path in Path("/sys/fs/cgroup").glob(f"*/{cluster.layout.cgroup}*")]
    if folder.exists():
        found.append(f"{folder}: {sorted(os.listdir(folder))}")
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal() or int(process.name) == os.getpid():
            continue
        try:
            state = (process / "stat").read_text().rpartition(")")[2].split()[0]
            marked = f"{MARKER}={folder}".encode() in (process / "environ").read_bytes()
            mounted = f"{folder}" in (process / "mountinfo").read_text()
            words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it has ended, or is none of ours
        if state != "Z" and (marked or mounted):
            found.append(f"process {process.name}: {words}")
    return found


def wait_for(look: Callable[[], object], wanted: object, *, timeout: float = 60) -> None:
    """Look until it is as wanted."""
    deadline = time.monotonic() + timeout
    while (seen := look()) != wanted:
        assert time.monotonic() < deadline, seen
        time.sleep(0.1)


def describe(what: dict[str, object]) -> ClusterDescription:
    return parse_description(yaml.safe_dump(what), source="test")


@pytest.fixture(scope="module")
def small(make_shared_cluster: MakeCluster) -> DevCluster:
    return make_shared_cluster(SMALL)


@pytest.fixture(autouse=True)
def _nothing_stays(tmp_path: Path) -> Iterator[None]:
    """Also of a test that failed."""
    yield
    DevCluster(tmp_path / "c").down()


@pytest.fixture
def tiny_file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(TINY))
    return path


# ---- what is inside ----


def test_hosts_users_and_controllers(small: DevCluster) -> None:
    assert {status.name: status.state for status in small.node_states()} == {"n1": "idle", "n2": "idle", "n3": "idle"}
    for host in ("login", "ctl1", "ctl2", "db", "n2"):
        assert small.run(["hostname"], node=host).stdout == f"{host}\n"
    assert small.run(["id", "-un"], user="alice").stdout == "alice\n"
    assert small.run(["id", "-u"], user="bob").stdout == "3000\n"
    assert (
        small.run(["bash", "-c", "echo $HOME; touch ~/mine && pwd"], user="alice").stdout.splitlines()
        == ["/run/sluice-cluster/home/alice"] * 2
    )
    ping = small.run(["scontrol", "ping"]).stdout
    assert "(primary) at ctl1 is UP" in ping
    assert "(backup) at ctl2 is UP" in ping
    assert "/run/sluice-cluster/home" not in Path("/etc/passwd").read_text()


def test_a_job_runs_across_nodes_of_every_configuration_and_is_accounted(small: DevCluster) -> None:
    done = small.run(["srun", "-N3", "-A", "biology", "bash", "-c", "hostname; id -un"], user="alice")
    assert sorted(done.stdout.split()) == ["alice"] * 3 + ["n1", "n2", "n3"]
    small.run(["sbatch", "-w", "n1", "-o", "out", "--wrap", "srun hostname"], user="bob")
    wait_for(
        lambda: small.run(["sacct", "-a", "-X", "-n", "-P", "-o", "User,Account,NodeList,State"]).stdout.split(),
        ["alice|biology|n[1-3]|COMPLETED", "bob|biology|n1|COMPLETED"],
    )
    assert small.run(["cat", "out"], user="bob").stdout == "n1\n"
    with pytest.raises(CommandError, match="Invalid account"):
        small.run(["srun", "-A", "physics", "true"], user="bob")


def test_nodes_have_their_configuration_from_where_the_description_says(small: DevCluster) -> None:
    assert small.slurm_conf_dir("n1") == small.slurm_conf_dir() != small.slurm_conf_dir("n2")
    (small.slurm_conf_dir("n2") / "only-here").touch()
    assert "only-here" in small.run(["ls", "/etc/slurm"], node="n2").stdout
    assert "only-here" not in small.run(["ls", "/etc/slurm"], node="n1").stdout
    assert small.run(["ls", "/etc/slurm"], node="n3").stdout == ""
    assert "slurm.conf" in small.run(["ls", "/run/slurm/conf/"], node="n3").stdout


def test_accounts_form_the_tree_of_the_description(small: DevCluster) -> None:
    shown = small.run(["sacctmgr", "-nP", "show", "associations", "format=Account,ParentName,User"]).stdout.split()
    assert {"atoms|physics|", "biology|root|", "atoms||alice", "biology||alice", "biology||bob"} <= set(shown)
    default = small.run(["sacctmgr", "-nP", "show", "user", "alice", "format=DefaultAccount"]).stdout
    assert default == "atoms\n"


def test_daemons_stop_and_start_again(small: DevCluster) -> None:
    small.stop_daemon("slurmd@n2", number=signal.SIGKILL)
    assert {daemon.name: daemon.status for daemon in small.daemons()}["slurmd@n2"] == -signal.SIGKILL
    with pytest.raises(SluiceError, match="does not run"):
        small.stop_daemon("slurmd@n2")
    small.start_daemon("slurmd@n2")
    small.wait_idle(["n2"])
    assert small.run(["srun", "-w", "n2", "hostname"], user="alice").stdout == "n2\n"


def test_a_command_that_takes_too_long_is_not_left_behind(small: DevCluster) -> None:
    with pytest.raises(CommandError, match="^sleep 1234: no answer within 0.5 s"):
        small.run(["sleep", "1234"], node="n1", user="alice", timeout=0.5)
    look = ["sh", "-c", "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' ' | grep -o '[s]leep 1234' | wc -l"]
    wait_for(lambda: small.run(look).stdout, "0\n")


def test_programs_of_ones_own_run_next_to_slurms(small: DevCluster) -> None:
    script = 'echo "$(id -un) on $(hostname) with $COLOUR"; exec sleep 300'
    small.start_program("mine", ["bash", "-c", script], node="n2", user="bob", env={"COLOUR": "red"})
    wait_for(lambda: small.log_tail("mine"), "bob on n2 with red")
    assert {daemon.name: (daemon.host, daemon.status) for daemon in small.daemons()}["mine"] == ("n2", None)
    with pytest.raises(SluiceError, match="mine is running already"):
        small.start_program("mine", ["true"])
    small.stop_daemon("mine")
    with pytest.raises(UsageError, match="user 'eve'"):
        small.start_program("hers", ["true"], user="eve")
    small.start_program("missing", ["/no/such/program"])
    wait_for(lambda: {daemon.name: daemon.status for daemon in small.daemons()}["missing"], 127)
    assert "/no/such/program: [Errno 2]" in small.log_tail("missing")


def test_another_slurm_by_its_prefix(tmp_path: Path, make_cluster: MakeCluster) -> None:
    for name in ("sbin/slurmctld", "sbin/slurmd", "sbin/slurmdbd", "bin/sinfo", "bin/srun", "bin/scontrol"):
        link = tmp_path / "slurm" / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(f"/usr/{name}")
    cluster = make_cluster(TINY, slurm_prefix=tmp_path / "slurm")
    assert cluster.run(["which", "sinfo"]).stdout == f"{tmp_path}/slurm/bin/sinfo\n"
    assert cluster.facts["daemons"]["slurmctld@ctl1"]["argv"][0] == f"{tmp_path}/slurm/sbin/slurmctld"
    assert cluster.run(["srun", "printenv", "SLURM_CONF"]).stdout == "/etc/slurm/slurm.conf\n"


def test_command_line(small: DevCluster) -> None:
    def sluice(*words: str) -> subprocess.CompletedProcess[str]:
        command = [*SLUICE, "cluster", words[0], "--dir", str(small.folder), *words[1:]]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    inside = sluice("exec", "-u", "alice", "-w", "n1", "--", "bash", "-c", "hostname; id -un; exit 7")
    assert (inside.returncode, inside.stdout) == (7, "n1\nalice\n")
    status = json.loads(sluice("status", "--json").stdout)
    assert status["schema_version"] == 1
    assert status["state"] == "up"
    assert {daemon["name"] for daemon in status["daemons"]} >= {"munged", "mariadbd", "slurmdbd", "slurmctld@ctl2"}
    assert "n2|idle|(null)" in sluice("status", "-P").stdout.splitlines()
    assert "slurmd@n1" in sluice("logs").stdout.split()
    assert "slurmd version" in sluice("logs", "slurmd@n1", "-n", "500").stdout
    assert sluice("exec", "-w", "n1", "--", "sluice", "probe", "--json").returncode == 0
    for words, what in (
        (("exec", "-u", "eve", "--", "true"), "user 'eve': not in the cluster"),
        (("exec", "-w", "n9", "--", "true"), "node 'n9': not in the cluster"),
        (("logs", "nonsense"), "daemon 'nonsense': has no log"),
        (("up", "demo"), "there is a cluster already"),
    ):
        refused = sluice(*words)
        assert refused.returncode in (1, 2)
        assert what in refused.stderr
        assert len(refused.stderr.splitlines()) == 1
    assert small.run(["srun", "-w", "n1", "hostname"]).stdout == "n1\n"  # `up` in its place has not hurt it


def test_the_command_brings_up_the_whole_of_sluice(tmp_path: Path) -> None:
    """What the pages tell a newcomer to try after the demonstration, on a cluster file that names nodes alone."""
    folder, file = tmp_path / "c", tmp_path / "mine.yaml"
    file.write_text("nodes: [{names: n1, platform: rtx4090x4}]\n")
    outside = sorted(Path("/var/lib").glob("sluice/*"))
    subprocess.run([*SLUICE, "cluster", "up", "--dir", str(folder), str(file)], check=True, timeout=200)
    cluster = DevCluster(folder)

    def sluice(*words: str, user: str = "root", check: bool = True) -> str:
        return cluster.run([*SLUICE, *words], user=user, check=check, cwd="/").stdout

    assert "nothing to do" in cluster.run([*SLUICE, "plan"], cwd="/").stderr
    for user, size in (("alice", "10G"), ("bob", "12G")):
        cluster.run(["srun", f"--gpu-mem={size}", "true"], user=user)
    wait_for(lambda: "biology" in sluice("report", "tenants", "-S", "now-1hour"), True)
    assert "placed by Sluice" in sluice("explain", "1")
    answers = json.loads(sluice("doctor", "--json", check=False))["answers"]
    hybrid = any(not line.startswith("0:") for line in Path("/proc/self/cgroup").read_text().splitlines())
    expected = {"state", "cgroup"} if hybrid else {"state"}  # it is in /run; the kernel has both versions of cgroups
    assert {answer["check"] for answer in answers if answer["verdict"] == "fail"} == expected
    sluice("quota", "set", "physics", "limit.gpus=6", "--yes")
    assert " 6 " in sluice("quota", "show", "physics", user="alice")
    assert "quota set" in sluice("audit", "list")
    assert cluster.down()
    assert traces(folder) == []
    assert sorted(Path("/var/lib").glob("sluice/*")) == outside and not Path("/etc/sluice/sluice.yaml").exists()


# ---- coming and going ----


def test_two_clusters_side_by_side_know_nothing_of_each_other(small: DevCluster, make_cluster: MakeCluster) -> None:
    before = outside()
    other = make_cluster(SMALL)
    assert set(range(*_ports(small))).isdisjoint(range(*_ports(other)))
    for cluster in (small, other):
        held = cluster.run(["sbatch", "--parsable", "-w", "n1", "--wrap", "sleep 300"], user="alice").stdout.strip()
        assert cluster.run(["srun", "-N3", "hostname"], user="bob").stdout.split()
        assert held in cluster.run(["squeue", "-h", "-o", "%i"]).stdout.split()
    other.run(["scancel", "--user=alice"])
    wait_for(lambda: small.run(["squeue", "-h", "-o", "%u %T"]).stdout, "alice RUNNING\n")
    small.run(["scancel", "--user=alice"])
    assert other.down()
    assert traces(other.folder) == []
    assert not other.down()  # twice
    assert outside() == before
    assert small.run(["srun", "-w", "n1", "hostname"]).stdout == "n1\n"


def outside() -> tuple[object, ...]:
    """What clusters leave as it is, without what tests do that run at the same time: file systems in temporary folders,
    and folders of theirs in /run."""
    mounted = Path("/proc/self/mountinfo").read_text().splitlines()
    return (
        [line for line in mounted if tempfile.gettempdir() not in line],
        sorted(str(path) for path in Path("/sys/fs/cgroup").glob("*/slurm*")),
        sorted(name for name in os.listdir("/run") if not name.startswith("sluice-demo-")),
        [Path(name).stat().st_mtime_ns for name in ("/etc", "/etc/passwd", "/etc/hosts")],
    )


def _ports(cluster: DevCluster) -> tuple[int, int]:
    ports = cluster.facts["ports"]
    return ports["slurmctld"], ports["slurmctld"] + ports["count"]


def test_down_is_clean_after_up_was_killed_at_any_moment(tmp_path: Path, full_scale: bool) -> None:
    description = tmp_path / "small.yaml"
    description.write_text(yaml.safe_dump(SMALL))
    folder = tmp_path / "c"
    command = [*SLUICE, "cluster", "up", "--dir", str(folder), str(description)]
    started = time.monotonic()
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    whole = time.monotonic() - started
    DevCluster(folder).down()
    assert traces(folder) == []
    random_points = random.Random(7)
    for _ in range(60 if full_scale else 6):
        moment = random_points.uniform(0.02, 1.0) * whole
        up = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(moment)
        up.kill()
        up.wait()
        DevCluster(folder).down()
        assert traces(folder) == [], f"killed after {moment:.2f} s"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_up_brings_everything_down_again(number: int, tmp_path: Path, tiny_file: Path) -> None:
    folder = tmp_path / "c"
    # Whoever runs the tests in the background may have SIGINT ignored.
    command = ["env", "--default-signal", *SLUICE, "cluster", "up", "--dir", str(folder), str(tiny_file)]
    for _ in range(10):
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as up:
            assert up.stderr is not None
            up.stderr.readline()
            up.send_signal(number)
            said = up.stderr.read()
        if up.returncode != 0:
            break
        DevCluster(folder).down()  # it was up before the signal came: again
    assert said.endswith("sluice: interrupted\n")
    assert up.returncode == 130
    assert traces(folder) == []


def test_processes_end_by_themselves_when_up_is_killed(tmp_path: Path, tiny_file: Path) -> None:
    folder = tmp_path / "c"
    command = [*SLUICE, "cluster", "up", "--dir", str(folder), str(tiny_file)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as up:
        assert up.stderr is not None
        up.stderr.readline()
        layout = DevCluster(folder).layout
        while init_pid(layout) is None:
            assert up.poll() is None
        up.kill()
    wait_for(lambda: [trace for trace in traces(folder) if trace.startswith("process")], [])
    DevCluster(folder).down()
    assert traces(folder) == []


def test_down_is_clean_after_down_was_killed(tmp_path: Path, tiny_file: Path) -> None:
    folder = tmp_path / "c"
    for moment in (0.1, 0.2, 0.3):
        DevCluster(folder).up(tiny_file)
        down = subprocess.Popen([*SLUICE, "cluster", "down", "--dir", str(folder)])
        time.sleep(moment)
        down.kill()
        down.wait()
        DevCluster(folder).down()
        assert traces(folder) == []


@pytest.mark.parametrize("damage", ["no pid", "garbage", "wrong pid", "all files gone", "empty folder"])
def test_down_finds_everything_whatever_is_written_down(damage: str, make_cluster: MakeCluster) -> None:
    cluster = make_cluster(TINY)
    layout = cluster.layout
    if damage == "no pid":
        layout.init.unlink()
    elif damage == "garbage":
        layout.init.write_text("{")
        layout.facts.write_text("\0")
    elif damage == "wrong pid":  # of an innocent process
        layout.init.write_text(json.dumps({"pid": os.getpid(), "started": 1}))
    else:
        shutil.rmtree(cluster.folder)
        if damage == "empty folder":
            cluster.folder.mkdir()
    assert cluster.down()
    assert traces(cluster.folder) == []


def test_an_attached_cluster_ends_with_its_creator(tmp_path: Path, tiny_file: Path) -> None:
    program = (
        "import sys, pathlib, os; from dev_cluster.cluster import DevCluster\n"
        f"DevCluster(pathlib.Path({str(tmp_path / 'c')!r})).up(pathlib.Path({str(tiny_file)!r}), attached=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", program], check=False, timeout=120)
    wait_for(lambda: [trace for trace in traces(tmp_path / "c") if trace.startswith("process")], [])
    DevCluster(tmp_path / "c").down()
    assert traces(tmp_path / "c") == []


def test_users_can_work_in_a_cluster_that_a_careful_root_made(make_cluster: MakeCluster) -> None:
    before = os.umask(0o077)
    try:
        cluster = make_cluster({**TINY, "users": [{"name": "alice"}]})
    finally:
        assert os.umask(before) == 0o077
    assert cluster.run(["srun", "bash", "-c", "touch mine && id -un"], user="alice").stdout == "alice\n"


def test_in_a_chroot(tmp_path: Path, tiny_file: Path) -> None:
    # Entering a mount namespace leaves a chroot: what runs inside must see the cluster's /run all the same.
    root, folder, outside = tmp_path / "root", tmp_path / "c", Path("/run/sluice-cluster")
    root.mkdir()
    before = outside.exists()
    sluice = f"{' '.join(SLUICE)} cluster"
    look = f"{sluice} exec --dir $1 -- sh -c 'srun hostname; ls /run/sluice-cluster'"
    work = f"{sluice} up --dir $1 $2 && {look}; {sluice} down --dir $1"
    enter = 'mount --rbind / "$1" && exec chroot "$1" sh -c "$2" sh "$3" "$4"'
    command = ["unshare", "--mount", "sh", "-c", enter, "sh", root, work, folder, tiny_file]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False).stdout.splitlines()
    assert said[0] == "n1"
    assert "cluster.json" in said
    assert traces(folder) == []
    assert outside.exists() == before


# ---- what goes wrong ----


def test_a_failing_daemon_is_shown_with_its_own_words(tmp_path: Path) -> None:
    broken = describe({**TINY, "slurm_conf": "SchedulerType=sched/nonsense\n"})
    with pytest.raises(SluiceError, match=r"(?s)slurmctld@ctl1 ended with exit status 1.*cannot find sched plugin"):
        DevCluster(tmp_path / "c").up(broken)
    assert traces(tmp_path / "c") == []


def test_a_node_that_slurmctld_refuses_is_shown_with_its_reason(tmp_path: Path) -> None:
    gres = {"gres_conf": "NodeName=n1 Name=gpu File=/dev/null\n", "node_lines": "NodeName=n1 Gres=gpu:2 CPUs=1\n"}
    with pytest.raises(SluiceError, match=r"node n1 is .*gres/gpu count reported lower than configured \(1 < 2\)"):
        DevCluster(tmp_path / "c").up(describe({**TINY, "gres": gres}))
    assert traces(tmp_path / "c") == []


def free_port_after_a_free_one() -> socket.socket:
    """Bound; below those that the kernel gives to other programs' connections."""
    while True:
        port = random.randrange(20001, 30000)
        bound = socket.socket()
        try:
            with socket.socket() as before:
                before.bind(("127.0.0.1", port - 1))
            bound.bind(("127.0.0.1", port))
        except OSError:
            bound.close()
        else:
            return bound


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with free_port_after_a_free_one() as taken:
        taken.listen()
        port = taken.getsockname()[1]
        description = describe({**TINY, "port_base": port - 1})
        with pytest.raises(SluiceError, match=f"port {port}: taken.*choose another port_base"):
            DevCluster(tmp_path / "c").up(description)
    assert list(tmp_path.iterdir()) == []


def test_somebody_elses_folder_is_left_alone(tmp_path: Path, tiny_file: Path) -> None:
    (tmp_path / "thesis").write_text("three years")
    with pytest.raises(UsageError, match="nor empty; name another"):
        DevCluster(tmp_path).up(tiny_file)
    with pytest.raises(UsageError, match="holds no cluster"):
        DevCluster(tmp_path).down()
    with pytest.raises(UsageError, match="No such file or directory"):
        DevCluster(tmp_path / "none" / "c").up(tiny_file)
    assert (tmp_path / "thesis").read_text() == "three years"


def test_not_root(tiny_file: Path) -> None:
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    for words in (["up", "demo"], ["down"]):
        command = [*nobody, *SLUICE, "cluster", *words, "--dir", "/tmp/sluice-test-not-root"]
        refused = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd="/")
        assert refused.returncode == 1
        assert "you are not root; run it as root" in refused.stderr
        assert len(refused.stderr.splitlines()) == 1


def test_root_without_the_right_to_mount(tmp_path: Path, tiny_file: Path) -> None:
    less = ["setpriv", "--inh-caps=-sys_admin", "--bounding-set=-sys_admin"]
    command = [*less, *SLUICE, "cluster", "up", "--dir", str(tmp_path / "c"), str(tiny_file)]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 1
    assert "namespaces cannot be made: [Errno 1] unshare: Operation not permitted; containers" in refused.stderr
    assert traces(tmp_path / "c") == []


def test_one_up_or_down_at_a_time(tmp_path: Path, tiny_file: Path) -> None:
    folder = tmp_path / "c"
    folder.mkdir()
    busy = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(busy, fcntl.LOCK_EX)
        for work in (lambda: DevCluster(folder).up(tiny_file), DevCluster(folder).down):
            with pytest.raises(SluiceError, match="another `sluice cluster up` or `down` is running on it"):
                work()
    finally:
        os.close(busy)
    assert DevCluster(folder).down()
    assert traces(folder) == []


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("nodes: [", r"c.yaml:\d+: not YAML"),
        ("nodes:\n- {names: n1, platform: dgx-9000}\n", "dgx-9000"),
        ("nodes:\n- {names: n1}\n", r"c.yaml:2: nodes.0.platform: Field required"),
        ("nodes:\n- {names: n1, platform: none, colour: red}\n", r"c.yaml:2: nodes.0.colour"),
    ],
)
def test_a_broken_cluster_file(text: str, what: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(text)
    command = [*SLUICE, "cluster", "up", "--dir", str(tmp_path / "c"), str(tmp_path / "c.yaml")]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 2
    assert len(refused.stderr.splitlines()) == 1
    assert re.search(what, refused.stderr)
    assert not (tmp_path / "c").exists()
