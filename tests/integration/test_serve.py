"""Services of models on a real cluster: how replicas come, are replaced, and go."""

from __future__ import annotations

import http.client
import json
import os
import shlex
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import openai
import pytest

from dev_cluster.cluster import DevCluster
from dev_cluster.layout import INSIDE
from sluice.base.run import PYTHON
from sluice.serve.rpc.client import CallFailed, ClusterClient
from tests.integration import stand_in_replica
from tests.integration.jobs import submit
from tests.integration.private_slurm import free_ports
from tests.integration.serve_site import ServeSite, serve_site
from tests.integration.settled import start_again
from tests.serve_models import counted, make_model

pytestmark = pytest.mark.cluster
URL = "/v1/chat/completions"


@pytest.fixture(scope="module")
def site(make_shared_cluster: Callable[..., DevCluster]) -> Iterator[ServeSite]:
    yield from serve_site(make_shared_cluster)


def test_from_no_replica_to_a_ready_one_which_is_the_services_users_job(site: ServeSite) -> None:
    assert site.rows("services")["words"]["callers"] == ["physics"] and not site.jobs()
    assert {row["kind"] for row in site.rows("limits").values()} >= {"key", "tenant"}
    assert site.rows("accounts")["alice"]["tenants"] == ["physics"]
    began = time.monotonic()
    site.need(waiting=1)
    ((launch, row),) = site.until(site.replicas).items()
    took = time.monotonic() - began
    ((number, state, name),) = site.jobs()
    assert (state, name, row["job"], row["secret"]) == ("RUNNING", launch, number, "cd" * 32)
    assert row["host"] in ("n1", "n2") and row["slots"] == 4
    shown = site.cluster.run(["scontrol", "show", "job", "-o", str(number)]).stdout
    for word in ("UserId=alice(", "Account=physics", "TimeLimit=00:10:00", "Requeue=0"):
        assert word in shown
    (entry,) = (one for one in site.audited("serve launch") if one["detail"]["service"] == "words")
    assert (entry["user"], entry["subject"], entry["detail"]["launch"]) == ("sluice-serve", str(number), launch)
    print(f"from nothing to ready: {took:.2f} s")


def test_a_real_replica_answers_gateways_alone(site: ServeSite) -> None:
    site.need("engine", waiting=1)
    (row,) = site.until(lambda: site.replicas("engine")).values()
    code = (
        "import hashlib, socket, ssl, sys\n"
        "context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)\n"
        "context.check_hostname, context.verify_mode = False, ssl.CERT_NONE\n"
        "s = context.wrap_socket(socket.create_connection((sys.argv[1], int(sys.argv[2])), 10))\n"
        "assert hashlib.sha256(s.getpeercert(True)).hexdigest() == sys.argv[3]\n"
        "s.sendall(sys.stdin.readline().encode())\n"
        "s.sendall(b'GET /v1/models HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\n\\r\\n')\n"
        "print(s.makefile().read())"
    )

    def get(secret: str) -> str:
        words = [*PYTHON, "-c", code, row["host"], str(row["port"]), row["fingerprint"]]
        return site.cluster.run(
            words, user="mallory", node="ctl1", cwd="/", check=False, input_text=secret + "\n"
        ).stdout

    assert '"id": "engine"' in get(row["secret"])
    assert get("0" * 64).strip() == ""
    assert row["abilities"]["chat"]
    site.until(lambda: site.replicas("engine")[row["launch"]]["ends"], lambda ends: (ends or 0) > time.time() + 300)
    assert not flooded(site, row, 6.0), "heartbeats of a replica whose node a tenant floods replicad from come in time"
    site.empty("engine")


FLOOD = """
import contextlib, socket, sys, time
end, kept = time.monotonic() + float(sys.argv[3]), []
while time.monotonic() < end:
    with contextlib.suppress(OSError):
        kept.append(socket.create_connection((sys.argv[1], int(sys.argv[2])), 0.2))
        kept[-1].sendall(b"nonsense" * 40 + b"\\n")
    del kept[:-600]
"""


def flooded(site: ServeSite, row: dict[str, Any], seconds: float) -> list[float]:
    """Silences of a replica that made it suspect while another tenant's program on its node sent all it could."""
    port = site.cluster.facts["environment"]["SLUICE_REPLICAD_PORT"]
    words = [*PYTHON, "-c", FLOOD, "ctl1", port, str(seconds)]
    run = partial(site.cluster.run, words, user="mallory", node=row["host"], cwd="/")
    crowd = [threading.Thread(target=run) for _ in range(2)]
    for one in crowd:
        one.start()
    found = []
    while any(one.is_alive() for one in crowd):
        time.sleep(0.2)
        if site.replicas("engine")[row["launch"]]["suspect"]:
            found.append(time.monotonic())
    return found


