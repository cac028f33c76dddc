"""Parsers of a tenant's or a node's bytes, as functions that never raise an exception.

`python -m tests.fuzz NAME RUNS` lets atheris find the bytes; the unit tests call the same functions with a few.
"""

from __future__ import annotations

import atexit
import base64
import gzip
import hashlib
import hmac
import json
import re
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import httptools
from joserfc import jws
from joserfc import jwt as josejwt
from joserfc.jwk import ECKey
from pydantic import ValidationError
from starlette.requests import Request, cookie_parser

from benchmarks.profile_files import Writer, training
from gres_probe.lint import Site, lint
from policy.service_jobs import ServicePolicy, ServicesPolicy, job_name, parse_job_name, replica_job
from policy.service_jobs import parse as parse_services
from policy.service_use import service_documents
from prolog_epilog import cgroups, jobs, server
from prolog_epilog.agent import Agent
from prolog_epilog.devices import NodeDevice
from prolog_epilog.server import Peer
from prolog_epilog.state import Settings
from prolog_epilog.subuids import parse_subuids
from sluice.actd.arguments import environment_of, refuse_script, sbatch_words, update_words
from sluice.actd.become import Account
from sluice.base import log, oidc
from sluice.base.errors import SluiceError
from sluice.base.events import _parse as parse_event
from sluice.base.networks import client_of, parse_networks
from sluice.base.tokens import TokenStore
from sluice.client import models
from sluice.controllerd.inbox import store_records
from sluice.controllerd.snapshot import job_row
from sluice.exchange.acts import ActError, Proof, parse_request, render_request
from sluice.exchange.acts import Request as ActRequest
from sluice.exchange.admin_comment import render
from sluice.exchange.health_report import parse_report
from sluice.exchange.inbox import Inbox
from sluice.exchange.job_records import JobRecords
from sluice.exchange.launches import LaunchRequest, parse_launch, render_launch
from sluice.exchange.live import Readings
from sluice.exchange.record import MOST_RECORD, Event, Grant, JobRecord
from sluice.exchange.requests import RequestRecord, read_requests
from sluice.exchange.requests import render as render_request_record
from sluice.exchange.running import Running
from sluice.exchange.serve_status import parse_status
from sluice.exchange.serving import Abilities, Heartbeat, Load, Orders, State
from sluice.exchange.serving import parse as parse_serving
from sluice.exchange.serving import render as render_serving
from sluice.fabric.ibnet import read_ibnetdiscover
from sluice.fabric.lldp import parse_lldp
from sluice.fabric.model import Fabric, Reported
from sluice.fabric.tree import tree_of
from sluice.profile.summary import render as render_summary
from sluice.profile.summary import summarise
from sluice.profile.timeline import load as load_profiles
from sluice.profile.trace import write as write_trace
from sluice.report.fields import fields_of
from sluice.report.output import row_document
from sluice.report.services import ServiceKey, ServiceTally, rows_of
from sluice.serve.batch.lines import Lines
from sluice.serve.gateway import continuation, heads
from sluice.serve.gateway.batch_state import Asked, Batches
from sluice.serve.gateway.body import read as read_body
from sluice.serve.gateway.continuation import Rewriter, Story
from sluice.serve.gateway.form import Form
from sluice.serve.gateway.refusals import RefusalError
from sluice.serve.gateway.shelf import Owner, Shelf
from sluice.serve.gateway.sse import Events, document_of, event_of, kind_of
from sluice.serve.replicad.registry import Expected, Registry
from sluice.slurm import jwt
from sluice.slurm.munge import Message
from sluice.slurm.munge_service import RefusedError
from sluice.slurm.slurm_conf import interpret_slurm_conf, parse_text
from sluice.slurm.topology import read_topology_conf, topology_conf
from sluice.web import session
from sluice.web.api.jobs import JobsQuery, query_of
from sluice.web.endpoint import parse_query
from sluice.web.pages.routes import local
from sluice.web.store import MOST_CURSOR, SORTS, Jobs, Query
from tests.unit.controllerd.slurm_objects import a_job
from tests.unit.fabric.networks import Cable, ibnetdiscover, rails

