"""`sluice web` and `sluice actd` next to a real controller: who sees and does what, and what stays without Slurm."""

from __future__ import annotations

import gzip
import json
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dev_cluster.cluster import DevCluster
from dev_cluster.layout import INSIDE, python_in_tree
from sluice.base.run import PYTHON
from tests.integration import kill_writers
from tests.integration.jobs import shown, state, submit
from tests.integration.kill_writers import submit_while_killed
from tests.integration.profiles import kernels, summary, working
from tests.integration.settled import until
from tests.integration.slurm_features import gpu_indices
from tests.integration.versions import NATIVE_FIRST
from tests.integration.web_site import WEB, Site, web_site

pytestmark = pytest.mark.cluster
ROOT = str(Path(__file__).parents[2])


@pytest.fixture(scope="module", params=NATIVE_FIRST)
def site(request: pytest.FixtureRequest, make_shared_cluster: Callable[..., DevCluster]) -> Iterator[Site]:
    root = None if request.param == "native" else request.getfixturevalue("trixie_root")
    yield from web_site(make_shared_cluster, root=root)


def test_it_runs_without_any_right(site: Site) -> None:
    (pid,) = site.cluster.run(["pgrep", "-u", WEB, "-f", r"sluice(\.main)? web"], node="ctl1", cwd="/").stdout.split()
    status = site.cluster.run(["cat", f"/proc/{pid}/status"], node="ctl1", cwd="/").stdout
    capabilities = {line.split()[1] for line in status.splitlines() if line.startswith(("CapPrm", "CapEff"))}
    assert capabilities == {"0" * 16}


def test_tenants_see_their_own_jobs_and_operators_all(site: Site) -> None:
    alice, mallory, waits = (site.jobs[name] for name in ("alice", "mallory", "waits"))
    assert site.seen("alice") == {alice, waits}
    assert site.seen("mallory") == {mallory}
    assert site.seen("oper") == {alice, mallory, waits}
    assert site.seen("alice", "user=mallory") == set()
    assert site.seen("alice", "node=n1") == {alice} and site.seen("oper", "node=n1") == {alice, mallory}
    assert site.seen("oper", "account=physics&state=PENDING") == {waits}
    assert site.ask(f"/jobs/{mallory}", "alice")[0] == 404
    assert site.ask(f"/jobs/{mallory}/explanation", "alice")[0] == 404
    assert site.get("/overview", "mallory")["jobs_by_state"] == {"RUNNING": 1}
    assert site.get("/whoami", "oper")["level"] == "operator"


def test_nodes_gpus_and_one_job(site: Site) -> None:
    (node,) = site.get("/nodes", "alice")["nodes"]
    assert (node["name"], node["gpus"], node["gpus_allocated"]) == ("n1", 8, 3)
    number = site.jobs["alice"]
    page = until(
        lambda: site.get(f"/jobs/{number}", "alice"), lambda one: len(one["gpus"]) == 2, shows=site.logs
    )  # the agent's report is some seconds old
    assert page["job"]["nodes"] == "n1" and page["job"]["gpus"] == 2
    gpus = site.get("/gpus", "alice")["gpus"]
    assert len(gpus) == 8 and [gpu["use"] for gpu in gpus].count("free") == 5
    assert {job for gpu in gpus for job in gpu["jobs"]} == {number}, "others' jobs are not named"
    assert all(gpu["memory_total_mib"] for gpu in gpus)


def test_why_a_job_waits(site: Site) -> None:
    found = until(
        lambda: site.get(f"/jobs/{site.jobs['waits']}/explanation", "alice"),
        lambda one: "order" in one and one["slurm"]["reason"] == "AssocGrpGRES",
    )
    assert found["job"] == str(site.jobs["waits"]) and found["slurm"]["account"] == "physics"
    explained = site.get(f"/jobs/{site.jobs['waits']}/explanation", "oper")
    assert explained["order"] and explained["checkpoint"]["mode"] == "no"