def test_a_request_waits_for_the_first_replica(site: ServeSite) -> None:
    site.empty("engine")
    words = ["sluice", "token", "create", "alice", "--for", "1h", "--scope", "serve"]
    key = site.cluster.run(words, node="ctl1", cwd="/").stdout.strip()
    site.cluster.run(["chgrp", "sluice-gateway", "/etc/sluice/tokens.json"], node="ctl1", cwd="/")
    port = site.cluster.facts["environment"]["SLUICE_GATEWAY_PORT"]
    body = json.dumps({"model": "engine", "messages": [{"role": "user", "content": "The sky is"}]}).encode()
    request = urllib.request.Request(f"http://127.0.1.1:{port}/v1/chat/completions", body)
    request.add_header("Authorization", f"Bearer {key}")
    request.add_header("Content-Type", "application/json")
    began = time.monotonic()
    with urllib.request.urlopen(request, timeout=60) as answer:
        found = json.load(answer)
    print(f"from nothing to an answer: {time.monotonic() - began:.2f} s")
    assert found["choices"][0]["message"]["content"] == "blue" and found["usage"]["total_tokens"] == 4


@pytest.fixture(scope="module")
def client(site: ServeSite) -> openai.OpenAI:
    """Of alice, for batches, which are set up now: their model needs 0.2 s for a word."""
    cluster = site.cluster
    program = cluster.layout.programs / "sluice-batch"
    program.write_text(f"#!/bin/sh\nexec {shlex.join(PYTHON)} -m sluice.serve.batch.main\n")
    program.chmod(0o755)
    (port,) = free_ports(1)
    gateway = f"http://127.0.1.1:{cluster.facts['environment']['SLUICE_GATEWAY_PORT']}"
    path = cluster.layout.sluice / "sluice.yaml"
    policy = json.loads(path.read_text())
    slow = {**policy["services"]["engine"], "replicas": {"least": 0, "most": 1, "slots": 2}}
    policy["services"]["slow"] = {**slow, "command": [*slow["command"], "0.2"]}
    api, inside = f"http://127.0.0.1:{port}", str(INSIDE / "bin/sluice-batch")
    policy["serving"] = {"batches": {"gateways": [gateway], "api": api, "program": inside}}
    path.write_text(json.dumps(policy, indent=1))
    cluster.run(["sluice", "apply", "--yes"], node="ctl1", cwd="/")
    words = ["--scope", "serve", "--scope", "read", "--scope", "write"]
    key = cluster.run(
        ["sluice", "token", "create", "alice", "--for", "1h", *words], node="ctl1", cwd="/"
    ).stdout.strip()
    cluster.run(["chmod", "644", "/etc/sluice/tokens.json"], node="ctl1", cwd="/")
    cluster.start_program("web", ["sluice", "web", "--port", str(port), "-v"], node="ctl1", user="sluice-web")
    made = openai.OpenAI(base_url=f"{gateway}/v1", api_key=key)

    def known() -> bool:
        try:
            return "slow" in {one.id for one in made.models.list()}
        except openai.AuthenticationError:  # gateways look several times a second
            return False

    site.until(known)
    return made


