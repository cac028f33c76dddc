"""Reports on real daemons: figures next to sacct's and sreport's, what users may see, the live view; and alerts."""

from __future__ import annotations

import csv
import fcntl
import io
import json
import os
import pty
import re
import select
import signal
import struct
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from dev_cluster.cluster import DevCluster
from dev_cluster.history import FIRST_ID, History, fill, roll_up
from dev_cluster.layout import INSIDE
from policy.alerts import Alerts, NodeAlerts, NodeRule, compile_alerts
from policy.node import NodePolicy
from sluice.base.files import write_atomic
from sluice.exchange.job_records import FOLDER, JobRecords
from sluice.exchange.record import Event, Grant, JobRecord
from tests.integration.alert_site import PASSWORD, SECRET, USER, Hook, MailServer, make_certificate
from tests.integration.jobs import submit as submit_job
from tests.integration.live_figures import check_live
from tests.integration.settled import PATIENCE, until

pytestmark = pytest.mark.cluster

HOSTILE = "=evil\x1b[31m|\u202ex"
DESCRIPTION: dict[str, Any] = {
    "nodes": [{"names": "g-[1-2]", "platform": "dgx-h100"}],
    "controllers": 2,
    "accounts": [{"name": "lab"}, {"name": "physics", "parent": "lab"}, {"name": "biology", "parent": "lab"}],
    "users": [
        {"name": "alice", "accounts": ["physics"]},
        {"name": "bob", "accounts": ["biology"]},
        {"name": "mallory", "accounts": ["biology"]},
    ],
    "slurm_conf": "AccountingStorageTRES=gres/gpu,gres/shard,gres/gpu:h100\nPrivateData=jobs,usage,users,accounts\n",
    "agent": True,
    "controllerd": True,
    "slurmdbd_conf": "PrivateData=jobs,usage,users,accounts\n",
}
DAY = 86_400


class Site:
    """The cluster, with a history of some days and some real jobs."""

    def __init__(self, cluster: DevCluster) -> None:
        self.cluster = cluster
        now = int(time.time())
        self.midnight = int(time.mktime((*time.localtime(now)[:3], 0, 0, 0, 0, 0, -1)))
        fill(cluster, History(2000, now - 6 * DAY, now - 7500, nodes=("g-1", "g-2"), longest_s=90_000))
        self.done = self.submit("alice", "--gres=gpu:h100:2", "-J", HOSTILE, "-t10", run="sleep 2")
        self.share = self.submit("bob", "--gres=shard:10240", run="sleep 1")
        for job in (self.done, self.share):
            until(lambda job=job: self.state(job) == "COMPLETED")
        fields = cluster.run(["sacct", "--helpformat"]).stdout.split()
        self.planned = "Planned" if "Planned" in fields else "Reserved"  # its name before 23.02
        self.running = self.submit("bob", "--gres=gpu:h100:1", run="exec sleep 86400")
        until(lambda: self.state(self.running) == "RUNNING")

    def submit(self, user: str, *options: str, run: str) -> int:
        return int(submit_job(self.cluster, "-n1", "--mem=100M", *options, wrap=run, user=user, cwd="/"))

    def state(self, job: int) -> str:
        return self.cluster.run(["sacct", "-X", "-n", "-P", "-j", str(job), "-o", "State"]).stdout.strip()

    def sluice(self, *words: str, user: str = "root", check: bool = True) -> str:
        done = self.cluster.run(["sluice", *words], user=user, cwd="/", check=False, timeout=120)
        assert not check or done.returncode == 0, done.stderr
        return done.stdout if check else f"{done.returncode} {done.stderr}"

    def rows(self, *words: str, user: str = "root") -> list[dict[str, Any]]:
        return list(json.loads(self.sluice("report", *words, "--json", user=user))["rows"])

    def sacct(self, *words: str, user: str = "root") -> list[list[str]]:
        lines = self.cluster.run(["sacct", "-X", "-n", "-P", *words], user=user).stdout.splitlines()
        return [line.split("|") for line in lines]