USER, OTHER = 1000, 1001
JOB = 7


@dataclass(frozen=True)
class Target:
    """A function of any bytes, and bytes to begin with."""

    run: Callable[[bytes], None]
    seeds: tuple[bytes, ...]


def _record() -> JobRecord:
    one = JobRecord(JOB, USER, "alice", "physics", "main", "n1", 5000.0, 6000.0)
    one.grants.append(Grant(0, "GPU-0", "nvidia", "H100", 80 << 30))
    one.events.append(Event(5001.0, "grant", {"uuids": ["GPU-0"]}))
    return one


def _quiet() -> None:
    """Log nothing: it would be a line for each run."""
    for module in (log, jobs, server):
        module.log = lambda *_, **__: None  # type: ignore[attr-defined]


def agent_requests() -> Target:
    """A user's requests of the agent, in the job's own cgroup."""
    _quiet()
    folder = Path(tempfile.mkdtemp(prefix="sluice-fuzz-"))
    agent = Agent(Settings(run=folder / "run", records=folder / "records", policy=folder / "sluice.policy"))
    agent.state.devices = [
        NodeDevice(
            index, "nvidia", "H100", f"GPU-{index}", "", (), f"/dev/nvidia{index}", 81920, "550", 0, "0-7", ("mlx5_0",)
        )
        for index in range(2)
    ]
    agent.state.jobs.prepare()
    agent.state.records[JOB] = _record()
    cgroups.place_of = lambda *_: cgroups.Place(JOB, "0")

    def run(data: bytes) -> None:
        for uid in (USER, OTHER):
            answer = agent.server.answer(data, Peer(1, uid))
            assert ("ok" in answer) != ("error" in answer)
            json.dumps(answer)
        assert len(agent.state.records[JOB].to_json()) < MOST_RECORD

    return Target(
        run,
        (
            b'{"do": "task", "open": ["/dev/nvidia0", "/dev/nvidia1"], "nics": ["mlx5_0"]}',
            b'{"do": "devices"}',
            b'{"do": "limit", "job": 7, "uid": 1000, "whole": true, "gpus": [0], "shards": 1, "open": []}',
            b'{"do": "status"}',
        ),
    )


def inbox_requests() -> Target:
    """What a user, and what root of a node, sends to the controllers."""
    folder = Path(tempfile.mkdtemp(prefix="sluice-fuzz-"))
    store, running = JobRecords(folder / "jobs"), Running()
    store.append = lambda _: None  # type: ignore[method-assign]
    handlers = {"records": store_records(store), "running": running.take, "readings": Readings().take}
    inbox = Inbox(
        handlers, {0}, {"ask-running": lambda request, uid: running.answer(request, None if uid == 0 else uid)}
    )
    record = json.loads(_record().to_json())

    def run(data: bytes) -> None:
        for uid in (USER, 0):
            try:
                json.dumps(inbox.answer(data, uid))
            except RefusedError:
                assert uid != 0

    texts = (
        {"do": "ask-running", "jobs": [7], "after": [0, ""]},
        {"do": "records", "records": [record]},
        {"do": "running", "node": "n1", "period": 60, "more": True, "records": [record | {"ended": None}]},
        {"do": "readings", "node": "n1", "period": 5, "gpus": [{"index": 0, "uuid": "GPU-0", "jobs": {"7": 1.5}}]},
    )
    return Target(run, tuple(json.dumps({"version": 1, **text}).encode() for text in texts))


def records() -> Target:
    """Records that the agent reads back."""

    def run(data: bytes) -> None:
        try:
            one = JobRecord.from_json(data.decode(errors="replace"), "fuzz")
        except SluiceError:
            return
        one.note("end", step="0")
        one.in_short()
        JobRecord.from_json(one.to_json(), "fuzz")
        render([_record(), one])

    return Target(run, (_record().to_json().encode(),))