def test_tenants_and_their_quota(site: Site) -> None:
    assert {one["name"] for one in site.get("/tenants", "alice")["tenants"]} == {"physics"}
    assert {"physics", "chemistry"} <= {one["name"] for one in site.get("/tenants")["tenants"]}
    assert site.ask("/tenants/chemistry/quota", "alice")[0] == 404
    quota = until(
        lambda: site.get("/tenants/physics/quota", "alice")["quota"],
        lambda rows: any(row["used"] == 2 for row in rows),
        shows=site.logs,
    )
    (gpus,) = (row for row in quota if row["limit"] == 3)
    assert gpus["left"] == 1
    (member,) = (one for one in site.get("/tenants/physics/usage", "alice")["members"] if one["running"])
    assert member["user"] == "alice"


def test_reports_and_the_page_of_a_job_are_those_of_the_commands(site: Site) -> None:
    found = until(lambda: site.get("/reports/users"), lambda one: len(one["rows"]) == 2, shows=site.logs, timeout=90)
    printed = json.loads(site.sluice("report", "users", "--json"))
    assert {(row["user"], row["account"], row["jobs"]) for row in found["rows"]} == {
        (row["user"], row["account"], row["jobs"]) for row in printed["rows"]
    }
    assert found["problem"] == "" and all(row["gpu_s"] > 0 for row in found["rows"])
    assert {row["user"] for row in site.get("/reports/users", "alice")["rows"]} == {"alice"}
    (tenant,) = site.get("/reports/tenants", "alice")["rows"]
    assert (tenant["account"], tenant["gpu_limit"]) == ("physics", 3)
    number = site.jobs["alice"]
    page = site.get(f"/jobs/{number}/report", "alice")
    assert page == {**json.loads(site.sluice("report", "job", str(number), "--json")), **{
        name: page[name] for name in ("job", "used", "host", "waited")
    }}  # fmt: skip
    assert page["job"]["user"] == "alice" and page["waited"]["explanation"]["start"]["parts"][0]["node"] == "n1"
    assert site.ask(f"/jobs/{site.jobs['mallory']}/report", "alice")[0] == 404
    assert {row["job_id_raw"] for row in site.get("/reports/jobs", "alice")["rows"]} == {number, site.jobs["waits"]}
    series = until(lambda: site.get(f"/jobs/{number}/series", "alice"), lambda one: len(one["gpus"]) == 2)
    assert series["times"] and site.get("/topology", "alice")["switches"] == []


def test_what_operators_have(site: Site) -> None:
    assert site.get("/health")["rows"] == []
    for path in ("/health/history", "/alerts", "/failover"):
        assert site.get(path)
        assert site.ask(path, "alice")[0] == 403
    assert list(site.get("/inventory")["nodes"])
    parts = site.get("/overview")["parts"]
    late = {name: part["problem"] for name, part in parts.items() if part["problem"]}
    assert set(late) <= {"policy"}, late  # this cluster has no policy file


def test_the_stream_shows_a_job_that_starts_to_whom_it_is(site: Site) -> None:
    events: dict[str, list[dict[str, Any]]] = {"alice": [], "mallory": []}

    def follow(user: str, answer: Any) -> None:
        for line in answer:
            if line.startswith(b"data: "):
                events[user].append(json.loads(line[6:]))

    answers = {user: site.request("/stream?topics=jobs", site.tokens[user], timeout=60) for user in events}
    for user, answer in answers.items():
        threading.Thread(target=follow, args=(user, answer), daemon=True).start()
    job = submit(site.cluster, "-Achemistry", "--mem=10M", user="mallory", cwd="/")
    site.jobs["streamed"] = int(job)

    def states(user: str) -> list[str]:
        return [one["row"]["state"] for one in list(events[user]) if one["key"] == job and "row" in one]

    until(lambda: "RUNNING" in states("mallory"), shows=lambda: (events, site.logs()))
    site.cluster.run(["scancel", job])
    until(lambda: "CANCELLED" in states("mallory"), shows=lambda: (events, site.logs()))
    assert not [one for one in events["alice"] if one["key"] == job]