def test_batches_are_jobs_of_their_callers(site: ServeSite, client: openai.OpenAI) -> None:
    def batch(count: int, number: str) -> str:
        asks = [{"role": "user", "content": f"word {one}"} for one in range(count)]
        rows = [
            {"custom_id": f"{one}", "method": "POST", "url": URL, "body": {"model": "slow", "messages": [ask]}}
            for one, ask in enumerate(asks)
        ]
        data = "".join(json.dumps(row) + "\n" for row in rows).encode()
        file = client.files.create(file=(f"{number}.jsonl", data), purpose="batch")
        return client.batches.create(input_file_id=file.id, endpoint=URL, completion_window="24h").id

    def get(name: str) -> Any:
        return client.batches.retrieve(name)

    def some(name: str) -> Any:
        return site.until(lambda: get(name), lambda found: found.request_counts.completed >= 2)

    def said(file: str) -> dict[str, str]:
        rows = [json.loads(row) for row in client.files.content(file).text.splitlines()]
        assert len({row["custom_id"] for row in rows}) == len(rows)
        return {row["custom_id"]: row["response"]["body"]["choices"][0]["message"]["content"] for row in rows}

    whole, cancelled, requeued = batch(12, "whole"), batch(200, "cancelled"), batch(60, "requeued")
    job = site.until(lambda: get(whole), lambda found: found.model_extra["sluice"]["job"]).model_extra["sluice"]["job"]
    shown = site.cluster.run(["scontrol", "show", "job", "-o", str(job)]).stdout
    for word in ("JobName=sluice-batch.slow", "UserId=alice(", "Account=physics", "Requeue=1", "Nice=10000", whole):
        assert word in shown
    number = str(some(requeued).model_extra["sluice"]["job"])
    for user, reads in (("alice", True), ("mallory", False)):
        script = ["scontrol", "write", "batch_script", number, "-"]
        seen = site.cluster.run(script, user=user, node="ctl1", cwd="/", check=False)
        assert ("Invalid user id" in seen.stderr, '"secret":"' in seen.stdout) == (not reads, reads), seen
    for words in (["scontrol", "show", "job", "-dd", number], ["squeue", "-o", "%all", "-j", number]):
        assert "sluice-batch.slow" in (seen := site.cluster.run(words)).stdout and "secret" not in seen.stdout
    site.cluster.run(["scontrol", "requeue", number])
    start_again(site.cluster, number)
    some(cancelled)
    client.batches.cancel(cancelled)
    left = site.until(lambda: get(cancelled), lambda found: found.status == "cancelled")
    assert 2 <= left.request_counts.completed < 200
    assert len(said(left.output_file_id)) == left.request_counts.completed
    for name, count in ((whole, 12), (requeued, 60)):
        done = site.until(lambda name=name: get(name), lambda found: found.status == "completed")
        assert said(done.output_file_id) == {str(one): f"word {one}" for one in range(count)}
        assert done.request_counts.failed == 0 and done.error_file_id is None
    records = site.cluster.run(
        ["sh", "-c", "cat /var/lib/sluice-gateway/requests/*.jsonl"], node="ctl1", cwd="/"
    ).stdout
    ids = [row["id"] for row in map(json.loads, records.splitlines()) if row["endpoint"] == "/v1/batches"]
    assert len(ids) == len(set(ids)) == 12 + 60 + left.request_counts.completed


@pytest.fixture(scope="module")
def rpc(site: ServeSite, client: openai.OpenAI) -> Iterator[ClusterClient]:
    """Alice's, of the gateway's gRPC service."""
    (port,) = free_ports(1)
    serving = json.loads((site.cluster.layout.sluice / "sluice.yaml").read_text())["serving"]["batches"]
    words = ["--port", str(port), "--gateway", serving["gateways"][0], "--api", serving["api"]]
    words += ["--program", serving["program"], "-v"]
    site.cluster.start_program("rpc", ["sluice", "gateway-rpc", *words], node="ctl1", user="sluice-gateway")
    with ClusterClient(f"127.0.0.1:{port}", token=client.api_key, timeout=60) as made:

        def answers() -> bool:
            with suppress(CallFailed):
                return bool(made.models())
            return False

        site.until(answers)
        yield made


def test_submit_job_runs_the_model_over_its_input(site: ServeSite, rpc: ClusterClient) -> None:
    """As the example has it, on real daemons: an ordinary job of the caller that starts llama.cpp's server."""
    make_model(site.folder / "counting.gguf", "counting")
    model, output = INSIDE / "told/counting.gguf", INSIDE / "told/answers.jsonl"
    job = rpc.submit_job(
        model_path=model, input_data=[" six", " ninety"], gpu_requirements={}, max_tokens=3, output_path=output,
        time_limit="5", name="count",
    )  # fmt: skip
    shown = site.cluster.run(["scontrol", "show", "job", "-o", str(job)]).stdout
    for word in ("JobName=count", "UserId=alice(", "Account=physics", "TimeLimit=00:05:00"):
        assert word in shown
    seen = list(rpc.watch_job(job, timeout=120))
    states = [one.state for one in seen]
    assert states[-1] == "COMPLETED" and seen[-1].ended and set(states[:-1]) <= {"PENDING", "RUNNING", "COMPLETING"}
    assert (seen[-1].user, seen[-1].account, seen[-1].name) == ("alice", "physics", "count") and seen[-1].nodes
    rows = [json.loads(line) for line in (site.folder / "answers.jsonl").read_text().splitlines()]
    said = {row["custom_id"]: row["response"]["body"]["choices"][0]["text"] for row in rows}
    assert said == {"request-1": counted(6, 3), "request-2": counted(90, 3)}
    assert rpc.wait(job).state == "COMPLETED"