@pytest.fixture(scope="module")
def site(make_shared_cluster: Callable[..., DevCluster]) -> Site:
    return Site(make_shared_cluster(DESCRIPTION))


def iso(seconds: int) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%dT%H:%M:%S")


def tres(text: str) -> dict[str, int]:
    found = {}
    for word in text.split(","):
        name, _, value = word.partition("=")
        match = re.fullmatch(r"(\d+)([MG]?)", value)
        if match:
            found[name] = int(match[1]) * (1024 if match[2] == "G" else 1)
    return found


def test_sums_agree_with_sacct_to_the_second(site: Site) -> None:
    """For a time that cuts jobs at both ends, directly and with rolled-up days."""
    rolled = site.cluster.layout.scratch / "rolled"
    rolled.mkdir()
    folder = f"{INSIDE}/scratch/rolled"
    site.sluice("report", "roll-up", "--days", "6", "--rolled", folder)
    assert len(list(rolled.iterdir())) >= 4
    for start, end in (
        (site.midnight - 4 * DAY + 4321, site.midnight - DAY // 2),
        (site.midnight - 5 * DAY, site.midnight - 2 * DAY),
    ):
        window = ["-S", iso(start), "-E", iso(end)]
        expected: dict[str, dict[str, int]] = {}
        for account, elapsed, allocated in site.sacct("-a", "-T", *window, "-o", "Account,ElapsedRaw,AllocTRES"):
            sums = expected.setdefault(account, {})
            for name, count in tres(allocated).items():
                sums[name] = sums.get(name, 0) + int(elapsed) * count
        for source in (["--fresh"], ["--rolled", folder]):
            totals: dict[str, dict[str, float]] = {}
            for row in site.rows("users", *window, *source, "--by", "account,user"):
                sums = totals.setdefault(row["account"], {})
                for name, key in (
                    ("gres/gpu", "gpu_s"),
                    ("cpu", "cpu_s"),
                    ("mem", "mem_mib_s"),
                    ("gres/shard", "gpu_mem_mib_s"),
                ):
                    sums[name] = sums.get(name, 0) + row[key]
            for account, sums in totals.items():
                assert sums == {name: expected[account].get(name, 0) for name in sums}, (account, source)
            assert set(totals) == set(expected)


def test_sums_agree_with_sreport_to_the_second(site: Site) -> None:
    start, end = site.midnight - 4 * DAY, site.midnight - DAY
    dates = [datetime.fromtimestamp(one).strftime("%m/%d/%y") for one in (start - DAY, end + DAY)]
    roll_up(site.cluster, *dates)
    said = site.cluster.run(
        ["sreport", "-n", "-P", "-t", "seconds", "-T", "gres/gpu,cpu,mem,gres/shard", "cluster",
         "AccountUtilizationByUser", f"start={iso(start)}", f"end={iso(end)}"]
    ).stdout  # fmt: skip
    expected: dict[tuple[str, str], dict[str, int]] = {}
    for line in said.splitlines():
        _, account, user, _, name, used = line.split("|")
        expected.setdefault((account, user), {})[name] = int(used)
    assert expected["lab", ""]["gres/gpu"] > 0
    window = ["-S", iso(start), "-E", iso(end), "--fresh"]
    found = {(row["account"], ""): row for row in site.rows("tenants", *window)}
    found |= {(row["account"], row["user"]): row for row in site.rows("users", *window)}
    keys = {"gres/gpu": "gpu_s", "cpu": "cpu_s", "mem": "mem_mib_s", "gres/shard": "gpu_mem_mib_s"}
    compared = 0
    for place, sums in expected.items():
        if place[0] == "root":
            continue
        assert {name: found[place][keys[name]] for name in sums} == sums, place
        compared += 1
    assert compared == 6  # lab, physics, biology, and their users


def test_waits_agree_with_sacct(site: Site) -> None:
    start, end = site.midnight - 3 * DAY, site.midnight - DAY
    lines = site.sacct("-a", "-S", iso(start), "-E", iso(end), "-o", f"Start,{site.planned}")
    waits = sorted(
        seconds(planned) for begun, planned in lines if begun[:4].isdecimal() and iso(start) <= begun < iso(end)
    )
    found = site.rows("users", "-S", iso(start), "-E", iso(end), "--by", "partition")[0]
    assert found["started"] == len(waits)
    for percent in (50, 90, 95, 99, 100):
        truth = waits[max(1, -(-len(waits) * percent // 100)) - 1]
        key = "wait_max_s" if percent == 100 else f"wait_p{percent}_s"
        assert truth <= found[key] <= truth * 65 / 64 + 1


def seconds(text: str) -> int:
    days, _, clock = text.rpartition("-")
    hours, minutes, rest = clock.split(":")
    return int(days or 0) * DAY + int(hours) * 3600 + int(minutes) * 60 + int(rest)


def test_jobs_are_sacct_s_jobs(site: Site) -> None:
    window = ["-S", iso(site.midnight - 2 * DAY), "-E", iso(site.midnight)]
    ours = site.sluice(
        "report", "jobs", "-P", "-n", "-o", "JobIDRaw,User,Account,State,Submit,Start,End,Wait,NNodes", *window
    )
    theirs = site.sacct("-a", *window, "-o", f"JobIDRaw,User,Account,State,Submit,Start,End,{site.planned},NNodes")
    known = {}
    for job, user, account, state, submit, start, end, planned, nodes in theirs:
        started = start[:4].isdecimal()
        known[job] = [job, user, account, state.split()[0], submit, start if started else "", end,
                      planned if started else "", nodes]  # fmt: skip
    found = {line.split("|")[0]: line.split("|") for line in ours.splitlines()}
    assert len(found) > 100
    assert found == known
    ended = [line for line in ours.splitlines() if line.split("|")[3] == "FAILED"]
    assert site.sluice("report", "jobs", "-s", "F", "-P", "-n", *window).count("\n") == len(ended) > 0


def test_running_and_shared_jobs(site: Site) -> None:
    found = {row["job_id_raw"]: row for row in site.rows("jobs", "-j", f"{site.running},{site.share},{site.done}")}
    assert found[site.running]["state"] == "RUNNING"
    assert found[site.running]["gpu_s"] == found[site.running]["elapsed_s"] > 0
    assert found[site.share]["gpu_s"] == 0
    assert found[site.share]["gpu_mem_mib_s"] == found[site.share]["elapsed_s"] * 10240
    assert found[site.done]["gpu_s"] == 2 * found[site.done]["elapsed_s"]
    past = site.rows("jobs", "-j", str(FIRST_ID + 1))[0]
    assert past["utilisation_percent"] is None  # nobody measured
    now = int(time.time())
    hour = ("-S", iso(now - 3600), "-E", iso(now))  # the same for both, as a job goes on
    types = {row["gpu_type"]: row for row in site.rows("gpus", *hour)}
    assert types["h100"]["gpu_count"] == 16
    nodes = {row["node"]: row for row in site.rows("nodes", *hour)}
    assert set(nodes) == {"g-1", "g-2"}
    assert sum(row["gpu_s"] for row in nodes.values()) == pytest.approx(types["h100"]["gpu_s"], abs=3)
    steps = site.sluice("report", "jobs", "-j", str(site.done), "--steps", "-P", "-n", "-o", "JobID").split()
    assert f"{site.done}.batch" in steps


def test_users_see_what_slurm_lets_them_see(site: Site) -> None:
    """PrivateData is set: others' jobs, usage and names are nobody's business."""
    window = ["-S", iso(site.midnight - 2 * DAY), "-E", iso(site.midnight - DAY)]
    everything = site.rows("users", *window)
    assert {row["user"] for row in everything} == {"alice", "bob", "mallory"}
    for user in ("alice", "mallory"):
        assert {row["user"] for row in site.rows("users", *window, user=user)} == {user}
        theirs = {line[0] for line in site.sacct("-a", *window, "-o", "JobIDRaw", user=user)}
        assert {str(row["job_id_raw"]) for row in site.rows("jobs", "-a", *window, user=user)} == theirs
        tenants = {row["account"]: row["gpu_s"] for row in site.rows("tenants", *window, user=user)}
        own = sum(one["gpu_s"] for one in everything if one["user"] == user)
        account = "physics" if user == "alice" else "biology"
        assert tenants == {"lab": own, account: own}
    refused = site.sluice("report", "job", str(site.done), user="mallory", check=False)
    assert refused.startswith("1 ")
    assert "you may not see it" in refused
    assert str(site.done) in site.sluice("report", "job", str(site.done), user="alice")
    assert site.running not in [row["job_id_raw"] for row in site.rows("jobs", "-u", "bob", user="alice")]
    assert "alice" not in site.sluice("top", "--once", "--part", "jobs", user="mallory")


def test_hostile_names_break_nothing(site: Site) -> None:
    named = ["-j", str(site.done)]
    for words in (["report", "jobs", *named], ["report", "job", str(site.done)]):
        text = site.sluice(*words)
        assert "evil" in text
        assert not [one for one in text if one not in "\r\n" and not one.isprintable()], words
    cells = list(csv.reader(io.StringIO(site.sluice("report", "jobs", *named, "--csv", "-o", "JobName,User"))))
    assert cells[1][0].startswith("'=evil")
    line = site.sluice("report", "jobs", *named, "-P", "-n", "-o", "JobName,User")
    assert line.count("|") == 1
    assert line.strip().isprintable()


def test_records_make_utilisation_and_a_page(site: Site) -> None:
    """As the node's agent sends them; of a job of the past, as the simulated GPUs of this cluster do nothing."""
    past = site.rows("jobs", "-S", iso(site.midnight - 2 * DAY), "-E", iso(site.midnight - DAY), "-s", "CD")
    job = next(row for row in past if row["gpus"] == 2 and row["elapsed_s"] > 60)
    window = ["-S", iso(job["start"]), "-E", iso(job["end"])]
    gib, half = 1 << 30, job["elapsed_s"] / 2
    grants = [
        Grant(n, f"GPU-{n}", "nvidia", "H100", 80 * gib, rung="watchdog", peak=(20 + 20 * n) * gib) for n in range(2)
    ]
    usage = {"gpus": {f"GPU-{n}": {"seconds": half, "utilisation": {"mean": 25.0 + 50 * n, "p95": 90.0, "peak": 100.0},
                                   "energy_j": 1800.0, "idle_s": 0.5} for n in range(2)}}  # fmt: skip
    record = JobRecord(
        job["job_id_raw"], 2001, job["user"], job["account"], "main", job["node_list"], job["start"] + 0.5,
        job["end"] + 0.2, grants=grants, events=[Event(job["start"] + 1.0, "warn", {"used": 1})], usage=usage,
    )  # fmt: skip
    JobRecords(site.cluster.layout.state / FOLDER).append([record])
    number = job["job_id"]
    row = site.rows("jobs", "-j", number)[0]
    assert (row["utilisation_percent"], row["gpu_energy_j"]) == (50, 3600)
    tenant = next(one for one in site.rows("tenants", *window) if one["account"] == job["account"])
    assert tenant["utilisation_percent"] == 50
    assert tenant["wasted_gpu_s"] == pytest.approx(half)  # half of what was measured: two GPUs for half of the time
    each = {row["gpu"]: row for row in site.rows("gpus", "--each", *window) if row["node"] == job["node_list"]}
    assert set(each) == set("01234567"), "also those that nobody had"
    assert [each[n]["utilisation_percent"] for n in ("0", "1")] == [25, 75]
    page = site.sluice("report", "job", number)
    assert "75%" in page
    assert "peak 40G" in page
    assert "close to the limit" in page
    assert f"sbatch --account={job['account']}" in page
    document = json.loads(site.sluice("report", "job", number, "--json"))
    assert [gpu["index"] for gpu in document["used"]["gpus"]] == [0, 1]
    assert site.sluice("report", "gpus", "--each", user="alice", check=False).startswith("1 ")


def test_runs_of_a_job_on_different_nodes_are_distinguished(site: Site) -> None:
    """Requeued, and begun again within two minutes: page, rows and AdminComment are of one run each."""
    run = 'if [ "${SLURM_RESTART_COUNT:-0}" = 0 ]; then sleep 600; fi'
    job = site.submit("alice", "--requeue", "-wg-1", "--gres=gpu:h100:2", run=run)
    log = site.cluster.log("agent@g-1")
    until(lambda: re.search(rf"action=prolog .*job={job}\b", log.read_text()))
    show = ["scontrol", "show", "job", "-o", str(job)]
    site.cluster.run(["scontrol", "requeue", str(job)])
    until(lambda: "JobState=PENDING" in site.cluster.run(show).stdout)
    site.cluster.run(["scontrol", "update", f"JobId={job}", "ReqNodeList=g-2", "StartTime=now"])
    until(lambda: site.state(job) == "COMPLETED")
    records = JobRecords(site.cluster.layout.state / FOLDER)
    until(lambda: len(records.of_job(job)) == 2)
    first, second = records.of_job(job)
    assert (first.node, first.restarts, second.node, second.restarts) == ("g-1", 0, "g-2", 1)
    page = json.loads(site.sluice("report", "job", str(job), "--json"))
    assert page["runs"] == 2 and [gpu["node"] for gpu in page["used"]["gpus"]] == ["g-2"] * 2
    rows = {row["node_list"]: row for row in site.rows("jobs", "-j", str(job))}
    assert set(rows) == {"g-1", "g-2"} and all(row["gpu_mem_peak_mib"] is not None for row in rows.values())
    until(lambda: ",gpus=2," in site.sacct("-j", str(job), "-o", "AdminComment")[-1][0])


def test_a_picture(site: Site) -> None:
    site.sluice("report", "tenants", "-S", "now-3days", "--plot", f"{INSIDE}/scratch/a.svg")
    assert (site.cluster.layout.scratch / "a.svg").stat().st_size > 5000


@pytest.mark.parametrize("words", [["gpus", "--gpu-class", "h900"]])
def test_mistakes_are_named(site: Site, words: list[str]) -> None:
    found = site.sluice("report", *words, check=False)
    assert found.startswith("2 sluice: "), found
    assert "Traceback" not in found


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tenants", "-A", "nosuch"], "account 'nosuch' is not known, or not yours to see"),
        (["jobs", "-p", "nopart"], "partition 'nopart' is not known, or not yours to see"),
        (["jobs", "-j", "999999"], "no such jobs, or not yours to see"),
        (["users", "-A", "lab", "-s", "OOM"], "no such jobs in this time"),
    ],
)
def test_an_empty_report_says_why(site: Site, words: list[str], said: str) -> None:
    done = site.cluster.run(["sluice", "report", *words, "-S", "now-1hour"], cwd="/", timeout=120)
    assert f"sluice: nothing to show: {said}\n" in done.stderr
    assert len(done.stdout.splitlines()) == 2, "the header alone"


def test_top_in_a_terminal_of_80_columns(site: Site) -> None:
    """Through a pty: what is drawn, keys, and that it leaves the terminal as it was."""
    screen = Terminal(site, 80, 24)
    try:
        screen.until("g-1")
        screen.type("\x0c")
        screen.until("sluice top")
        screen.until("GPUs 1+0 shared of 16")
        screen.until("[1 gpus]")
        screen.type("2\x0c")
        screen.until("[2 jobs]")
        screen.until("bob")
        screen.type("/nobody\r")
        screen.until("nothing to show")
        screen.type("/\x7f\x7f\x7f\x7f\x7f\x7f\r\x0c")
        screen.until("bob")
        screen.type("\r\x0c")
        screen.until(f"sluice report job {site.running}")
        screen.type("q")
        assert screen.ended() == 0
    finally:
        screen.close()


class Terminal:
    """`sluice top` on a pty; what it draws as plain text, escape sequences taken out."""

    def __init__(self, site: Site, width: int, height: int) -> None:
        words = [
            "sluice",
            "cluster",
            "exec",
            "--dir",
            str(site.cluster.layout.folder),
            "--",
            "sluice",
            "top",
            "-d",
            "1",
        ]
        self.pid, self.master = pty.fork()
        if self.pid == 0:
            tool = Path(__file__).parents[2] / ".venv/bin/sluice"
            os.execv(tool, words)
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        self.data = b""
        self.seen = 0

    def text(self) -> str:
        plain = re.sub(rb"\x1b(?:\[[0-9;?]*[A-Za-z]|[()].|[=>78M])", b" ", self.data[self.seen :])
        return plain.decode("utf-8", "replace")

    def until(self, word: str, seconds: float = PATIENCE) -> None:
        deadline = time.monotonic() + seconds
        while word not in self.text():
            assert time.monotonic() < deadline, self.text()[-3000:]
            if select.select([self.master], [], [], 0.2)[0]:
                self.data += os.read(self.master, 65536)

    def type(self, keys: str) -> None:
        self.seen = len(self.data)
        os.write(self.master, keys.encode())

    def ended(self) -> int:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if select.select([self.master], [], [], 0.1)[0]:
                with suppress(OSError):  # the other end is closed
                    self.data += os.read(self.master, 65536)
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.pid = 0
                return os.waitstatus_to_exitcode(status)
        return -1

    def close(self) -> None:
        if self.pid:
            os.kill(self.pid, 9)
            os.waitpid(self.pid, 0)
        os.close(self.master)


def test_history_is_known(site: Site) -> None:
    assert site.sacct("-j", str(FIRST_ID + 1), "-o", "JobName")[0] == ["job1"]


# ---- running jobs ----


def test_running_jobs_show_what_they_use_now(site: Site) -> None:
    check_live(site.cluster, "g-2", "alice", "mallory", lambda job: site.cluster.run(["scancel", str(job)]))


# ---- alerts ----


def test_alerts_from_a_real_idle_gpu_to_a_cancelled_job(site: Site) -> None:
    """Agent, controllers' daemon, sinks and Slurm: reported, warned, cancelled, resolved; the daemon restarts."""
    folder = site.cluster.layout.scratch
    taken = folder / "taken"
    taken.touch()
    taken.chmod(0o666)
    program = folder / "bin/alert"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ncat >> {INSIDE}/scratch/taken\n")
    program.chmod(0o755)

    def messages(rule: str) -> list[dict[str, Any]]:
        whole = [line for line in taken.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return [one for one in map(json.loads, whole) if one["rule"] == rule]

    def states(rule: str) -> list[str]:
        return [one["state"] for one in messages(rule)]

    alerts = NodeAlerts(
        interval=2,
        readings=True,
        rules=(
            NodeRule(
                name="idle",
                kind="gpu-idle",
                threshold=1,
                duration=3,
                tenants=("biology",),
                action="cancel",
                warning=3,
                severity="critical",
            ),
            NodeRule(name="out", kind="node-drained", threshold=1, duration=0, nodes="g-2"),
            NodeRule(name="warm", kind="temperature", threshold=1, duration=0, nodes="g-2"),
            NodeRule(name="quiet", kind="temperature", threshold=1, duration=0, nodes="g-1"),
        ),
        sinks={"script": {"kind": "exec", "program": f"{INSIDE}/scratch/bin/alert"}, "log": {"kind": "log"}},
    )
    (site.cluster.layout.state / "sluice.alerts").mkdir(mode=0o700, exist_ok=True)
    site.cluster.run(["chown", "slurm", f"{INSIDE}/state/sluice.alerts"])
    site.sluice("alerts", "silence", "qui*", "--for", "1h", "--comment", "a test")
    (site.cluster.layout.slurm / "sluice.node.json").write_text(NodePolicy(alerts=alerts).render())
    assert "taken" in site.sluice("alerts", "test", "script")
    assert messages("test")[0]["state"] == "test"

    site.cluster.run(["scontrol", "update", "NodeName=g-2", "State=DRAIN", f"Reason={HOSTILE}"])
    until(lambda: messages("out"))
    assert messages("out")[0]["subjects"][0]["name"] == "node g-2"
    assert all(one.isprintable() for one in messages("out")[0]["subjects"][0]["text"])
    until(lambda: messages("warm"))
    assert all(one["name"].startswith("g-2 GPU") for one in messages("warm")[0]["subjects"])
    row = re.compile(r"^g-1 .* 1/8 +(\d+%|-) ", re.MULTILINE)
    until(lambda: (found := row.search(site.sluice("top", "--once"))) and found[1] == "0%")
    others = row.search(site.sluice("top", "--once", user="alice"))
    assert others is not None and others[1] == "-", "only SlurmUser and root read what nodes told"
    until(lambda: messages("idle"))
    assert f"job {site.running} of bob" in messages("idle")[0]["subjects"][0]["name"]
    until(lambda: site.state(site.running).startswith("CANCELLED"))
    until(lambda: states("idle"), lambda seen: seen == ["firing", "resolved"])

    rows = json.loads(site.sluice("alerts", "list", "--all", "--json"))
    assert {row["rule"]: row["state"] for row in rows["alerts"]} == {
        "out": "firing",
        "warm": "firing",
        "quiet": "silenced",
    }
    assert [one["rule"] for one in rows["silences"]] == ["qui*"]
    site.cluster.stop_daemon("controllerd@ctl1")
    site.cluster.start_daemon("controllerd@ctl1")
    site.cluster.run(["scontrol", "update", "NodeName=g-2", "State=RESUME"])
    until(lambda: states("out"), lambda seen: seen == ["firing", "resolved"])
    assert states("warm") == ["firing"]  # not sent again by the new daemon
    assert not messages("quiet")
    assert len({one["id"] for one in messages("out") + messages("idle")}) == 4
    assert site.sluice("alerts", "list", user="alice", check=False).startswith("1 ")


@pytest.fixture
def told(site: Site, tmp_path: Path) -> Iterator[tuple[MailServer, Hook, str]]:
    """A mail server, a webhook, and a policy whose messages go there."""
    certificate, key = make_certificate(tmp_path)
    mail, hook = MailServer(certificate, key), Hook()
    hook.start()
    slurm = site.cluster.layout.slurm
    (slurm / "mail.pem").write_text(certificate.read_text())
    for name, secret in (("smtp.password", PASSWORD), ("webhook.secret", SECRET)):
        (slurm / name).touch(mode=0o600)
        (slurm / name).write_text(secret + "\n")
        site.cluster.run(["chown", "slurm", f"/etc/slurm/{name}"])
    server = mail.start()
    section = {
        "interval": "5s",
        "rules": {
            "near": {"kind": "quota", "threshold": 80, "duration": "0s"},
            "full": {"kind": "quota", "duration": "0s"},
            "spent": {"kind": "budget", "threshold": 80},
            "gone": {"kind": "node-drained", "duration": "0s", "scope": {"nodes": "g-2"}},
            "quiet": {"kind": "node-drained", "duration": "0s"},
            "base": {"kind": "database-down", "duration": "20s"},
            "lead": {"kind": "takeover", "severity": "critical"},
        },
        "sinks": {
            "mail": {"kind": "email", "to": ["admins@site.org"], "server": server, "tls": "starttls", "user": USER,
                     "password_file": "/etc/slurm/smtp.password", "ca_file": "/etc/slurm/mail.pem"},
            "chat": {"kind": "webhook", "url": hook.url, "without_tls": True,
                     "secret_file": "/etc/slurm/webhook.secret"},
        },
    }  # fmt: skip
    yield mail, hook, NodePolicy(alerts=compile_alerts(Alerts.model_validate(section))).render()
    mail.stop()
    hook.stop()


def test_alerts_by_mail_and_webhook_over_a_restart_and_a_takeover(
    site: Site, told: tuple[MailServer, Hook, str]
) -> None:
    """The last test: it ends the leading controller."""
    mail, hook, policy = told

    def both(rule: str, *states: str) -> None:
        """Wait until both received exactly this of a rule."""
        until(lambda: (hook.about(rule), mail.about(rule)), lambda seen: seen == (list(states), list(states)))

    def alerts() -> dict[str, Any]:
        """Those that the controllers keep, by rule."""
        state = site.cluster.layout.state / "sluice.alerts" / "state.json"
        return json.loads(state.read_text())["alerts"]  # type: ignore[no-any-return]

    # biology has 4 GPUs of 5, physics 4 of 4, and biology used up its share of GPU memory when the module began.
    limits = ["sacctmgr", "-i", "modify", "account"]
    site.cluster.run([*limits, "biology", "set", "GrpTRES=gres/gpu=5", "GrpTRESMins=gres/shard=10"])
    site.cluster.run([*limits, "physics", "set", "GrpTRES=gres/gpu=4"])
    jobs = [site.submit(user, "-wg-1", "--gres=gpu:h100:4", run="exec sleep 600") for user in ("bob", "alice")]
    site.sluice("alerts", "silence", "quiet", "--for", "1h")
    site.cluster.run(["scontrol", "update", "NodeName=g-2", "State=DRAIN", "Reason=fan"])
    for job in jobs:
        until(lambda job=job: site.state(job) == "RUNNING")
    hook.behave(fails=1)
    write_atomic(site.cluster.layout.slurm / "sluice.node.json", policy)
    expected = {
        "near": ["tenant biology", "tenant physics"],
        "full": ["tenant physics"],
        "gone": ["node g-2"],
        "spent": ["tenant biology GiB-hours"],
    }
    for rule, subjects in expected.items():
        both(rule, "firing")
        assert sorted(hook.subjects(rule)) == subjects
    assert hook.refused == 1, "it was tried again"
    assert site.sluice("alerts", "test", user="slurm").split() == ["mail:", "taken", "chat:", "taken"]

    # What the webhook has not taken when the daemon is killed it gets from the next, also where its answer gets lost.
    hook.behave(fails=1 << 30)
    site.cluster.run(["scancel", *map(str, jobs)])
    until(lambda: mail.about("full") == ["firing", "resolved"])
    # What the state does not have yet is sent again, and only once the database answers.
    until(lambda: not alerts()["full"] and not alerts()["near"])
    site.cluster.stop_daemon("controllerd@ctl1", number=signal.SIGKILL)
    assert hook.about("full") == ["firing"]
    hook.behave(mute=1)
    site.cluster.stop_daemon("slurmdbd")
    site.cluster.start_daemon("controllerd@ctl1")
    both("full", "firing", "resolved")
    until(lambda: hook.resolved("near") == expected["near"])
    both("base", "firing")
    assert max(hook.deliveries.values()) == 2, "the answer that got lost"

    # The controller that takes over goes on where the other one ended.
    site.cluster.stop_daemon("slurmctld@ctl1", number=signal.SIGKILL)
    site.cluster.start_daemon("slurmdbd")
    both("lead", "happened")
    assert hook.subjects("lead") == ["controller ctl2"]
    site.cluster.run(["scontrol", "update", "NodeName=g-2", "State=RESUME"])
    # Slurm asks a node that was drained to register first, and may need several pings for that.
    show = ["sinfo", "-h", "-n", "g-2", "-o", "%T"]
    until(lambda: site.cluster.run(show).stdout.strip(), lambda seen: seen == "idle", timeout=3 * PATIENCE)
    both("gone", "firing", "resolved")
    both("base", "firing", "resolved")
    assert not hook.about("quiet") and not mail.about("quiet")
    assert not hook.unsigned and all(mail.encrypted)