def test_a_token_holds_until_it_is_revoked(site: Site) -> None:
    token = site.create("alice")
    assert site.ask("/whoami", token=token)[1]["user"] == "alice"
    rows = json.loads(site.sluice("token", "list", "--json"))["tokens"]
    assert token not in json.dumps(rows) and {"alice"} <= {row["user"] for row in rows}
    stream = site.request("/stream?topics=parts", token)
    assert next(line for line in stream if line.startswith(b"data: "))
    site.sluice("token", "revoke", token.split("_")[1])
    status, problem = site.ask("/whoami", token=token)
    assert status == 401 and problem["remedy"]
    begun = time.monotonic()
    for _ in stream:  # until it ends
        assert time.monotonic() < begun + 60, "a stream goes on after its token"
    assert site.ask("/whoami", token="a.b.c")[0] == 401
    assert site.ask("/whoami", token="sluice_nothing")[0] == 401


# ---- writes ----

SCRIPT = "#!/bin/sh\necho $SLURM_SUBMIT_DIR $WORD\nid -un\n"


def test_a_job_is_submitted_seen_changed_and_cancelled(site: Site) -> None:
    body = {"script": SCRIPT, "account": "physics", "memory": "10M", "hold": True, "environment": {"WORD": "said"}}
    status, made = site.send("/jobs", body)
    assert status == 201, made
    job = made["job_id"]
    until(lambda: site.ask(f"/jobs/{job}", "alice")[0], lambda code: code == 200, shows=site.logs)
    assert site.send(f"/jobs/{job}", {"comment": "a b", "time_limit": "7"}, method="PATCH")[0] == 200
    assert site.send(f"/jobs/{job}/release")[0] == 200
    until(lambda: state(site.cluster, job), lambda word: word == "COMPLETED", shows=site.logs)
    home = site.cluster.run(["sh", "-c", "echo ~"], user="alice").stdout.strip()
    said = site.cluster.run(["cat", f"{home}/slurm-{job}.out"], node="n1", user="alice").stdout.split()
    assert said == [home, "said", "alice"]
    facts = shown(site.cluster, job)
    assert facts["UserId"].startswith("alice(") and facts["TimeLimit"] == "00:07:00"
    assert site.send(f"/jobs/{job}/cancel")[0] == 409
    folder = "/nonexistent" if site.cluster.facts["root"] is None else "/"  # a tree's sbatch is started in it
    _, other = site.send("/jobs", {**body, "work_dir": folder})
    assert site.send(f"/jobs/{other['job_id']}/cancel")[0] == 200
    assert state(site.cluster, other["job_id"]) == "CANCELLED"


def test_slurm_decides_who_may_do_what(site: Site) -> None:
    theirs, mine = site.jobs["mallory"], site.jobs["waits"]
    for do in ("cancel", "hold", "requeue"):
        assert site.send(f"/jobs/{theirs}/{do}", user="alice")[0] == 404, "its jobs are private"
    assert site.send(f"/jobs/{theirs}", {"comment": "x"}, "alice", method="PATCH")[0] == 404
    assert state(site.cluster, theirs) == "RUNNING"
    assert site.send(f"/jobs/{mine}", {"priority": 77}, "alice", method="PATCH")[0] in (403, 422)
    assert site.send(f"/jobs/{mine}/hold", user="oper")[0] == 200
    assert site.send(f"/jobs/{mine}/release", user="oper")[0] == 200
    assert site.send("/jobs/4000000/cancel")[0] == 404
    status, refused = site.send("/jobs", {"script": SCRIPT, "account": "chemistry"})
    assert status == 422 and "account" in refused["detail"]
    status, refused = site.send("/jobs", {"script": SCRIPT, "gpu_mem": "99999G"})
    assert status == 422 and "sluice" in refused["detail"], "as the SPANK plugin says it"
    reader = site.create("alice", "read")
    status, refused = site.send("/jobs", {"script": SCRIPT}, token=reader)
    assert status == 403 and "--scope write" in refused["remedy"]


