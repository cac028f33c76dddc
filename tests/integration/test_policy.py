"""`sluice plan`, apply, drift, import and the audit log on real daemons."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from dev_cluster.cluster import DevCluster
from policy.service_jobs import FILE_NAME, ServicesFile, replica_job
from policy.site import load_source
from sluice.base.errors import SluiceError
from sluice.slurm.accounting import Accounting
from sluice.slurm.commands import Commands
from tests.integration.policy_site import INSIDE, OtherSystemSite, PolicySite, description

pytestmark = pytest.mark.cluster
EXAMPLES = Path(__file__).parents[2] / "etc/examples"

FIRST = """\
# The policy of the tests.
classes:
  h100: {types: [h100]}
defaults: {default_priority: 5, max_time: 48h, max_gpus_per_user: 8}
tenants:
  acme:              # the organisation
    limit: {gpus: 24}
    coordinators: [carol]
  red:
    parent: acme
    members: [alice, bob]
    guarantee: {gpus: 8}
    limit: {gpus: 16, gpu_memory: 640G}
    borrow: true
    shares: 3
  blue:
    members: [{name: dave, max_gpus: 2}]
    limit: {gpus: 4, classes: {h100: {gpus: 3}}}
    max_queued: 10
    max_jobs: 3
    per_job: {gpus: 2}
