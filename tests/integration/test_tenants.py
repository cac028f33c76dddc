"""That limits hold, by every way to a job; that guarantees come back; and that nobody gets around the commands."""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from dev_cluster.cluster import DevCluster
from tests.integration.policy_site import INSIDE, OtherSystemSite, PolicySite, description
from tests.integration.settled import start_again
from tests.integration.versions import NATIVE_FIRST

pytestmark = pytest.mark.cluster

# Each tenant may have two units at once; a unit is one job with the given options.
KINDS = {
    "gpus": ("limit: {gpus: 2}", "--gres=gpu:h100:1"),
    "untyped": ("limit: {gpus: 2}", "--gres=gpu:1"),
    "class": ("limit: {classes: {h100: {gpus: 2}}}", "--gres=gpu:h100:1"),
    "memory": ("limit: {gpu_memory: 20G}", "--gres=shard:10240"),
    "user": ("max_gpus_per_user: 2", "--gres=gpu:h100:1"),
    "running": ("max_jobs: 2", "--mem=10M"),
    "guarantee": ("guarantee: {gpus: 2}, borrow: true", "--gres=gpu:h100:1"),
    "below": ("parent: top", "--gres=gpu:h100:1"),
}
POLICY = (
    "classes: {h100: {types: [h100]}, l40s: {types: [l40s]}}\ntenants:\n  top: {limit: {gpus: 2}}\n"
    + "".join(f"  {kind}: {{members: [alice, bob], {limit}}}\n" for kind, (limit, _) in KINDS.items())
    + "  submit: {members: [alice], max_queued: 3}\n"
    + "  wall: {members: [alice], max_time: 1h}\n"
    + "  large: {members: [alice], per_job: {gpus: 2}}\n"
    + "  hours: {members: [alice], limit: {gpu_hours: 1}}\n"
    + "  gone: {members: [alice], expires: 2020-01-01}\n"
    + "scheduling: {usage_period: monthly, fair_share_half_life: 0s}\n"
)
CLEAR = re.compile(r"Assoc|QOS|Account", re.IGNORECASE)


@pytest.fixture(scope="module")
def site(make_shared_cluster: Callable[..., DevCluster]) -> PolicySite:
    return PolicySite(make_shared_cluster(description()))


@pytest.fixture(scope="module", params=NATIVE_FIRST)
def each_site(make_shared_cluster: Callable[..., DevCluster], request: pytest.FixtureRequest) -> PolicySite:
    """The site, on each version of Slurm."""
    if request.param == "native":
        found: PolicySite = request.getfixturevalue("site")
        return found
    return OtherSystemSite(make_shared_cluster(description(), root=request.getfixturevalue("trixie_root")))


@pytest.fixture(scope="module")
def limited(each_site: PolicySite) -> PolicySite:
    each_site.apply(POLICY)
    return each_site


def running(site: PolicySite, account: str) -> int:
    """Jobs of an account that have resources."""
    return sum(row[4] == account for row in site.jobs(states="RUNNING,COMPLETING,CONFIGURING,SUSPENDED"))


class Watch:
    """Samples how many units run, in a thread, as the clients submit."""

    def __init__(self, site: PolicySite, account: str) -> None:
        self.most = 0
        self._stop = threading.Event()
        self._site, self._account = site, account
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._stop.is_set():
            rows = self._site.jobs(states="RUNNING")
            self.most = max(self.most, sum(row[4] == self._account for row in rows))

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()