@pytest.fixture(scope="module")
def profiled(site: Site) -> Iterator[dict[str, str]]:
    """A job of two tenants each, on one GPU."""
    users = {"alice": "physics", "mallory": "chemistry"}
    jobs = {
        user: working(site.cluster, f"-A{account}", "--gpu-mem=1G", kernel=f"of_{user}", user=user)
        for user, account in users.items()
    }
    until(lambda: [state(site.cluster, job) for job in jobs.values()], lambda now: now == ["RUNNING"] * 2)
    one, other = (gpu_indices(shown(site.cluster, job)["GRES"]) for job in jobs.values())
    assert one == other and len(one) == 1
    yield jobs
    site.cluster.run(["scancel", *jobs.values()])


def test_two_tenants_on_one_gpu_see_their_own_profiles(site: Site, profiled: dict[str, str]) -> None:
    for user, job in profiled.items():
        found = summary(site.cluster, job, "--seconds", "2", user=user)
        assert list(kernels(found)) == [f"of_{user}"] and 90 < found["busy_percent"] <= 100, found
        (clock,) = found["clocks"]  # this machine's own
        assert abs(clock["ahead_ms"]) < 1 and clock["uncertainty_us"] < 100_000
    words = ["sluice", "profile", "summary", profiled["mallory"]]
    done = site.cluster.run(words, user="alice", cwd="/tmp", check=False)
    assert done.returncode == 1 and "is of user" in done.stderr


def test_operators_profile_all_and_users_their_own(site: Site, profiled: dict[str, str]) -> None:
    place = f"/jobs/{profiled['mallory']}/profile"
    assert site.send(f"{place}/start", {}, "alice")[0] == site.ask(place, "alice")[0] == 404
    status, found = site.send(f"{place}/start", {"seconds": 60}, "oper")
    assert status == 200, found
    assert site.send(f"{place}/stop", {"step": "batch"}, "mallory")[1]["did"] == "stop"
    status, found = site.ask(place, "oper")
    assert (status, list(kernels(found))) == (200, ["of_mallory"])
    noted = [one["action"] for one in site.get("/audit", "root2")["entries"] if one["user"] == "oper"]
    assert noted[:2] == ["web profile-summary", "web profile-start"]


def test_a_collector_that_is_killed_has_lost_nothing(site: Site, profiled: dict[str, str]) -> None:
    job = profiled["alice"]
    found = kernels(summary(site.cluster, job, "--seconds", "1", user="alice"))
    for seconds in ("0.8", "1.2", "1.6"):
        words = ["timeout", "-s", "KILL", seconds, "sluice", "profile", "summary", job]
        site.cluster.run(words, user="alice", cwd="/tmp", check=False)
    assert kernels(summary(site.cluster, job, user="alice")) == found != {}


def test_what_a_job_did_until_it_ended_is_there(site: Site) -> None:
    job = working(site.cluster, "-Achemistry", "--gpu-mem=1G", kernel="last", user="mallory")
    until(lambda: state(site.cluster, job), lambda now: now == "RUNNING")

    def end() -> None:
        files = f"/run/sluice/profile/{job}/batch/*.profile"
        words = ["find", "/run/sluice/profile/", "-path", files, "-size", "+4k"]
        until(lambda: site.cluster.run(words, node="n1", check=False).stdout)
        site.cluster.run(["scancel", job])

    ending = threading.Thread(target=end)
    ending.start()
    found = summary(site.cluster, job, "--seconds", "60", user="mallory")
    ending.join()
    assert list(kernels(found)) == ["last"] and "the job has ended meanwhile" in found["notes"], found