scheduling: {order: fair-share, max_queued: 1000}
"""
SECOND = (
    FIRST.replace("classes: {h100: {gpus: 3}}", "gpu_memory: 10G")
    .replace("alice, bob", "alice")
    .replace("coordinators: [carol]", "description: The Firm")
    .replace("    max_jobs: 3\n", "")
    .replace("guarantee: {gpus: 8}", "guarantee: {gpus: 4}")
    .replace("shares: 3", "shares: 2")
    .replace("    per_job: {gpus: 2}\n", "")
)


@pytest.fixture(scope="module")
def site(make_shared_cluster: Callable[..., DevCluster]) -> PolicySite:
    """Shared: a test begins with `fresh` or `first`."""
    return PolicySite(make_shared_cluster(description()))


def fresh(site: PolicySite) -> None:
    """No tenants, and nothing else that was applied."""
    site.clear()
    site.apply("version: 1\nunlisted: remove\n", "--force", "--drain-time=0s")
    assert "ReservationName=sluice_" not in site.run("scontrol", "show", "reservation", "-o").stdout


def first(site: PolicySite) -> None:
    """The first policy, and nothing else."""
    site.apply("unlisted: remove\n" + FIRST, "--force", "--drain-time=0s")
    site.apply(FIRST)


def associations(site: PolicySite) -> set[tuple[str, ...]]:
    columns = "account,user,parentname,share,grptres,grpjobs,grpsubmit,maxtresperjob,maxwall,qos,defaultqos"
    text = site.sacctmgr("show", "association", "woplimits", f"format={columns}")
    return {tuple(line.split("|")) for line in text.splitlines() if not line.startswith("root|")}


def test_apply_makes_what_the_file_says_and_does_it_once(site: PolicySite) -> None:
    fresh(site)
    site.write(FIRST)
    planned = site.changes()
    assert {(one["kind"], one["name"]) for one in planned} >= {
        ("account", "acme"),
        ("user", "alice@red"),
        ("qos", "red"),
        ("qos", "sluice_over"),
        ("cluster", "root"),
        ("file", "/etc/slurm/sluice.policy"),
    }
    shown = site.sluice("plan", check=False)
    assert shown.returncode == 3
    assert "+ members of red: alice, bob" in shown.stdout
    assert "MaxTRESPA: gres/gpu=8" in shown.stdout
    site.apply()
    assert associations(site) == {
        ("acme", "", "root", "1", "gres/gpu=24", "", "", "", "2-00:00:00", "acme", "acme"),
        ("red", "", "acme", "3", "gres/gpu=16,gres/shard=655360", "", "", "", "2-00:00:00", "red,sluice_over", "red"),
        ("red", "alice", "", "1", "gres/gpu=8", "", "", "", "", "", ""),
        ("red", "bob", "", "1", "gres/gpu=8", "", "", "", "", "", ""),
        ("blue", "", "root", "1", "gres/gpu:h100=3,gres/gpu=4", "3", "10", "gres/gpu=2", "2-00:00:00", "blue", "blue"),
        ("blue", "dave", "", "1", "gres/gpu=2", "", "", "", "", "", ""),
    }
    assert site.sacctmgr("show", "qos", "red", "format=priority,preempt,maxtrespa") == "5|sluice_over|gres/gpu=8"
    assert "carol" in site.sacctmgr("show", "account", "acme", "withcoord", "format=coord")
    assert site.changes() == []
    assert "nothing to do" in site.apply()


def test_changes_are_made_and_limits_are_taken_away_last(site: PolicySite) -> None:
    first(site)
    site.write(SECOND)
    assert site.changes()
    log = site.apply()
    assert site.changes() == []
    red = next(one for one in associations(site) if one[:2] == ("blue", ""))
    assert red[4] == "gres/gpu=4,gres/shard=10240"
    assert red[5:8] == ("", "10", "")
    # blue's limit of h100 GPUs goes only after that of GPU memory is there
    assert log.index("limits: ") < log.index("limits to clear: ")
    assert ("red", "bob") not in {one[:2] for one in associations(site)}


def test_an_apply_that_was_killed_is_finished_by_the_next_one(site: PolicySite, full_scale: bool) -> None:
    for number in range(12 if full_scale else 3):
        site.write(FIRST if number % 2 == 0 else SECOND)
        line = site.cluster.command(
            ["sluice", "apply", "--yes", "--force", "--file", f"{INSIDE}/sluice.yaml", "--state-dir", f"{INSIDE}/state"]
        )
        process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(0.4 + 0.35 * number)
        process.send_signal(signal.SIGKILL)
        process.wait(30)
        site.apply(None, "--force")
        assert site.changes() == []
        assert site.sluice("audit", "verify").returncode == 0


def test_drift_names_what_was_changed_by_hand(site: PolicySite) -> None:
    first(site)
    assert site.sluice("drift", check=False).returncode == 0
    site.sacctmgr("modify", "account", "blue", "set", "GrpTRES=gres/gpu=400")
    site.sacctmgr("modify", "qos", "red", "set", "MaxTRESPA=gres/gpu=-1")
    site.sacctmgr("modify", "qos", "blue", "set", "UsageFactor=0", "MaxJobsPerUser=1")
    site.sacctmgr("modify", "user", "alice", "account=red", "set", "qos=red,sluice_over,normal")
    site.sacctmgr("add", "user", "mallory", "account=red")
    site.sacctmgr("add", "user", "bob", "account=red", "partition=main")
    site.sacctmgr("remove", "user", "dave", "account=blue")
    policy = site.cluster.layout.slurm / "sluice.policy"
    policy.write_text(policy.read_text().replace("gpus-limit = 3", "gpus-limit = 9"))
    done = site.sluice("drift", "--json", check=False)
    assert done.returncode == 3
    found = {(one["kind"], one["action"], one["name"]) for one in json.loads(done.stdout)["changes"]}
    assert found == {
        ("account", "change", "blue"),
        ("qos", "change", "red"),
        ("qos", "change", "blue"),
        ("user", "change", "alice@red"),
        ("user", "remove", "mallory@red"),
        ("user", "add", "dave@blue"),
        ("file", "change", "/etc/slurm/sluice.policy"),
    }
    assert any("bob in red, partition main" in note for note in json.loads(done.stdout)["notes"])
    site.sacctmgr("remove", "user", "bob", "account=red", "partition=main")
    site.apply()
    assert site.sluice("drift", check=False).returncode == 0
    assert site.sacctmgr("show", "qos", "blue", "format=usagefactor,maxjobspu") == "1.000000|"


def test_a_level_lowered_by_hand_comes_back_by_nothing_but_an_apply_of_the_file(site: PolicySite) -> None:
    file = site.cluster.layout.slurm / "sluice.level"
    snippet = site.cluster.layout.slurm / "policy.sluice.conf"
    first(site)
    assert not file.exists(), "a policy that sets no level sets none"
    try:
        site.apply(f"level: place\n{FIRST}")
        assert file.read_text() == "place\n"
        assert "SchedulerParameters=" in snippet.read_text()
        site.run("sluice", "plugin", "level", "off")
        drift = site.sluice("drift", "--json", check=False)
        assert drift.returncode == 3
        assert [one["name"] for one in json.loads(drift.stdout)["changes"]] == ["/etc/slurm/sluice.level"]
        said = site.sluice("apply", "--last", "--yes").stderr
        assert "level is off, the policy file says place" in said
        assert file.read_text() == "off\n"
        assert "SchedulerParameters=" not in snippet.read_text(), "what depends on the level follows it"
        site.sluice("tenant", "set", "blue", "max_jobs=4", "--yes")
        assert file.read_text() == "off\n"
        assert ("file", "/etc/slurm/sluice.level") in {(one["kind"], one["name"]) for one in site.changes()}
        site.apply()
        assert file.read_text() == "place\n"
        assert site.changes() == []
        site.apply(FIRST)
        assert file.read_text() == "place\n", "a file without a level leaves the one that is asked for"
        assert "SchedulerParameters=" in snippet.read_text()
    finally:
        file.unlink(missing_ok=True)
        site.apply(FIRST)
    assert "SchedulerParameters=" not in snippet.read_text()


def test_import_then_plan_is_empty(site: PolicySite) -> None:
    fresh(site)
    for line in (
        "add qos high Priority=50",
        "add account phys Description=physics Organization=uni Fairshare=7 GrpTRES=gres/gpu=9,cpu=400 GrpWall=9000",
        "add account atoms parent=phys GrpTRES=gres/gpu:h100=3,gres/shard=1000 MaxWall=10:00:00 GrpJobs=4 MaxJobs=2",
        "add account plain",
        "add user alice account=phys,atoms Fairshare=3 GrpTRES=gres/gpu=2",
        "add user bob account=plain GrpTRES=cpu=8 MaxJobs=5",
        "modify user bob account=plain set qos=high,normal defaultqos=high",
        "add coordinator account=phys names=alice",
    ):
        site.sacctmgr(*line.split())
    site.sacctmgr("modify", "account", "atoms", "set", "qos=high,normal", "defaultqos=high")
    before = associations(site)
    done = site.sluice("import")
    site.write(done.stdout)
    tenants = yaml.safe_load(done.stdout)["tenants"]
    assert tenants["plain"]["members"][0]["slurm"]["qos"] == "high,normal"
    assert tenants["atoms"]["limit"] == {"gpu_memory": 1000}
    assert [one for one in site.changes() if one["kind"] != "file"] == []
    site.apply()
    assert associations(site) == before
    assert site.changes() == []


def test_import_of_what_was_applied_keeps_its_qos(site: PolicySite) -> None:
    first(site)
    before = associations(site)
    site.write(site.sluice("import").stdout)
    assert [one for one in site.changes() if one["kind"] != "file"] == []
    site.apply()
    assert associations(site) == before


def test_two_at_once_are_one_after_the_other(site: PolicySite) -> None:
    fresh(site)
    site.write(FIRST)
    words = ["sluice", "apply", "--yes", "--file", f"{INSIDE}/sluice.yaml", "--state-dir", f"{INSIDE}/state"]
    applies = [
        subprocess.Popen(site.cluster.command(words), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    said = [apply.communicate(timeout=180)[1] for apply in applies]
    codes = [apply.returncode for apply in applies]
    assert codes.count(0) >= 1, said
    for code, text in zip(codes, said, strict=True):
        assert code == 0 or "another apply is running" in text or "since the cluster was compared" in text, text
    assert site.changes() == []
    assert site.sluice("audit", "verify").returncode == 0


def test_accounts_of_others_are_left_alone(site: PolicySite) -> None:
    fresh(site)
    site.sacctmgr("add", "account", "theirs", "GrpTRES=gres/gpu=1")
    site.apply(FIRST)
    note = site.sluice("plan").stderr
    assert "left alone: theirs" in note
    site.apply("version: 1\n")
    assert {one[0] for one in associations(site)} == {"theirs"}


def test_tenants_with_jobs_are_not_removed_unless_forced_and_then_drained(site: PolicySite) -> None:
    first(site)
    running = site.sbatch("dave", "-A", "blue", "--gres=gpu:1")
    site.wait(lambda: site.state(running)[0] == "RUNNING")
    waiting = site.sbatch("dave", "-A", "blue", "--begin=now+1hour")
    site.write(FIRST[: FIRST.index("  blue:")] + FIRST[FIRST.index("scheduling:") :])
    done = site.sluice("apply", "--yes", check=False)
    assert done.returncode == 1
    assert "dave@blue" in done.stderr
    assert "--force" in done.stderr
    assert site.state(running)[0] == "RUNNING"
    assert ("blue", "dave") in {one[:2] for one in associations(site)}
    assert "cancelled" in site.apply(None, "--force", "--drain-time=1s")
    begun = site.sluice("audit", "export", "--action", "apply begun").stdout.splitlines()[-1]
    assert json.loads(begun)["detail"]["jobs_to_end"].split(",") == sorted((running, waiting), key=int)
    assert {site.state(job)[0] for job in (running, waiting)} == {"CANCELLED"}
    assert "blue" not in {one[0] for one in associations(site)}
    assert site.changes() == []
    ended = ["sacct", "--noheader", "--allocations", "--parsable2", f"--jobs={running}", "--format=end"]
    site.wait(lambda: site.run(*ended).stdout.strip() not in ("", "Unknown"))
    time.sleep(2)  # the last second is not collected
    site.sluice("audit", "collect", "--delay", "1s")
    events = site.sluice("audit", "export", "--subject", running).stdout.splitlines()
    assert [json.loads(line)["action"] for line in events] == ["submit", "grant", "return"]
    assert json.loads(events[1])["detail"]["gpus"] == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "classes: {mi300x: {types: [mi300x]}}\ntenants:\n  a: {limit: {classes: {mi300x: {gpus: 1}}}}\n",
            "gres/gpu:mi300x",
        ),
        ("classes: {h100: {types: [h100]}}\ntenants:\n  a: {guarantee: {classes: {h100: {gpus: 33}}}}\n", "33"),
        ("cluster: other\n", "this is 'sluice'"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_done(site: PolicySite, text: str, said: str) -> None:
    before = associations(site)
    site.write(text)
    done = site.sluice("apply", "--yes", check=False)
    assert done.returncode == 1
    assert said in done.stderr
    assert associations(site) == before


# Each needs slurmdbd for ten seconds, which removes the accounts of the one before.
APPLIED = ("company", "models", "small-cluster")


def test_the_examples_apply_one_after_the_other(site: PolicySite, full_scale: bool) -> None:
    all_of_them = sorted(EXAMPLES.glob("policy-*.yaml"))
    for path in all_of_them if full_scale else [EXAMPLES / f"policy-{name}.yaml" for name in APPLIED]:
        site.apply(path.read_text(), "--force", "--drain-time=0s")
        assert site.changes() == [], path.stem
        assert {one[0] for one in associations(site)} == set(load_source(path).policy.tenants)
        reservations = site.run("scontrol", "show", "reservation", "-o").stdout
        if path.stem == "policy-small-cluster":
            assert re.search(r"ReservationName=sluice_h100 .* NodeCnt=2 .*MAGNETIC", reservations)
            assert site.sacctmgr("show", "association", "account=root", "user=", "format=grpsubmit") == "1000"
            accepted = site.sluice("audit", "export", "--action", "apply begun").stdout.splitlines()[-1]
            assert "accepted_unenforced" not in json.loads(accepted)["detail"]  # every section is acted on now
        if path.stem == "policy-company":
            assert "ReservationName=sluice_h100_research" in reservations
            assert "ReservationName=sluice_l40s_platform" in reservations
    assert site.sluice("drift", check=False).returncode == 0


RESERVING = (
    "classes: {h100: {types: [h100], strategy: static}}\n"
    "tenants:\n  a: {members: [alice], guarantee: {classes: {h100: {gpus: 4}}}}\n"
)


def test_a_reservation_changed_by_hand_is_drift_and_comes_back(site: PolicySite) -> None:
    site.apply(RESERVING, "--force", "--drain-time=0s")
    assert site.changes() == []
    update = ("scontrol", "update", "ReservationName=sluice_h100_a")
    found = {}
    for field, *commands in (
        ("users", (*update, "Users=alice")),
        ("flags", (*update, "Flags-=MAGNETIC")),
        ("ends", (*update, "EndTime=now+2days")),
        ("nodes", (*update, "NodeCnt=2")),
        ("feature", ("scontrol", "delete", "ReservationName=sluice_h100_a"),
         ("scontrol", "create", "reservation", "ReservationName=sluice_h100_a", "StartTime=now", "Duration=UNLIMITED",
          "Accounts=a", "NodeCnt=1", "Features=l40s", "Flags=MAGNETIC", "PartitionName=main")),
    ):  # fmt: skip
        for words in commands:
            site.run(*words)
        drift = site.sluice("drift", "--json", check=False)
        assert drift.returncode == 3, field
        found[field] = [sorted(change["fields"]) for change in json.loads(drift.stdout)["changes"]]
        site.write("this is being edited: [")
        site.sluice("apply", "--last", "--yes")
        assert site.sluice("drift", check=False).returncode == 0, field
    assert found == {field: [[field]] for field in found}
    both = site.run("sluice", "apply", "--last", "-f", f"{INSIDE}/sluice.yaml", check=False)
    assert both.returncode == 2
    assert "do not go together" in both.stderr


def test_the_audit_log_shows_who_did_what(site: PolicySite) -> None:
    first(site)
    site.sluice("tenant", "set", "blue", "limit.gpus=3", "--yes")
    entries = [json.loads(line) for line in site.sluice("audit", "export", "--since", "1h").stdout.splitlines()]
    changed = [one for one in entries if one["action"] == "change account" and one["subject"] == "blue"]
    assert changed[-1]["user"] == "root"
    assert changed[-1]["detail"]["GrpTRES"].endswith("gres/gpu=3,gres/gpu:h100=3")
    assert changed[-1]["version"].startswith("sha256:")
    entry = {"time": 1.0, "user": "dave", "action": "refuse", "subject": "17", "detail": {"why": "too many GPUs"}}
    site.cluster.run(
        ["sluice", "audit", "append", "--state-dir", f"{INSIDE}/state"], input_text=json.dumps(entry) + "\n"
    )
    assert "too many GPUs" in site.sluice("audit", "list", "--user", "dave").stdout
    assert "<85>1" in site.sluice("audit", "export", "--syslog", "--subject", "17").stdout
    assert site.sluice("audit", "verify").returncode == 0
    log = site.scratch / "state/audit/audit.log"
    text = log.read_text()
    log.write_text(text.replace("too many GPUs", "no reason at all"))
    assert site.sluice("audit", "verify", check=False).returncode == 1
    log.write_text(text)


def test_the_commands_of_an_admin_keep_the_file_the_truth(site: PolicySite) -> None:
    first(site)
    site.sluice("tenant", "create", "green", "limit.gpus=3", "members=[erin]", "parent=acme", "--yes")
    site.sluice("tenant", "members", "green", "--add", "dave", "--yes")
    site.sluice("quota", "set", "green", "limit.gpus=2", "max_queued=7", "--yes")
    text = site.file.read_text()
    assert "# the organisation" in text
    assert text.startswith("# The policy of the tests.\n")
    assert site.changes() == []
    green = next(one for one in associations(site) if one[:2] == ("green", ""))
    assert (green[2], green[4], green[6]) == ("acme", "gres/gpu=2", "7")
    assert site.sluice("tenant", "members", "green").stdout.split() == ["dave", "erin"]
    rows = json.loads(site.sluice("quota", "show", "green", "--json").stdout)["quota"]
    assert {row["what"]: row["left"] for row in rows}["gres/gpu"] == 2
    names = site.sluice("tenant", "list", "-n", "-P", "-o", "tenant").stdout.split()
    assert names == ["acme", "red", "green", "blue"] or set(names) == {"acme", "red", "green", "blue"}
    done = site.sluice("tenant", "set", "green", "limit.gpus=-1", "--yes", check=False)
    assert done.returncode == 2
    assert site.file.read_text() == text
    site.sluice("tenant", "remove", "green", "--yes")
    assert "green" not in {one[0] for one in associations(site)}


def test_services_are_in_the_file_and_slurm_takes_their_jobs(site: PolicySite) -> None:
    first(site)
    wrong = ("serve", "create", "llm", "tenant=red", "user=erin", "engine=vllm", "model=/models/m", "--yes")
    done = site.sluice(*wrong, check=False)
    assert done.returncode == 2 and "'erin' is not a member of tenant 'red'" in done.stderr
    words = ("user=bob", "engine=vllm", "model=/models/m", "gpus=1", "gpu_class=h100", "callers=[blue]", "walltime=2h")
    site.sluice("serve", "create", "llm", "tenant=red", *words, "--yes")
    assert "# the organisation" in site.file.read_text() and site.changes() == []
    config = site.cluster.layout.slurm
    policy = ServicesFile(config / FILE_NAME).current()
    assert policy.accounts["alice"] == ("red",)
    job = replica_job(policy, "llm", "0123456789abcdef", registry_uid=1, program=Path("/bin/cat"), registries=["c:1"])
    for user, refused in ((job.user, False), ("erin", True)):  # who is not in the tenant has no use of its name
        submitted = site.cluster.run(
            ["sbatch", "--parsable", "--hold", *job.arguments], user=user, input_text=job.script, check=False, cwd="/"
        )
        assert (submitted.returncode != 0) is refused, submitted.stderr
    forged = ("--job-name=sluice-serve.llm.fedcba9876543210", "--account=red", "--hold")
    site.sbatch("alice", *forged)
    shown = json.loads(site.sluice("serve", "show", "llm", "--json").stdout)
    assert [(one["launch"], one["state"]) for one in shown["replicas"]] == [("0123456789abcdef", "queued")]
    for user, names in (("alice", "llm\n"), ("dave", "llm\n"), ("mallory", "")):
        listed = site.run("sluice", "serve", "list", "-nPo", "name", user=user).stdout
        assert listed == names, user
    site.clear()
    site.sluice("serve", "scale", "llm", "--most", "3", "--yes")
    site.sluice("serve", "pause", "llm", "--yes")
    with pytest.raises(SluiceError, match="paused"):
        paused = ServicesFile(config / FILE_NAME).current()
        replica_job(paused, "llm", "0123456789abcdef", registry_uid=1, program=Path("/bin/cat"), registries=["c:1"])
    site.sluice("serve", "remove", "llm", "--yes")
    assert ServicesFile(config / FILE_NAME).current().services == {} and site.changes() == []


def test_newer_slurm(make_cluster: Callable[..., DevCluster], newer_root: Path) -> None:
    """The same plan, apply and import through another system's commands."""
    site = OtherSystemSite(make_cluster(description(), root=newer_root))
    assert Accounting(Commands(prefix=site.prefix)).cluster_exists("sluice")
    for text in (FIRST, SECOND, FIRST):
        site.write(text)
        assert site.compare().changes
        site.apply(text, "--force")
        assert site.compare().changes == []
    from policy.importer import import_policy

    text, _ = import_policy(site.live())
    site.write(text)
    assert [one for one in site.compare().changes if one.kind not in ("file", "qos", "reservation")] == []
    for example in sorted(EXAMPLES.glob("policy-*.yaml")):
        site.apply(example.read_text(), "--force")
        assert site.compare().changes == [], example.name