@pytest.mark.parametrize("kind", list(KINDS))
def test_never_over_the_limit_by_any_way(limited: PolicySite, kind: str, full_scale: bool) -> None:
    site = limited
    unit = KINDS[kind][1]
    options = ("-A", kind, unit, "-n1", "--mem=10M") if unit != "--mem=10M" else ("-A", kind, unit, "-n1")
    try:
        with Watch(site, kind) as watch:
            first = site.sbatch("alice", *options)
            second = site.sbatch("alice", *options)
            site.wait(lambda: site.state(first)[0] == site.state(second)[0] == "RUNNING")

            more = site.sbatch("alice", *options)
            array = site.sbatch("alice", *options, "--array=0-3")
            het = site.run("sbatch", "--parsable", "-o", "/dev/null", *options, ":", *options, "--wrap=exec sleep 60",
                           user="alice", cwd="/").stdout.strip()  # fmt: skip

            def at_once(client: str) -> int:
                words = (client, *options, "--immediate=2", "true")
                return site.run(*words, user="alice", check=False, timeout=120).returncode

            with ThreadPoolExecutor(2) as clients:
                assert all(clients.map(at_once, ("srun", "salloc")))
            held = site.sbatch("alice", "-A", kind, "-n1", "--mem=10M", "--hold")
            if unit.startswith("--gres"):
                changed = unit.removeprefix("--gres=").replace(":", ":", 1)
                site.run("scontrol", "update", f"JobId={held}", f"TresPerNode=gres:{changed}", user="alice")
            site.run("scontrol", "release", held, user="alice")

            def client(number: int) -> str:
                return site.sbatch("alice" if kind == "user" else ("alice", "bob")[number % 2], *options, check=False)

            with ThreadPoolExecutor(20) as clients:
                submitted = list(clients.map(client, range(100 if full_scale else 20)))
            assert all(one.isdecimal() for one in submitted), submitted
            time.sleep(3)  # two scheduling cycles
        assert watch.most == 2
        assert running(site, kind) == 2
        for job in (more, f"{array}_0", het, held):
            state, reason = site.wait(lambda job=job: _settled(site, job))
            assert (state, bool(CLEAR.search(reason))) == ("PENDING", True), (job, state, reason)
        site.run("scancel", first, user="alice")
        site.wait(lambda: running(site, kind) == 2 and site.state(first)[0] == "CANCELLED")
    finally:
        site.clear()


def _settled(site: PolicySite, job: str) -> tuple[str, str] | None:
    """State and reason, once the scheduler has looked at the job."""
    state, reason = site.state(job)
    return None if reason in ("None", "Priority", "BeginTime") else (state, reason)


def test_most_jobs_are_refused_at_submit_by_any_way(limited: PolicySite) -> None:
    site = limited
    try:
        jobs = [site.sbatch("alice", "-A", "submit", "--hold") for _ in range(3)]
        assert all(job.isdecimal() for job in jobs)
        for words in (("--hold",), ("--array=0-2",), (":", "-n1")):
            said = site.sbatch("alice", "-A", "submit", *words, check=False)
            assert "AssocGrpSubmitJobsLimit" in said, said
        for client in ("srun", "salloc"):
            done = site.run(client, "-A", "submit", "--immediate=2", "true", user="alice", check=False)
            assert "AssocGrpSubmitJobsLimit" in done.stderr, (client, done.stderr)
        other = site.sbatch("alice", "-A", "wall", "--time=1", "--hold")
        moved = site.run("scontrol", "update", f"JobId={other}", "Account=submit", user="alice", check=False)
        assert moved.returncode != 0
        with ThreadPoolExecutor(20) as clients:
            tried = list(clients.map(lambda _: site.sbatch("alice", "-A", "submit", "--hold", check=False), range(20)))
        assert not any(one.isdecimal() for one in tried)
        assert "AssocGrpSubmitJobsLimit" in site.sbatch("alice", "-A", "gone", check=False)
        assert sum(row[4] == "submit" for row in site.jobs(states="PENDING")) == 3
    finally:
        site.clear()