def events() -> Target:
    """Lines of a controller's events, and of /etc/subuid."""

    def run(data: bytes) -> None:
        event = parse_event(data)
        assert event is None or event.seq > 0
        assert all(start and count for start, count, _ in parse_subuids(data.decode(errors="replace")))

    return Target(
        run, (b'{"seq": 7, "time": 1763740000.25, "kind": "takeover", "leader": "ctl1"}', b"root:100000:65536")
    )


def health_reports() -> Target:
    """A node's report of its health."""
    fault = {
        "check": "xid",
        "uuid": "GPU-0",
        "numbers": [0],
        "severity": "fatal",
        "action": "drain-gpu",
        "acts": True,
        "began": 1.0,
        "text": "XID 79",
        "jobs": [7],
    }
    gpu = {
        "uuid": "GPU-0",
        "vendor": "nvidia",
        "model": "H100",
        "numbers": [0],
        "passes": 1,
        "kept": "",
        "jobs": [7],
        "unknown": ["gpu_lost"],
    }
    seed = {
        "schema_version": 1, "node": "n1", "time": 1.0, "mode": "enforce", "wanted_passes": 3, "gpus": [gpu],
        "faults": [fault], "passes": 0, "unknown": [], "refused_at": 0, "unclean": [], "room": True, "blames": ["job"],
    }  # fmt: skip

    def run(data: bytes) -> None:
        try:
            document = json.loads(data)
        except (ValueError, RecursionError):
            return
        if isinstance(document, dict):
            try:
                report = parse_report(document)
            except SluiceError:
                return
            parse_report(json.loads(json.dumps(report.to_dict())))

    return Target(run, (json.dumps(seed).encode(),))


def usage_records() -> Target:
    """Records of requests, of which users wrote parts: what is read has the types that reports take."""
    folder = Path(tempfile.mkdtemp(prefix="sluice-fuzz-"))
    path = folder / "h-2026-11-24.jsonl"
    one = RequestRecord(
        "r1", 1_795_500_000.0, 1_795_500_001.0, "k", "alice", "nlp", "llm", 7, 10, 5, 0, "ok", 200, 0.0, 0.2, 1.0, "/v1"
    )
    known = render_request_record(one)

    def run(data: bytes) -> None:
        path.write_bytes(data + b"\n" + known)
        found = list(read_requests(folder, 0, 1e11))
        assert len({record.id for record in found}) == len(found) and "r1" in {record.id for record in found}
        for record in found:
            assert record.completion_tokens >= 0 and record.ended >= 0
            key = ServiceKey(record.service, record.tenant, record.user, "")
            made = ServiceTally()
            made.count(record)
            (row,) = rows_of({key: made}, lambda _: True, ("service", "user"))
            json.dumps(row_document(fields_of("services"), row))

    return Target(run, (known, known.replace(b"null", b"1"), known + known, known[:50]))


def service_policies() -> Target:
    """Compiled services, and what replicad says of them."""
    launch = "0123456789abcdef"
    made = ServicesPolicy(
        services={"llm": ServicePolicy(name="llm", tenant="nlp", user="u", engine="vllm", callers=("*",))},
        registries=("ctl:6824",),
    )
    status = {"services": {"llm": {"waiting": 3}}, "replicas": {}}

    def run(data: bytes) -> None:
        with suppress(SluiceError):
            policy = parse_services(data, source="x")
            for name in policy.services:
                with suppress(SluiceError):
                    job = replica_job(policy, name, launch, registry_uid=1, program=Path("/x"))
                    assert job.script.count("\n") == 4 and job.script.isascii()
            json.dumps(service_documents(policy, [], None))
        with suppress(SluiceError, ValueError, RecursionError):
            document = json.loads(data)
            found = parse_status(document if isinstance(document, dict) else {})
            json.dumps(service_documents(made, [], found))

    return Target(run, (made.render().encode(), json.dumps(status).encode()))