def test_a_profile_that_is_asked_for_with_the_job_is_next_to_its_output(site: Site) -> None:
    home, seen = INSIDE / "home/mallory", site.cluster.layout.folder / "home/mallory"
    asked = ("-Achemistry", "--gpu-mem=1G", "--gpu-profile=60", f"-D{home}")
    job = working(site.cluster, *asked, kernel="k", user="mallory")
    injected = "--export=ALL,CUDA_INJECTION64_PATH=/no.so"
    own = working(site.cluster, *asked, injected, kernel="k", user="mallory")
    files = f"sluice-profile-{job}/*/*.profile"
    until(lambda: [one.stat().st_size > 30_000 for one in seen.glob(files)], any)
    start = ["sluice", "profile", "start", own]
    until(
        lambda: site.cluster.run(start, user="mallory", cwd="/tmp", check=False).stderr,
        lambda said: "its user set CUDA_INJECTION64_PATH" in said,
    )
    site.cluster.run(["scancel", job, own])
    until(lambda: state(site.cluster, job), lambda now: now == "CANCELLED")
    site.cluster.run(["sluice", "profile", "get", job, "-o", f"{home}/trace.json.gz"], user="mallory", cwd="/tmp")
    with gzip.open(seen / "trace.json.gz") as file:
        assert sum(one["name"] == "k" for one in json.load(file)["traceEvents"]) > 100


def test_what_would_become_of_a_request(site: Site) -> None:
    def ask(**words: Any) -> dict[str, Any]:
        status, found = site.send("/what-if", {"script": SCRIPT, "account": "physics", "memory": "10M", **words})
        assert status == 200, found
        return found

    assert ask(gpus="h100:1")["accepted"]
    later = ask(gpus="h100:8", time_limit="60")
    assert later["accepted"] and not later["starts_now"] and later["start_time"] > time.time() + 60
    assert later["smaller"]["changed"] == {"gpus": "h100:4"} and later["smaller"]["start_time"] < later["start_time"]
    refused = ask(partition="nope")
    assert not refused["accepted"] and "nope" in refused["refused"][0]
    assert ask(gpu_mem="10G")["becomes"] == {"gres": "shard:10240", "partition": "main"}


def test_no_submission_is_lost_or_doubled_by_kills_and_retries(site: Site, full_scale: bool) -> None:
    count = 1000 if full_scale else 40
    found = submit_while_killed(site, count)
    print(found)
    assert not found.refused and found.kills >= count / 40
    assert (found.lost, found.doubled) == (0, 0)
    assert len(set(found.acknowledged.values())) == count, "each has its own job"
    for number in random.sample(range(count), 5):
        body = {"script": kill_writers.SCRIPT, "name": f"{found.tag}-{number}", "hold": True, "memory": "1M"}
        status, said = site.send("/jobs", body, "mallory", key=f"{found.tag}-{number}")
        assert status == 201 and said["job_id"] == found.acknowledged[number]
    site.cluster.run(["scancel", "-u", "mallory", "--state=PENDING"])


def test_an_operator_returns_gpus_and_an_administrator_applies_a_plan(site: Site) -> None:
    assert site.send("/health/return", {"node": "n1"}, "alice")[0] == 403
    assert site.send("/health/return", {"node": "n1", "gpus": [1], "reason": "looked at"}, "oper")[0] == 200
    status, said = site.send("/health/return", {"node": "nope"}, "oper")
    assert status == 422 and "nope" in said["detail"]
    text = "tenants:\n  physics:\n    members: [alice]\n"
    (mistake,) = site.send("/policy/check", {"text": text + "x: 1\n"}, "oper")[1]["mistakes"]
    assert mistake["line"] == 4
    status, plan = site.send("/policy/plan", {"text": text}, "oper")
    assert status == 200 and plan["changes"] and plan["lines"]
    asked = {"hash": plan["hash"]}
    assert site.send("/policy/apply", asked, "oper")[0] == 403
    time.sleep(1.1)  # a compiled policy names the second of its making: the plan's hash must not
    site.cluster.run(["sacctmgr", "-i", "modify", "account", "physics", "set", "GrpTRES=gres/gpu=4"])
    assert site.send("/policy/apply", asked, "root2")[0] == 409, "it is not the plan that was seen"
    site.cluster.run(["sacctmgr", "-i", "modify", "account", "physics", "set", "GrpTRES=gres/gpu=3"])
    status, applied = site.send("/policy/apply", asked, "root2", key="apply")
    assert status == 200 and applied["changes"] == len(plan["changes"])
    assert site.cluster.run(["cat", "/etc/sluice/sluice.yaml"], node="ctl1").stdout == text
    assert site.send("/policy/apply", asked, "root2", key="apply")[1] == applied