@pytest.mark.parametrize(
    ("account", "within", "over", "update", "reason"),
    [
        ("wall", ["--time=59"], ["--time=61"], "TimeLimit=2:00:00", "MaxWall"),
        (
            "hours",
            ["--gres=gpu:h100:1", "--time=20"],
            ["--gres=gpu:h100:2", "--time=21"],
            "TimeLimit=1:30:00",
            "Minutes|Mins",
        ),
        ("large", ["--gres=gpu:h100:2"], ["--gres=gpu:h100:3"], "TresPerNode=gres:gpu:h100:3", "MaxGRESPerJob|MaxTRES"),
    ],
)
def test_the_largest_job_by_any_way(
    limited: PolicySite, account: str, within: list[str], over: list[str], update: str, reason: str
) -> None:
    site = limited
    try:
        fine = site.sbatch("alice", "-A", account, *within)
        site.wait(lambda: site.state(fine)[0] == "RUNNING")
        with ThreadPoolExecutor(20) as clients:
            submitted = list(clients.map(lambda _: site.sbatch("alice", "-A", account, *over, check=False), range(20)))
        submitted.append(site.sbatch("alice", "-A", account, *over, "--array=0-1", check=False))
        het = site.sbatch("alice", "-A", account, *within, ":", "-A", account, *over, check=False)
        for client in ("srun", "salloc"):
            done = site.run(client, "-A", account, *over, "--immediate=2", "true", user="alice", check=False)
            assert done.returncode != 0
        held = site.sbatch("alice", "-A", account, *within, "--hold")
        site.run("scontrol", "update", f"JobId={held}", update, user="alice", check=False)
        site.run("scontrol", "release", held, user="alice")
        for said in submitted:
            if said.isdecimal():
                state, why = site.wait(lambda said=said: _settled(site, said))
                assert state == "PENDING", (said, why)
            else:
                why = said
            assert re.search(reason, why), why
        state, why = site.wait(lambda: site.state(held) if site.state(held)[0] == "RUNNING" else _settled(site, held))
        if state == "RUNNING":  # the update was refused, and the job is as it was
            shown = site.run("scontrol", "show", "job", held).stdout
            assert "TimeLimit=00:59:00" in shown or "TimeLimit=00:20:00" in shown or "gres:gpu:h100:2" in shown, shown
        else:
            assert re.search(reason, why), why
        if het.isdecimal():  # its first part alone may wait for anything
            site.wait(
                lambda: re.search(reason, " ".join(row[2] for row in site.jobs() if row[0].startswith(f"{het}+")))
            )
        else:
            assert re.search(reason, het), het
        assert {row[0] for row in site.jobs(states="RUNNING") if row[4] == account} <= {fine, held}
    finally:
        site.clear()


def test_a_guarantee_comes_back_from_over_quota_work(site: PolicySite) -> None:
    """The borrower has the whole cluster; the owner comes back; the borrower's jobs are signalled, requeued, finish."""
    site.apply(
        "classes: {h100: {types: [h100]}, l40s: {types: [l40s]}}\n"
        "tenants:\n"
        "  owner: {members: [carol], guarantee: {classes: {h100: {gpus: 16}}}}\n"
        "  borrower: {members: [dave], borrow: true}\n"
        "scheduling: {preemption: {grace: 3s, min_run_time: 5s}}\n",
        "--force",
        "--drain-time=0s",
    )
    log = site.scratch / "signals"
    log.mkdir(mode=0o777)
    log.chmod(0o777)
    script = (
        f"trap 'echo term >> {INSIDE}/signals/$SLURM_JOB_ID' USR1\n"
        f"echo start >> {INSIDE}/signals/$SLURM_JOB_ID\n"
        f"while [ ! -e {INSIDE}/signals/finish ]; do sleep 0.2; done; echo end >> {INSIDE}/signals/$SLURM_JOB_ID"
    )
    wide = (
        "-A",
        "borrower",
        "--gres=gpu:h100:4",
        "-n1",
        "--mem=10M",
        "-o",
        "/dev/null",
        "--requeue",
        "--signal=B:USR1@1",
    )
    borrowed = [
        site.run("sbatch", "--parsable", *wide, f"--wrap={script}", user="dave", cwd="/").stdout.strip()
        for _ in range(8)
    ]
    site.wait(lambda: running(site, "borrower") == 8)
    site.wait(lambda: {path.name for path in log.iterdir() if path.read_text()} == set(borrowed))  # the trap is set
    time.sleep(5)  # min_run_time
    begin = time.monotonic()
    owned = [site.sbatch("carol", "-A", "owner", "--gres=gpu:h100:4", "-n1", "--mem=10M") for _ in range(4)]
    site.wait(lambda: all(site.state(job)[0] == "RUNNING" for job in owned), 60)
    assert time.monotonic() - begin < 60
    signalled = [path.name for path in log.iterdir() if "term" in path.read_text()]
    assert 4 <= len(signalled) <= 8
    assert set(signalled) <= set(borrowed)
    requeued = site.wait(lambda: [row[0] for row in site.jobs(states="PENDING") if row[4] == "borrower"])
    assert set(requeued) <= set(signalled)
    (log / "finish").touch()
    site.run("scancel", *owned)
    site.wait(lambda: not site.jobs(states="COMPLETING"))
    start_again(site.cluster, *requeued, user="dave")
    site.wait(lambda: not site.jobs(states="PENDING,RUNNING,COMPLETING"), 120)
    assert all((log / job).read_text().splitlines()[-1] == "end" for job in borrowed)
    for job in requeued:
        assert (log / job).read_text().split() == ["start", "term", "start", "end"]