def web_queries() -> Target:
    """What anybody asks of jobs: the query of a URL, with its cursor, parsed and answered."""
    jobs = Jobs()
    for number in range(1, 12):
        user = "abc"[number % 3]
        jobs.put(job_row(a_job(number, user=user, start_time=None if number % 2 else number, nodes="n[1-2]")))
    jobs.index()
    seen = jobs.of("user", "ab")
    first = [jobs.page(Query(limit=1, sort=sort), None).next or "" for sort in SORTS]

    def run(data: bytes) -> None:
        for query in (data, b"limit=3&cursor=" + base64.urlsafe_b64encode(data).rstrip(b"=")):
            request = Request({"type": "http", "query_string": query, "headers": []})
            try:
                page = jobs.page(query_of(parse_query(JobsQuery, request)), seen)
            except SluiceError as error:
                assert error.usage
                continue
            assert all(job.id in seen for job in page.jobs)
            assert page.next is None or len(page.next) <= MOST_CURSOR

    return Target(
        run,
        (
            *(f"sort={sort}&limit=3&cursor={cursor}".encode() for sort, cursor in zip(SORTS, first, strict=True)),
            b'[1,"id",1,5,5]',
            b"user=a,b&state=running&node=n1&name=tr&order=ascending&qos=physics&account=physics&partition=main,x",
        ),
    )


def web_tokens() -> Target:
    """Headers that name a caller: tokens of Sluice and of Slurm. Without the secret or the key nobody is let in."""
    folder = Path(tempfile.mkdtemp(prefix="sluice-fuzz-"))
    tokens, key, now = TokenStore(folder / "tokens.json"), b"k" * 32, 1_800_000_000.0
    made, text = tokens.create("alice", ["read"], now=now, seconds=60)

    def signed(data: bytes) -> str:
        """Two parts with the right signature: what follows it is parsed, too."""
        head = data.decode("latin-1")
        mac = hmac.new(key, head.encode(), hashlib.sha256).digest()
        return f"{head}.{base64.urlsafe_b64encode(mac).rstrip(b'=').decode()}"

    def run(data: bytes) -> None:
        sent = data.decode("latin-1")  # as headers are
        try:
            assert tokens.check(sent, "read", now) == made and sent == text
        except SluiceError:
            assert sent != text
        for one in (sent, signed(data), signed(head + b"." + base64.urlsafe_b64encode(data).rstrip(b"="))):
            try:
                claims = jwt.verify(one, key, now)
            except SluiceError:
                continue
            assert one != sent and claims.expires > now and claims.user.isprintable()

    def part(value: dict[str, object]) -> bytes:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=")

    claims = {"sun": "alice", "iat": now - 1, "exp": now + 60}
    head = part({"alg": "HS256", "typ": "JWT"})
    return Target(run, (text.encode(), head + b"." + part(claims), json.dumps(claims).encode(), b"a.b.c"))


def heartbeats() -> Target:
    """What a service's user sends to replicad, and what whoever has replicad sends to root's helper."""
    launch = "0123456789abcdef"
    beat = Heartbeat(
        "llm", launch, 17, "n1", 4711, "ab" * 32, "cd" * 32, State.READY, Abilities(chat=True), 4,
        Load(2, 1, 9, 9, 0.5), 1e9, "why",
    )  # fmt: skip
    taken: list[Heartbeat] = []

    def take(one: Heartbeat) -> Orders:
        taken.append(one)
        return Orders()

    expected = {launch: Expected("llm", 2001, 17, frozenset({"n1"}))}
    registry = Registry(990, lambda: {2001: "u"}, expected.get, take, lambda note: note, lambda report: b"")
    asked = LaunchRequest("launch_replica", "llm", launch)

    def run(data: bytes) -> None:
        taken.clear()
        with suppress(RefusedError):
            orders = parse_serving(Orders, registry.answer(Message(data, 2001, 2001)))
            assert registry.owner(orders.ticket.encode()) == (launch,) and replace(orders, ticket="") == Orders()
        assert registry.owner(data) is None
        for one in taken:
            assert (one.service, one.launch, one.job) == ("llm", launch, 17) and 0 < one.port < 65536
            assert json.loads(json.dumps(asdict(one), allow_nan=False)) == json.loads(render_serving(one))
        with suppress(ActError):
            found = parse_launch(data)
            assert parse_job_name(job_name(found.service, found.launch)) == (found.service, found.launch)

    return Target(run, (render_serving(beat), render_launch(asked)))