SERVED = """\
tenants:
  physics:
    members: [alice]
services:
  llm:  # a comment stays
    tenant: physics
    user: alice
    engine: openai
    command: [/usr/bin/true]
    replicas: {least: 0, most: 1}
serving:
  address: https://models.site.org/v1
"""


def test_an_administrator_scales_and_pauses_a_service(site: Site) -> None:
    status, plan = site.send("/policy/plan", {"text": SERVED}, "root2")
    assert status == 200, plan
    assert site.send("/policy/apply", {"hash": plan["hash"]}, "root2")[0] == 200
    listed = until(lambda: site.get("/services", "alice"), lambda one: one["services"], shows=site.logs)
    assert listed["address"] == "https://models.site.org/v1" and listed["services"][0]["state"] == "idle"
    assert site.ask("/services/llm", "mallory")[0] == 404
    for user in ("alice", "oper"):
        assert site.send("/services/llm", {"most": 3}, user, method="PATCH")[0] == 403
    for _ in range(2):  # with its key, once
        status, done = site.send("/services/llm", {"most": 3, "paused": True}, "root2", method="PATCH", key="scale")
        assert (status, done["service"]) == (200, "llm"), done
    text = site.cluster.run(["cat", "/etc/sluice/sluice.yaml"], node="ctl1").stdout
    assert "replicas: {least: 0, most: 3}" in text and "paused: true" in text and "# a comment stays" in text
    found = until(lambda: site.get("/services/llm", "alice"), lambda one: one["paused"], shows=site.logs)
    assert (found["most"], found["state"]) == (3, "paused")
    assert site.send("/services/llm", {"least": 9}, "root2", method="PATCH")[0] == 422
    site.cluster.run(
        ["sed", "-i", "s/members: .alice./members: [alice, oper]/", "/etc/sluice/sluice.yaml"], node="ctl1"
    )
    status, said = site.send("/services/llm", {"paused": False}, "root2", method="PATCH")
    assert status == 409 and "not applied" in said["detail"], "what nobody has looked at is not applied with it"
    entries = site.get("/audit?action=web%20service-change", "root2")["entries"]
    assert [one["subject"] for one in entries] == ["llm", "llm"] and entries[1]["detail"]["field most"] == "3"


def test_who_has_the_web_process_has_no_more_than_it_was_sent(site: Site) -> None:
    """From its uid, on both sockets."""
    code = (
        "import json, socket, sys\n"
        "for line in sys.stdin:\n"
        "    path, text = json.loads(line)\n"
        "    s = socket.socket(socket.AF_UNIX); s.settimeout(20); s.connect(path); s.sendall(text.encode() + b'\\n')\n"
        "    print((s.makefile().readline() or 'closed').strip()[:300])\n"
    )
    head = {"version": 1, "request_id": "x", "key": None, "address": ""}
    bad = [
        {"do": "submit", "proof": {"kind": kind, "text": text}, "words": {"script": SCRIPT}, **head}
        for kind, text in (
            ("sluice", ""), ("sluice", "sluice_0123456789abcdef_" + "A" * 43), ("slurm", "alice"), ("slurm", "a.b.c"),
            ("oidc", "a.b.c"), ("root", "x"), ("slurm", site.tokens["oper"]), ("sluice", "root"),
        )
    ]  # fmt: skip
    alice = {"kind": "sluice", "text": site.tokens["alice"]}
    for extra in ({"user": "root2"}, {"uid": 0}, {"level": 2}):
        bad.append({"do": "submit", "proof": alice, "words": {"script": SCRIPT}, **head, **extra})
        bad.append({"do": "submit", "proof": alice, "words": {"script": SCRIPT, **extra}, **head})
    bad.append({"do": "cancel", "proof": alice, "words": {"job": str(site.jobs["mallory"])}, **head})
    bad.append({"do": "policy-apply", "proof": alice, "words": {"hash": "0" * 64}, **head})
    bad.append({"do": "policy-drift", "proof": alice, "words": {}, **head})
    lines = [["/run/sluice-act/socket", json.dumps(one)] for one in bad]
    lines += [
        ["/run/sluice-snapshot/socket", json.dumps({"version": 1, "do": do})] for do in ("put", "return", "cancel")
    ]
    sent = "".join(json.dumps(line) + "\n" for line in lines)

    def ask(user: str) -> list[str]:
        words = ["python3", "-c", code]
        return site.cluster.run(
            words, node="ctl1", user=user, cwd="/", input_text=sent, check=False
        ).stdout.splitlines()

    def jobs() -> set[tuple[str, bool]]:
        """Each job, and whether somebody has ended it; others may start meanwhile."""
        lines = site.cluster.run(["squeue", "--noheader", "--states=all", "--format=%i %T"]).stdout.splitlines()
        return {(line.split()[0], line.endswith("CANCELLED")) for line in lines}

    before = jobs()
    answers = ask(WEB)
    assert len(answers) == len(lines) and all("error" in answer for answer in answers), answers
    assert jobs() == before
    assert not [answer for answer in ask("mallory") if answer != "closed"], "another user gets nothing at all"
    for path in (
        "/etc/slurm/jwt_hs256.key",
        "/etc/munge/munge.key",
        "/var/lib/sluice/actd/keys",
        "/var/lib/sluice/audit",
    ):
        words = ["ls" if path.endswith(("keys", "audit")) else "cat", path]
        assert site.cluster.run(words, node="ctl1", user=WEB, cwd="/", check=False).returncode != 0, path


