"""Whoever takes over the web process changes nothing without a user's own proof."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from sluice.actd import server
from sluice.base.rates import Rate
from sluice.exchange.acts import MOST_REQUEST, ActError, Proof, Request, parse_answer, render_request
from tests.unit.actd.world import KEY, World, jwt, of_kind

SUBMIT = {"script": "#!/bin/sh\n"}


def test_a_token_may_what_it_was_made_for_until_it_is_revoked(world: World) -> None:
    proof = world.proof("alice")
    assert world.ask("submit", proof=proof, **SUBMIT)["job_id"] == 100
    assert world.refusal("submit", proof=world.proof("alice", "read"), **SUBMIT).status == 403
    world.tokens.revoke([proof.text.split("_")[1]])
    assert world.refusal("submit", proof=proof, **SUBMIT).status == 401
    assert len(world.calls()) == 1


def test_a_token_that_is_over_is_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    proof, now = world.proof("alice"), time.time()
    monkeypatch.setattr(time, "time", lambda: now + 61)
    assert world.refusal("submit", proof=proof, **SUBMIT).status == 401


def test_slurms_tokens_are_checked_with_the_clusters_key(world: World) -> None:
    claims = {"sun": "alice", "exp": time.time() + 60}
    assert world.ask("submit", proof=Proof("slurm", jwt(claims)), **SUBMIT)["job_id"] == 100
    bad = {
        "another key": jwt(claims, b"x" * 32),
        "no signature": jwt(claims, KEY, alg="none"),
        "none at all": jwt(claims, alg="none").rpartition(".")[0] + ".",
        "over": jwt({**claims, "exp": time.time() - 1}),
        "no user": jwt({"exp": time.time() + 60}),
        "a list": jwt({**claims, "sun": ["root"]}),
        "not yet": jwt({**claims, "nbf": time.time() + 600}),
        "text": "a.b.c",
        "much": "x" * 100_000,
        "other letters": jwt(claims) + "\u00e9",
    }
    for name, text in bad.items():
        assert world.refusal("submit", proof=Proof("slurm", text), **SUBMIT).status == 401, name
    assert len(world.calls()) == 1


def test_a_proof_of_one_kind_is_none_of_another(world: World) -> None:
    sluice, slurm = world.proof("alice"), Proof("slurm", jwt({"sun": "alice", "exp": time.time() + 60}))
    for proof in (of_kind(sluice, "slurm"), of_kind(sluice, "oidc"), of_kind(slurm, "sluice"), of_kind(slurm, "oidc")):
        assert world.refusal("submit", proof=proof, **SUBMIT).status == 401
    assert not world.calls()


def test_a_user_that_the_web_process_names_is_not_believed(world: World) -> None:
    line = json.loads(render_request(Request("submit", world.proof("alice"), SUBMIT)))
    for extra in ({"user": "root2"}, {"level": 2}, {"uid": 0}):
        with pytest.raises(ActError) as caught:
            parse_answer(world.actd.answer(json.dumps({**line, **extra}).encode()))
        assert caught.value.status == 400
    for extra in ({"user": "root2"}, {"uid": "0"}, {"who": "root"}):
        assert world.refusal("submit", **SUBMIT, **extra).status == 422
    assert not world.calls()


@pytest.mark.parametrize(
    "line",
    [
        b"", b"{}", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"version": 2}', b"9" * 5000,
        b'{"version":1,"do":"submit","proof":"x","words":{},"request_id":"","key":null,"address":""}',
        b'{"version":1,"do":[],"proof":{"kind":"sluice","text":""},"words":{},"request_id":"","key":null,"address":""}',
        b'{"version":1,"do":"x","proof":{"kind":"root","text":""},"words":{},"request_id":"","key":null,"address":""}',
        b'{"version":1,"do":"x","proof":{"kind":"slurm","text":""},"words":[],"request_id":"","key":"","address":""}',
    ],
)  # fmt: skip
def test_what_is_no_request_is_refused(world: World, line: bytes) -> None:
    with pytest.raises(ActError) as caught:
        parse_answer(world.actd.answer(line))
    assert caught.value.status == 400


def test_roles_are_asked_of_slurm(world: World) -> None:
    returned = {"node": "n1"}
    for do, words, least in (
        ("health-return", returned, 1), ("silence", {"rule": "x"}, 1), ("silence-end", {"id": "12345678"}, 1),
        ("policy-check", {"text": ""}, 1), ("policy-plan", {"text": ""}, 1), ("policy-apply", {"hash": "0" * 64}, 2),
        ("policy-drift", {}, 1), ("service-change", {"service": "llm", "most": 2}, 2),
    ):  # fmt: skip
        for user, level in world.users.items():
            if level < least:
                assert world.refusal(do, user, **words).status == 403, (do, user)
    assert world.refusal("policy-apply", "root2", hash="0" * 64).status == 409


def test_who_is_no_administrator_reads_what_it_did_itself(world: World) -> None:
    for user in ("alice", "oper"):
        world.refusal("submit", user, script="")
    assert {one["user"] for one in world.ask("audit", "root2")["entries"]} >= {"alice", "oper"}
    assert {one["user"] for one in world.ask("audit", "alice")["entries"]} == {"alice"}
    assert not world.ask("audit", "alice", user="oper")["entries"]


def test_tokens_that_others_can_write_are_not_believed(world: World) -> None:
    proof = world.proof("alice")
    (world.folder / "tokens.json").chmod(0o660)
    assert world.refusal("submit", proof=proof, **SUBMIT).status == 503
    (world.folder / "tokens.json").chmod(0o600)
    assert world.ask("submit", proof=proof, **SUBMIT)


def test_each_write_and_each_refusal_is_audited_without_secrets(world: World) -> None:
    proof = world.proof("alice")
    world.ask("submit", proof=proof, script="#!/bin/sh\necho secret-1\n", environment={"A": "secret-2"}, name="x")
    world.refusal("update", job="17", priority=-1)
    world.refusal("submit", proof=Proof("slurm", "secret-3.b.c"), **SUBMIT)
    world.refusal("health-return", node="n1")
    text = json.dumps(entries := world.audited())
    assert [entry["action"] for entry in entries] == ["web submit", *["web refused"] * 3]
    assert [entry["user"] for entry in entries] == ["alice", "alice", "", "alice"]
    assert entries[0]["subject"] == "100" and entries[0]["detail"]["request_id"] == "id"
    assert entries[0]["detail"]["address"] == "10.0.0.1" and entries[0]["detail"]["field name"] == "x"
    assert "secret" not in text and proof.text not in text
    found = world.ask("audit", "root2", user="alice", action="web refused", limit=1)["entries"]
    assert [entry["seq"] for entry in found] == [4]
    of_web = world.ask("audit", "root2", action="web", before=4, after=1)["entries"]
    assert [entry["seq"] for entry in of_web] == [3, 2]
    assert not world.ask("audit", "root2", action="web sub")["entries"]


def test_bad_proofs_do_not_fill_the_audit_log(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(400):
        world.refusal("submit", proof=Proof("slurm", "a.b.c"), **SUBMIT)
    assert len(world.audited()) < 250


def test_a_user_has_a_rate(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_BY_USER", (Rate(100, 1), Rate(3, 0.01)))
    world.begin()
    codes = []
    for _ in range(6):
        try:
            world.ask("cancel", job="1")
            codes.append(200)
        except ActError as error:
            codes.append(error.status)
    assert codes[:3] == [200] * 3 and codes[-1] == 429
    assert world.ask("cancel", "oper", job="1")


def test_refusals_of_a_user_do_not_fill_the_audit_log(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_BY_USER", (Rate(100, 1), Rate(3, 0.01)))
    world.begin()
    codes = [world.refusal("update", job="1", priority=-1).status for _ in range(20)]
    assert codes == [422] * 3 + [429] * 17, "fields are looked at in a user's turn"
    assert [entry["detail"]["status"] for entry in world.audited()] == [422] * 3


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes other users")
def test_other_users_of_the_host_get_nothing(world: World) -> None:
    stopping = threading.Event()
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)  # pytest's own are closed to others
    world.actd.settings = replace(world.actd.settings, socket=folder / "socket")
    serving = threading.Thread(target=world.actd.serve, args=(stopping,))
    serving.start()
    try:
        while not world.actd.settings.socket.exists():
            time.sleep(0.01)
        request = render_request(Request("submit", world.proof("alice"), SUBMIT))
        ask = (
            "import os, socket, sys; os.setresuid(*[int(sys.argv[2])] * 3)\n"
            "s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); s.sendall(sys.stdin.buffer.read())\n"
            "print(s.recv(99999).decode())"
        )
        for uid, answered in ((12345, False), (65534, True), (0, True)):
            words = [sys.executable, "-c", ask, str(world.actd.settings.socket), str(uid)]
            done = subprocess.run(words, input=request, capture_output=True, check=False, timeout=30)
            assert (b"job_id" in done.stdout) is answered, (uid, done)
        with socket.socket(socket.AF_UNIX) as long:
            long.connect(str(world.actd.settings.socket))
            long.settimeout(20)
            try:
                for _ in range(MOST_REQUEST // (1 << 20) + 2):
                    long.sendall(b"x" * (1 << 20))
            except OSError:
                pass
            said = long.recv(1000)
            assert b"413" in said
    finally:
        stopping.set()
        serving.join()
        folder.rmdir()