def test_submit_job_says_why_not(site: ServeSite, rpc: ClusterClient) -> None:
    words: dict[str, Any] = {
        "model_path": INSIDE / "told/counting.gguf", "input_data": [" six"], "gpu_requirements": {},
    }  # fmt: skip
    for more, why in (
        ({"partition": "nowhere"}, "[Ii]nvalid partition"),
        ({"account": "chemistry"}, "[Ii]nvalid account"),
        ({"gpu_requirements": 1}, "(?i)gres|gpu|node configuration"),
        ({"qos": "none"}, "(?i)qos"),
    ):
        with pytest.raises(CallFailed, match=why):
            rpc.submit_job(**words | more)
    missing = rpc.submit_job(**words | {"model_path": "/nowhere.gguf"}, work_dir=str(INSIDE / "told"))
    assert rpc.wait(missing, timeout=120).state == "FAILED"
    (log,) = site.folder.glob(f"*{missing}.out")
    assert "model /nowhere.gguf: not there" in log.read_text()
    long = words | {"input_data": [" six"] * 50, "output_path": INSIDE / "told/held.jsonl"}
    held = rpc.submit_job(**long, max_tokens=1900)
    rpc.cancel_job(held)
    assert rpc.wait(held, timeout=120).state == "CANCELLED"


def test_a_caller_sees_how_many_requests_it_has_now(site: ServeSite, client: openai.OpenAI) -> None:
    policy = json.loads((site.cluster.layout.sluice / "sluice.yaml").read_text())
    url, head = f"{policy['serving']['batches']['api']}/api/v1/limits", {"Authorization": f"Bearer {client.api_key}"}

    def open_now() -> dict[str, int | None]:
        try:
            answer = urllib.request.urlopen(urllib.request.Request(url, headers=head), timeout=10)
        except urllib.error.URLError:  # it starts
            return {}
        with answer:
            rows = {row["name"]: row["used_concurrent"] for row in json.load(answer)["limits"]}
        return {name: rows[name] for name in ("alice", key, "physics")}

    key = client.api_key.split("_")[1]
    none = {"alice": 0, key: 0, "physics": None}  # a tenant's use is private
    site.until(open_now, none.__eq__)
    asking = []
    for _ in range(3):
        asking.append(http.client.HTTPConnection(str(client.base_url.host), client.base_url.port or 0))
        body = json.dumps({"model": "broken", "messages": [{"role": "user", "content": "x"}]})  # it never comes
        asking[-1].request("POST", URL, body, head | {"Content-Type": "application/json"})
    site.until(open_now, {"alice": 3, key: 3, "physics": None}.__eq__)
    for one in asking:
        one.close()
    site.until(open_now, none.__eq__)


def test_more_come_while_requests_wait_but_never_more_than_the_most(site: ServeSite) -> None:
    site.need(waiting=20, in_flight=4, oldest_s=3.0, delay_s=3.0)
    site.until(site.replicas, lambda found: len(found) == 2)
    time.sleep(2)
    assert len(site.jobs()) == 2


def test_a_drained_nodes_replica_gets_its_successor_first(site: ServeSite) -> None:
    site.need(in_flight=1)
    (old,) = site.until(site.replicas, lambda found: len(found) == 1).values()
    site.tell(old["launch"], running=1)
    seen: list[set[str]] = []
    site.cluster.run(["scontrol", "update", f"NodeName={old['host']}", "State=DRAIN", "Reason=fan"])
    try:

        def look() -> dict[str, str]:
            found = {key: row["state"] for key, row in site.replicas("words", "ready", "draining").items()}
            seen.append({key for key, state in found.items() if state == "ready"})
            return found

        site.until(look, lambda found: found.get(old["launch"]) == "draining")
        assert all(seen), "one was ready at each moment"
        (new,) = site.replicas().values()
        assert new["host"] != old["host"]
        assert old["job"] in [number for number, _, _ in site.jobs()], "it has a request"
        site.tell(old["launch"], running=0)
        site.until(site.jobs, lambda jobs: [launch for _, _, launch in jobs] == [new["launch"]])
    finally:
        site.cluster.run(["scontrol", "update", f"NodeName={old['host']}", "State=RESUME"])