# ---- who may do what ----


GUARDED = """\
tenants:
  acme: {limit: {gpus: 8}, coordinators: [carol]}
  red: {parent: acme, members: [alice], limit: {gpus: 4}}
  blue: {members: [bob], limit: {gpus: 2}}
"""


@pytest.fixture
def guarded(site: PolicySite) -> PolicySite:
    site.apply(GUARDED, "--force", "--drain-time=0s")
    return site


def fingerprint(site: PolicySite) -> tuple[str, ...]:
    """All that must not change."""
    return (
        site.sacctmgr("show", "association", "woplimits", "format=account,user,grptres,grpsubmit,qos,maxwall"),
        site.sacctmgr("show", "qos", "format=name,priority,preempt,maxtrespa"),
        site.sacctmgr("show", "user", "format=user,admin"),
        site.file.read_text(),
        (site.cluster.layout.slurm / "sluice.policy").read_text(),
        (site.scratch / "state/audit/audit.log").read_text(),
        (site.scratch / "state/applied.json").read_text(),
    )


def test_users_change_nothing_by_arguments_environment_or_files(guarded: PolicySite) -> None:
    site = guarded
    before = fingerprint(site)
    home = site.cluster.layout.homes / "mallory"
    (home / "sluice.yaml").write_text(GUARDED.replace("gpus: 2", "gpus: 999").replace("[bob]", "[bob, mallory]"))
    (home / "state").mkdir(exist_ok=True)
    (home / "bin").mkdir(exist_ok=True)
    fake = home / "bin/sacctmgr"
    fake.write_text('#!/bin/sh\necho "mallory|Administrator|"\nexec /usr/bin/sacctmgr "$@"\n')
    fake.chmod(0o755)
    conf = (site.cluster.layout.slurm / "slurm.conf").read_text()
    (home / "slurm.conf").write_text(conf.replace("AccountingStorageEnforce=associations,limits,qos,safe\n", ""))
    for path in (home, *home.rglob("*")):
        path.chmod(0o777)
    inside = "/run/sluice-cluster/home/mallory"
    mine = ["--file", f"{inside}/sluice.yaml"]
    state = ["--state-dir", f"{INSIDE}/state"]
    own_state = ["--state-dir", f"{inside}/state"]
    path = site.cluster.facts["path"]
    attempts: list[tuple[list[str], dict[str, str]]] = [
        (["apply", "--yes", *mine, *state], {}),
        (["apply", "--yes", "--force", *mine, *own_state], {}),
        (["apply", "--yes", *mine], {}),
        (["apply", "--yes", *mine, *state], {"USER": "root", "LOGNAME": "root", "SUDO_USER": "root", "SLURM_UID": "0"}),
        (["apply", "--yes", *mine, *state], {"PATH": f"{inside}/bin:{path}"}),
        (["apply", "--yes", *mine, *state, "--slurm-prefix", inside], {}),
        (["apply", "--yes", *mine, *state], {"SLURM_CONF": f"{inside}/slurm.conf"}),
        (["apply", "--yes", *mine, *state, "--slurm-conf", f"{inside}/slurm.conf"], {"PATH": f"{inside}/bin:{path}"}),
        (["tenant", "set", "blue", "limit.gpus=99", "--yes", "--file", f"{INSIDE}/sluice.yaml", *state], {}),
        (["tenant", "set", "blue", "limit.gpus=99", "--yes", *mine, *state], {"PATH": f"{inside}/bin:{path}"}),
        (["tenant", "members", "blue", "--add", "mallory", "--yes", *mine, *state], {}),
        (["quota", "set", "blue", "limit.gpus=99", "--yes", *mine, *own_state], {}),
        (["audit", "append", *state], {}),
        (["audit", "append", *own_state], {}),
    ]
    for words, env in attempts:
        done = site.run("sluice", *words, user="mallory", check=False, env=env, input_text="{}\n")
        assert done.returncode != 0, words
        assert done.stderr.strip(), words
        assert "Traceback" not in done.stderr, done.stderr
    assert fingerprint(site) == before
    # a link in place of one's own policy file does not reach anybody else's
    (home / "sluice.yaml").unlink()
    (home / "sluice.yaml").symlink_to("/etc/shadow")
    done = site.run("sluice", "policy", "check", f"{inside}/sluice.yaml", user="mallory", check=False)
    assert done.returncode != 0
    assert "root:" not in done.stdout + done.stderr