def act_requests() -> Target:
    """What root's helper is sent by whoever has the web process: no line makes it fail, and no words another option."""
    who = Account("alice", 2001, 2001, (2001,), "/home/alice", "/bin/sh")
    fields = {"script": "#!/bin/sh\n#SBATCH -J x\nid\n", "name": "x", "gpus": "h100:2", "environment": {"A": "b"}}
    request = render_request(ActRequest("submit", Proof("sluice", "x"), fields, "id", "key", "::1"))

    def run(data: bytes) -> None:
        try:
            words = parse_request(data).words
        except ActError as error:
            assert error.status == 400 and error.remedy
            return
        for model in (models.JobRequest, models.JobChange):
            try:
                body = model.model_validate(words)
            except ValidationError:
                continue
            if isinstance(body, models.JobChange):
                assert all("=" in word and word.isprintable() for word in update_words("17", body))
                continue
            assert all(word.startswith("--") and "\0" not in word for word in sbatch_words(body, who, 9))
            with suppress(ActError):
                refuse_script(body.script)
                assert environment_of(body, who).count(b"\0") >= 6

    return Target(run, (request, b'{"version":1}', json.dumps(fields).encode()))


def web_sessions() -> Target:
    """Cookies, identity tokens and the values of forms: who has not the provider's key is nobody."""
    issuer, now = "https://id.example", 1_800_000_000.0
    settings = oidc.Settings(issuer=issuer, client_id="sluice", redirect_uri=f"https://sluice.example{oidc.CALLBACK}")
    document = {f"{name}_endpoint": f"{issuer}/{name}" for name in ("authorization", "token")}
    document |= {"issuer": issuer, "jwks_uri": f"{issuer}/keys"}
    key = ECKey.generate_key("P-256", {"kid": "a"})

    def fetch(url: str) -> tuple[int, dict[str, object]]:
        return 200, {"keys": [key.as_dict(private=False)]} if url.endswith("keys") else document

    provider, proof = oidc.Provider(settings, fetch), Proof("sluice", "x")
    claims = {"iss": issuer, "aud": "sluice", "sub": "1", "iat": now, "exp": now + 60, "preferred_username": "alice"}
    good = josejwt.encode({"alg": "ES256", "kid": "a"}, claims, key, algorithms=["ES256"])

    def signed(data: bytes) -> str:
        return jws.serialize_compact({"alg": "ES256", "kid": "a"}, data, key, algorithms=["ES256"])

    def run(data: bytes) -> None:
        sent = data.decode("latin-1")
        for text in (sent, f"{sent}.{good.partition('.')[2]}", signed(data)):
            oidc.issuer_of(text)
            provider.waits(text, now)
            try:
                found = oidc.verify_id_token(text, provider, now)
            except SluiceError:
                continue
            assert found.expires > now and re.fullmatch("[a-z_][a-z0-9_.-]{0,31}", found.user)
        given = session.proof_in(cookie_parser(sent), secure=True)
        assert given is None or given.text
        assert not session.is_csrf(sent, proof)
        assert local(sent)[:2] not in ("//", "/\\") and local(sent)[0] == "/"

    cookie = session.cookies(Proof("oidc", good), secure=True)[0].partition(";")[0]
    return Target(run, (good.encode(), json.dumps(claims).encode(), cookie.encode(), session.csrf(proof)[:-1].encode()))