def test_sigkill_of_replicad_loses_no_replica_and_doubles_none(site: ServeSite) -> None:
    site.need(in_flight=8)
    before = site.until(site.replicas, lambda found: len(found) == 2)
    site.kill()
    site.until(site.replicas, lambda found: len(found) == 2)
    time.sleep(1.5)
    assert set(site.replicas()) == set(before)
    assert {launch for _, _, launch in site.jobs()} == set(before)
    site.empty()
    site.need(waiting=1)
    time.sleep(0.35)  # in the middle of a launch
    site.kill()
    site.until(site.replicas)
    time.sleep(1)
    assert len(site.jobs()) == 1


def test_without_need_all_go(site: ServeSite) -> None:
    site.until(site.replicas)
    site.empty()
    assert site.until(lambda: site.rows("services")["words"]["why"] == "")
    assert site.audited("serve end")


def test_what_cannot_be_launched_is_said_and_tried_less_and_less(site: ServeSite) -> None:
    site.need("broken", waiting=1)
    why = site.until(lambda: site.rows("services")["broken"]["why"], lambda text: "failed" in text)
    assert "partition" in why and "next try" in why
    refused = len(site.audited("serve refused"))
    time.sleep(3)
    assert len(site.audited("serve refused")) <= refused + 1
    site.need("broken")


def test_a_replica_that_fails_is_ended_and_the_reason_given(site: ServeSite) -> None:
    site.tell("words", fails="no such model")
    site.need(waiting=1)
    why = site.until(lambda: site.rows("services")["words"]["why"], lambda text: "no such model" in text)
    assert "the last replica failed" in why
    site.tell("words", fails="")
    site.until(site.replicas)


def test_strangers_get_nowhere(site: ServeSite) -> None:
    site.need(waiting=1)
    (row,) = site.until(site.replicas).values()
    say = (
        "import sys, json; sys.path.insert(0, '{place}')\n"
        "from stand_in_replica import say\nfrom sluice.exchange.serving import *\nimport pwd\n"
        "beat = Heartbeat('{service}', '{launch}', {job}, '{host}', 1, 'ab' * 32, 'ef' * 32, State('ready'),"
        " Abilities(), 4, Load(), None)\n"
        "try:\n    print(say('ctl1:{port}', beat, pwd.getpwnam('sluice-serve').pw_uid).do)\n"
        "except (ValueError, OSError) as error:\n    print('refused')\n"
    )
    port = site.cluster.facts["environment"]["SLUICE_REPLICAD_PORT"]

    def beat(user: str, **other: object) -> str:
        words = {"service": "words", "launch": row["launch"], "job": row["job"], "host": row["host"], **other}
        text = say.format(place=stand_in_replica.__file__.rpartition("/")[0], port=port, **words)
        return site.cluster.run([*PYTHON, "-c", text], user=user, node="n1", cwd="/").stdout.strip()

    assert beat("mallory") == "refused"
    assert beat("alice", launch="f" * 16) == "refused"
    assert beat("alice", job=1) == "refused" and beat("alice", host="elsewhere") == "refused"
    assert beat("alice", service="short") == "refused"
    assert site.replicas()[row["launch"]]["secret"] == "cd" * 32
    assert beat("alice") == "go on", "the service's own user may"


def test_root_ends_only_what_is_that_launchs(site: ServeSite) -> None:
    launch = "0123456789abcdef"
    other = submit(site.cluster, "-Jsluice-serve.other", "-Aphysics", "--mem=1M", cwd="/")
    named = submit(site.cluster, f"-Jsluice-serve.words.{launch}", "-Achemistry", "--mem=1M", user="mallory", cwd="/")

    def act(text: str, user: str = "sluice-serve") -> str:
        code = (
            "import socket, sys\ns = socket.socket(socket.AF_UNIX)\ns.connect('/run/sluice-act/socket')\n"
            "s.sendall(sys.argv[1].encode() + b'\\n')\nprint(s.makefile().readline())"
        )
        return site.cluster.run([*PYTHON, "-c", code, text], user=user, node="ctl1", cwd="/", check=False).stdout

    def words(do: str, service: str = "words", one: str = launch) -> str:
        return f'{{"version":2,"do":"{do}","service":"{service}","launch":"{one}","lent":false}}'

    assert '"living": false' in act(words("end_replica"))
    assert '"status": 404' in act(words("end_replica", "other")) and '"status": 400' in act(words("submit"))
    assert '"status": 404' in act(words("launch_replica", "nothing", "1" * 16))
    assert act(words("launch_replica"), user="mallory").strip() == ""
    assert '"status": 400' in act('{"version":1,"do":"cancel","proof":{"kind":"sluice","text":""},"words":{}}')
    running = site.cluster.run(["squeue", "--noheader", "--format=%i"]).stdout.split()
    assert {other, named} <= set(running)
    site.cluster.run(["scancel", other, named])