def test_each_write_and_each_refusal_is_in_the_audit_log(site: Site) -> None:
    status, made = site.send("/jobs", {"script": SCRIPT, "account": "physics", "hold": True, "name": "audited"})
    assert status == 201
    site.send(f"/jobs/{made['job_id']}/cancel")
    status, refused = site.send("/policy/apply", {"hash": "0" * 64}, "root2")
    assert status == 409
    entries = site.get("/audit?limit=20", "root2")["entries"]
    found = {entry["action"]: entry for entry in reversed(entries)}
    assert found["web submit"]["user"] == "alice" and found["web submit"]["subject"] == str(made["job_id"])
    assert found["web cancel"]["detail"]["address"] == "127.0.0.1"
    assert found["web refused"]["detail"]["request_id"] == refused["request_id"]
    assert site.tokens["alice"].split("_", 2)[2] not in json.dumps(entries)
    assert {entry["user"] for entry in site.get("/audit", "oper")["entries"]} <= {"oper"}, "its own alone"
    assert "web submit" in {entry["action"] for entry in site.get("/audit", "alice")["entries"]}
    site.sluice("audit", "verify")


def test_without_its_helper_the_api_reads_on(site: Site) -> None:
    site.cluster.stop_daemon("actd")
    try:
        status, said = site.send("/jobs", {"script": SCRIPT})
        assert status == 503 and "sluice-actd" in said["remedy"]
        assert site.get("/jobs", "alice")["jobs"]
    finally:
        site.start_actd()
    until(lambda: site.send("/what-if", {"script": SCRIPT, "account": "physics"})[0], lambda code: code == 200)