def gateway_events() -> Target:
    """A replica's stream: cut into events, what each is, what was said so far, and how another replica goes on."""
    choice = b'{"index":0,"delta":{"content":"It"},"finish_reason":null}'
    part = b'data: {"id":"c","created":1,"model":"m","choices":[%b]}' % choice
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":2,"total_tokens":7}}'
    ids = b'data: {"choices":[{"text":" a","token_ids":[1,2]}],"prompt_token_ids":[3],"__verbose":{"tokens":[1]},"x":1}'
    chat = read_body("chat", b'{"model":"m","stream":true,"messages":[],"max_tokens":50}')

    def run(data: bytes) -> None:
        size = 1 + data[0] % 40 if data else 1
        pieces, whole = Events(), Events()
        found = [event for at in range(0, len(data), size) for event in pieces.feed(data[at : at + size])]
        if b"\r" not in data:
            assert found == whole.feed(data) and pieces.rest == whole.rest
        assert b"".join(found) + pieces.rest == data
        story = Story()
        for event in found:
            kind_of(event)
            assert len(continuation.without_ids(event)) <= len(event)
            story.keep(event)
        story.absorb()
        rest = Rewriter(story, "chat")
        for event in found:
            rest.text(event)
            document = document_of(event)
            if document is not None and isinstance(document.get("usage"), dict):
                event_of(rest.usage(document))
        if story.ids is None or all(type(one) is int for one in story.ids):
            for engine in ("vllm", "llama.cpp", "sglang"):
                made = continuation.plan(chat, story, engine, "tokens")
                assert made is not None and json.loads(made.body)
        continuation.plan_of_template(chat, story, data, "text")

    return Target(
        run, (b"\n\n".join((part, usage, ids, b"data: [DONE]", b"")), b"event: a\r\ndata: 1\r\n\r\n", b'{"prompt":"x"}')
    )


def gateway_bodies() -> Target:
    """A client's body, and what it has of a stream that broke."""
    resume = b'{"id":"c","created":1,"model":"m","text":"It is","tokens":2,"finish_reason":null}'
    chat = b'{"model":"m","stream":true,"messages":[{"role":"user","content":"x"}],"n":1,"stream_options":null}'
    text = b'{"model":"m","prompt":["a","b"],"stream":true,"best_of":2,"logprobs":1}'

    def run(data: bytes) -> None:
        for ability in ("chat", "completions", "embeddings", "responses"):
            try:
                one = read_body(ability, data)
            except RefusalError as error:
                assert 400 <= error.status < 500 and json.loads(error.document("id"))
                continue
            assert json.loads(one.body) is not None and one.reserved(100) > 0
            one.prefix(b"tenant")
            why_not = continuation.why_not(one)
            if one.resume is not None:
                with suppress(RefusalError):
                    story = continuation.story_of(one.resume)
                    if not why_not:
                        continuation.plan(one, story, "sglang", "text")
                    continuation.ending(one, story, 5)

    return Target(run, (chat, text, chat[:-1] + b',"sluice_resume":' + resume + b"}"))