def test_a_replica_whose_job_is_cancelled_is_replaced(site: ServeSite) -> None:
    site.need(in_flight=8)
    before = site.until(site.replicas, lambda found: len(found) == 2)
    gone = next(iter(before.values()))
    site.cluster.run(["scancel", "--signal=KILL", "--full", str(gone["job"])])
    site.until(site.replicas, lambda found: len(found) == 2 and gone["launch"] not in found)


def test_the_end_of_its_time_was_handed_over_all_the_while(site: ServeSite) -> None:
    """While the tests above ran: nodes were drained, and replicad was killed and stopped."""
    site.until(lambda: set().union(*site.short), lambda launches: len(launches) >= 3, timeout=90)
    seen = site.short[:]
    ready = seen[next(number for number, one in enumerate(seen) if one) :]
    assert len(ready) > 20 and all(ready), "one was ready at each moment"
    states = site.cluster.run(["sacct", "--allocations", "--noheader", "--format=State%20,JobName%60"]).stdout
    assert not [line for line in states.splitlines() if "TIMEOUT" in line and ".short." in line]
    site.pause("short", paused=True)
    site.until(lambda: site.jobs("short"), lambda jobs: not jobs)


def test_tokens_of_slurm_are_keys(site: ServeSite) -> None:
    """Made by Slurm's own command, with the key of the slurmctld that runs."""
    cluster = site.cluster
    key, conf = "/etc/slurm/jwt_hs256.key", cluster.layout.slurm / "slurm.conf"
    (cluster.layout.slurm / "jwt_hs256.key").write_bytes(os.urandom(32))
    cluster.run(["chown", "slurm", key], node="ctl1")
    cluster.run(["chmod", "600", key], node="ctl1")
    conf.write_text(f"{conf.read_text()}AuthAltTypes=auth/jwt\nAuthAltParameters=jwt_key={key}\n")
    for daemon in ("slurmctld@ctl1", "controllerd@ctl1"):  # which knows the configuration for half a minute
        cluster.stop_daemon(daemon)
        cluster.start_daemon(daemon)

    def token(user: str, seconds: int) -> str:
        words = ["scontrol", "token", f"lifespan={seconds}"]
        made = cluster.run(words, user=user, node="n1", cwd="/", check=False).stdout.strip()
        return made.removeprefix("SLURM_JWT=")

    def models(key: str) -> set[str] | None:
        """What it may call; None: it is no key."""
        address = f"http://127.0.1.1:{cluster.facts['environment']['SLUICE_GATEWAY_PORT']}/v1"
        try:
            return {one.id for one in openai.OpenAI(base_url=address, api_key=key, max_retries=0).models.list()}
        except openai.AuthenticationError:
            return None

    def first() -> set[str] | None:
        try:
            return models(alices)
        except openai.InternalServerError:  # controllerd is not there yet
            return None

    alices = site.until(lambda: token("alice", 600))
    assert "engine" in site.until(first)
    assert models(token("mallory", 600)) == set(), "no service is chemistry's"
    assert models(f"{alices[:-8]}AAAAAAAA") is None

    def used() -> str:
        """One that was a key, while it lived; empty: it was over before it was used, as the machine is busy."""
        short = token("alice", 2)
        return short if models(short) else ""

    short = site.until(used)
    site.until(lambda: models(short), lambda found: found is None)


def test_a_flood_of_launches_makes_no_more_than_the_most_and_one(site: ServeSite) -> None:
    site.empty()
    site.cluster.stop_daemon("replicad@ctl1")
    code = (
        "import socket\n"
        "for n in range(8):\n"
        "    s = socket.socket(socket.AF_UNIX); s.connect('/run/sluice-act/socket')\n"
        '    s.sendall(b\'{"version":2,"do":"launch_replica","service":"words","launch":"%016x","lent":false}\\n\''
        " % (n // 2))\n"
        "    print(s.makefile().readline())"
    )
    said = site.cluster.run([*PYTHON, "-c", code], user="sluice-serve", node="ctl1", cwd="/").stdout
    assert said.count('"job_id"') == 6 and said.count('"status": 409') == 2
    assert len(site.jobs()) == 3