def test_what_slurmctld_writes_of_a_job_is_what_squeue_says(site: Site) -> None:
    """Of jobs in all states; and nobody but root and Slurm's user can read it."""
    cluster = site.cluster
    folder = cluster.run(["sh", "-c", "scontrol show config | awk '/^StateSaveLocation/{print $3}'"]).stdout.strip()
    hostile = 'a"b\\ \t|\x1f]é ,'
    held = ["-Aphysics", "--hold", "--mem=10M", "-J", hostile, f"--comment={hostile}"]
    made = [
        submit(cluster, *held, "--array=1-9%2", cwd="/"),
        submit(cluster, *held, "--gres=gpu:h100:2", "-t3-00:10:00", "--begin=now+1hour", cwd="/"),
        submit(cluster, *held, "--qos=normal", "--dependency=afterany:1", "-c3", "-n4", cwd="/"),
        submit(cluster, "-Aphysics", "--mem=10M", "--array=3", "-tUNLIMITED", cwd="/"),
    ]
    cluster.run(["scancel", f"{made[0]}_2", made[2]])
    listed = f"""
import json, sys
from pathlib import Path
from sluice.slurm import connect
from sluice.slurm.job_changes import JobChanges
changes = JobChanges(Path({folder!r}) / "sluice.records")
following = sorted(Path({folder!r}).glob("sluice.records/changes.0*"))
changes._number, changes._offset = int(following[-1].name.split(".")[1]), 0
lines = following[-1].read_bytes().replace(b'["begin"', b'["on"')
written = Path(sys.argv[1]) / following[-1].name
written.write_bytes(lines)
changes._folder = written.parent
found = changes.read().jobs
said = {{job.id: job for job in connect().jobs(states=["all"])}}
differ = [[repr(found[one]), repr(said.get(one))] for one in found if found[one] != said.get(one)]
print(json.dumps([len(found), differ, oct(following[-1].stat().st_mode)]))
"""

    def compare() -> Any:
        site.get("/jobs")  # somebody looks
        python = [*PYTHON, "-c", listed] if cluster.facts["root"] is None else python_in_tree(["-c", listed])
        words = ["sh", "-c", 'd=$(mktemp -d) && "$@" "$d"; rm -rf "$d"', "-", *python]
        done = cluster.run(words, node="ctl1", cwd="/", env={"PYTHONPATH": ROOT}, check=False)
        return json.loads(done.stdout) if done.returncode == 0 else done.stderr

    count, _, mode = until(
        compare,
        lambda one: isinstance(one, list) and one[0] >= 5 and not one[1],
        shows=lambda: (compare(), site.logs()),
    )
    assert count >= 5 and mode.endswith("600")
    assert cluster.run(["ls", f"{folder}/sluice.records"], node="ctl1", user="mallory", cwd="/", check=False).returncode
    assert {name: part["problem"] for name, part in site.get("/overview")["parts"].items()}["jobs"] == ""
    cluster.run(["scancel", *made], check=False)


# ---- what stays ----


def test_what_is_known_stays_while_slurmctld_is_away(site: Site) -> None:
    listed = site.cluster.run(["squeue", "--noheader", "--states=all", "--format=%A"]).stdout.split()
    before = until(lambda: site.seen("oper"), lambda seen: seen == set(map(int, listed)), shows=site.logs)
    assert site.get("/jobs")["stale_since"] is None
    killed = time.time()
    site.cluster.stop_daemon("slurmctld@ctl1", number=signal.SIGKILL)
    try:
        stale = until(lambda: site.get("/jobs"), lambda one: one["stale_since"], shows=site.logs)
        assert killed - 5 < stale["stale_since"] <= time.time() and stale["problem"]
        assert site.seen("oper") == before and site.seen("alice") < before
        assert site.get("/nodes", "alice")["nodes"], "roles and PrivateData stay known"
    finally:
        site.cluster.start_daemon("slurmctld@ctl1")
    until(lambda: site.get("/jobs"), lambda one: one["stale_since"] is None, shows=site.logs)


def test_the_daemon_reports_no_problem(site: Site) -> None:
    report = json.loads(site.sluice("controllerd", "status", "--json"))
    problems = {duty["name"]: duty["problem"] for duty in report["duties"] if duty["name"].startswith("snapshot")}
    assert len(problems) == 12 and not any(problems.values()), problems


def test_a_controllerd_that_is_away_is_reported_too(site: Site) -> None:
    site.cluster.stop_daemon("controllerd@ctl1")
    try:
        stale = until(lambda: site.get("/jobs"), lambda one: one["stale_since"], shows=site.logs)
        assert "socket" in stale["problem"] and stale["jobs"]
        assert site.ask(f"/jobs/{site.jobs['alice']}/explanation")[0] == 503
    finally:
        site.cluster.start_daemon("controllerd@ctl1")
    until(lambda: site.get("/jobs"), lambda one: one["stale_since"] is None, shows=site.logs)