def gateway_heads() -> Target:
    """A client's head: llhttp, and what it leaves open."""

    class Head:
        def __init__(self) -> None:
            self.url, self.headers = b"", dict[bytes, bytes]()

        def on_url(self, url: bytes) -> None:
            self.url += url

        def on_header(self, name: bytes, value: bytes) -> None:
            heads.add_header(self.headers, name, value)

    def run(data: bytes) -> None:
        head = Head()
        parser = httptools.HttpRequestParser(head)
        with suppress(httptools.HttpParserError, httptools.HttpParserUpgrade):
            parser.feed_data(data)
        try:
            length = heads.check_framing(parser.get_http_version(), head.headers)
            assert length is None or length >= 0
            route, _ = heads.route_of(parser.get_method(), head.url)
            heads.check_body_headers(route, head.headers, length)
            heads.idempotency_key(head.headers)
            heads.deadline(head.headers, 100.0)
        except RefusalError as error:
            assert json.loads(error.document("id"))
        client_of(
            "127.0.0.1", head.headers.get(b"x-forwarded-for", b"").decode("latin-1"), parse_networks(["127.0.0.0/8"])
        )
        sent = heads.to_replica("/v1/completions", "m", "secret", "id", 5, head.headers)
        assert sent.count(b"\r\n\r\n") == 1 and sent.endswith(b"\r\n\r\n") and sent.count(b"\r\n") <= 9

    return Target(
        run,
        (
            b"POST /v1/chat/completions?a=b HTTP/1.1\r\nhost: g\r\ncontent-length: 5\r\nauthorization: Bearer x\r\n"
            b"idempotency-key: k\r\nsluice-deadline: 5\r\ncontent-type: text/x\r\nx-forwarded-for: ::1\r\n\r\n",
            b"GET /v1/models/a%20b HTTP/1.1\r\nhost: g\r\ntransfer-encoding: chunked\r\ntraceparent: "
            b"00-11111111111111111111111111111111-1111111111111111-01\r\n\r\n0\r\n\r\n",
        ),
    )


def gateway_uploads() -> Target:
    """The form of an upload, in pieces, and the lines of its file."""

    def run(data: bytes) -> None:
        size, lines = 1 + len(data) % 29, Lines()
        try:
            form = Form(b'multipart/form-data; boundary="b"', lines.feed)
            for begin in range(0, len(data), size):
                form.feed(data[begin : begin + size])
            form.end()
        except RefusalError as error:
            assert json.loads(error.document("id"))
        found = lines.end()
        assert found.requests <= found.rows and (found.errors or found.model)
        assert json.dumps(found.errors)

    line = b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"model":"m","prompt":"x"}}'
    part = b'--b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n'
    whole = part % (b"purpose", b"batch") + part % (b'file"; filename="f', line + b"\n" + line.replace(b"a", b"b", 1))
    return Target(run, (whole + b"--b--\r\n", part % (b"file", line) + b"--b--", line))