def test_users_see_what_is_theirs(guarded: PolicySite) -> None:
    site = guarded
    mine = json.loads(site.run("sluice", "whoami", "--json", user="alice").stdout)
    assert [tenant["name"] for tenant in mine["tenants"]] == ["red"]
    assert mine["level"] == "user"
    example = mine["tenants"][0]["example"].replace("job.sh", "--wrap=true -o /dev/null").split()
    assert site.run(*example, user="alice", check=False, cwd="/").returncode == 0
    site.clear()
    listed = site.run("sluice", "tenant", "list", "-nPo", "tenant", user="alice").stdout.split()
    assert listed == ["acme", "red"]
    assert site.run("sluice", "quota", "show", "blue", user="alice", check=False).returncode == 2
    assert site.run("sluice", "quota", "show", "red", user="alice").returncode == 0
    assert "no tenant" in site.run("sluice", "whoami", user="mallory").stdout


def test_users_see_the_qos_of_over_quota_work(site: PolicySite) -> None:
    site.apply(
        "tenants:\n  zeta: {members: [alice], guarantee: {gpus: 1}, borrow: true}\n", "--force", "--drain-time=0s"
    )
    assert "--qos=sluice_over)" in site.run("sluice", "whoami", user="alice").stdout


def test_coordinators_change_their_subtree_only(guarded: PolicySite) -> None:
    site = guarded
    group = str(site.cluster.facts["unix_users"]["carol"]["gid"])
    site.run("chgrp", "-R", group, f"{INSIDE}/state", "/etc/slurm/sluice.policy")
    site.run("chmod", "-R", "g+rwX", f"{INSIDE}/state")
    site.run("chmod", "0777", INSIDE)
    site.run("chgrp", group, f"{INSIDE}/sluice.yaml")
    site.file.chmod(0o664)
    site.sluice("tenant", "members", "red", "--add", "dave", "--yes", user="carol")
    assert "dave" in site.sacctmgr("show", "association", "account=red", "format=user")
    assert "alice, dave" in site.file.read_text()
    for words in (
        ("tenant", "members", "blue", "--add", "carol", "--yes"),
        ("tenant", "set", "acme", "limit.gpus=99", "--yes"),
        ("tenant", "create", "mine", "--yes"),
    ):
        text = site.file.read_text()
        done = site.sluice(*words, user="carol", check=False)
        assert done.returncode == 1, (words, done.stdout, done.stderr)
        assert "carol may not change" in done.stderr
        assert site.file.read_text() == text
    assert site.sacctmgr("show", "association", "account=acme", "user=", "format=grptres") == "gres/gpu=8"
    site.sluice("apply", "--yes")
    assert site.changes() == []


def test_an_operator_needs_the_files_too_and_gets_an_error(guarded: PolicySite) -> None:
    site = guarded
    site.sacctmgr("modify", "user", "oper", "set", "adminlevel=operator")
    site.run("chmod", "-R", "o+rX", f"{INSIDE}/state")
    before = fingerprint(site)
    site.run("install", "-o", "oper", "/dev/null", f"{INSIDE}/oper.yaml")
    (site.scratch / "oper.yaml").write_text(GUARDED.replace("gpus: 2", "gpus: 3"))
    done = site.run("sluice", "apply", "--yes", "-f", f"{INSIDE}/oper.yaml", "--state-dir", f"{INSIDE}/state",
                    user="oper", check=False)  # fmt: skip
    assert done.returncode == 1
    assert "you may not write" in done.stderr or "could not be recorded" in done.stderr
    assert fingerprint(site) == before


def test_the_terminal_is_asked_and_no_terminal_is_no_consent(guarded: PolicySite) -> None:
    site = guarded
    site.write(GUARDED.replace("gpus: 2", "gpus: 3"))
    before = fingerprint(site)
    done = site.sluice("apply", check=False)
    assert done.returncode == 2
    assert "--yes" in done.stderr
    assert fingerprint(site) == before
    assert isinstance(done, subprocess.CompletedProcess)