def batch_words() -> Target:
    """What a batch's job sends, stored in a batch of its own."""
    folder = Path(tempfile.mkdtemp(prefix="sluice-fuzz-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    owner, shelf = Owner("physics", "alice"), Shelf(folder, 1 << 30, 1e6)
    incoming = shelf.begin(owner, 1 << 20)
    line = '{"custom_id":"r%d","method":"POST","url":"/v1/completions","body":{"model":"m"}}\n'
    incoming.write("".join(line % number for number in range(1000)).encode())
    file = incoming.done("f", 1e11)
    incoming.drop()
    batches = Batches(shelf)
    asked = Asked(file["id"], "/v1/completions", 10**9, "1h", "m", None, "k", [])
    name = batches.create(owner, asked)["id"]

    def run(data: bytes) -> None:
        bills: list[RequestRecord] = []
        try:
            said = json.loads(data)
        except (ValueError, RecursionError):
            return
        if not isinstance(said, dict):
            return
        said.pop("why", None)  # it would be the end
        with suppress(RefusalError):
            batches.exchange(owner, name, said, bills.append, has_budget=True)
        assert all(render_request_record(one) for one in bills)
        assert json.loads((folder / "physics/alice/batches" / name / "batch.json").read_bytes())["status"]

    return Target(
        run,
        (
            b'{"results":[[1,"r0",200,{"usage":{"prompt_tokens":5,"completion_tokens":1}}],[2,"r1",0,"x"]],"at":null}',
            b'{"results":[[3,"r2",400,{"error":[]}]],"at":[80,1]}',
        ),
    )


def fabrics() -> Target:
    """What ibnetdiscover, lldpctl and topology files say: names of other machines, and what is written of them."""
    cables: list[Cable] = [*rails(2, 2, 1), ("s1", 7, "s1", 8), ("a-leaf1", 1, "n9/mlx5_0", 1)]
    neighbour = {
        "chassis": {"tor": {"capability": [{"type": "Bridge", "enabled": True}]}},
        "port": {"id": {"value": "E1"}},
    }
    seeds = (
        b"0" + ibnetdiscover(cables).encode(),
        b"1" + json.dumps({"lldp": {"interface": [{"eth0": neighbour}, {"eth1": neighbour}]}}).encode(),
        b"2SwitchName=s1 Nodes=n[1-2]\nSwitchName=s2 Switches=s[1-2]\nBlockName=b Nodes=n3\nBlockSizes=1,2\n",
        b"3- topology: a\n  tree: {switches: [{switch: s, nodes: 'n[1-2]'}, {switch: t, children: s}]}\n",
        b"3- topology: b\n  block: {block_sizes: [1], blocks: [{block: b, nodes: n1}]}\n",
    )
    slurm = interpret_slurm_conf(parse_text("TopologyPlugin=topology/tree\nNodeName=n[1-3]\n"))
    folder = Path(tempfile.mkdtemp(prefix="sluice-fuzz-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)

    def run(data: bytes) -> None:
        kind, text = data[:1], data[1:]
        with suppress(SluiceError):
            if kind == b"3":
                (folder / "topology.yaml").write_bytes(text)
                lint(Site(slurm, version=(26, 5, 0), topology=folder / "topology.yaml"))
                return
            if kind == b"2":
                config = parse_text(text.decode("utf-8", "surrogateescape"), folder / "topology.conf")
                lint(Site(slurm, topology_conf=config))
                return
            read = parse_lldp({"n1": ("n1", text)}) if kind == b"1" else _ibnet(text)
            fabric = Fabric([read])
            tree, _ = tree_of(fabric, slurm.nodes)
            fabric.judge(slurm.nodes)
            fabric.rails()
            written = read_topology_conf(parse_text(topology_conf(tree)))
            assert not written.faults
            assert written.topologies[0].groups() == tree.groups()

    return Target(run, seeds)


def _ibnet(text: bytes) -> Reported:
    return read_ibnetdiscover(text.decode(errors="replace"), "fuzz")


def profiles() -> Target:
    """Files of profiles, their sums and their traces."""
    folder = Path(tempfile.mkdtemp(prefix="sluice-fuzz-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = folder / "n1.1.1.profile"

    def run(data: bytes) -> None:
        path.write_bytes(data)
        try:
            timeline = load_profiles(folder, most=1000)
        except SluiceError:
            return
        found = models.ProfileSummary.model_validate(summarise(timeline))
        assert all(line.isprintable() for line in render_summary(found.model_dump()))
        write_trace(timeline, folder / "trace.json.gz")
        with gzip.open(folder / "trace.json.gz") as file:
            json.load(file)

    return Target(run, (training(Writer(), 40, 1).content(), Writer().content()))


TARGETS: dict[str, Callable[[], Target]] = {
    "agent-requests": agent_requests,
    "fabrics": fabrics,
    "inbox-requests": inbox_requests,
    "records": records,
    "events": events,
    "health-reports": health_reports,
    "usage-records": usage_records,
    "service-policies": service_policies,
    "web-queries": web_queries,
    "web-tokens": web_tokens,
    "web-sessions": web_sessions,
    "heartbeats": heartbeats,
    "act-requests": act_requests,
    "gateway-events": gateway_events,
    "gateway-bodies": gateway_bodies,
    "gateway-heads": gateway_heads,
    "gateway-uploads": gateway_uploads,
    "batch-words": batch_words,
    "profiles": profiles,
}
