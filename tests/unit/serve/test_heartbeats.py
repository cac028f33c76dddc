"""What a replica sends to replicad, line by line."""

from __future__ import annotations

import socket

import pytest

from sluice.exchange.serving import Orders, render
from sluice.serve.replica.heartbeats import Heartbeats
from sluice.slurm import munge
from tests.unit.serve.test_registry import BEAT

UID = 990


def test_a_ticket_goes_before_the_next_heartbeats_by_turns_while_they_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(munge, "encode", lambda payload, readable_by: f"MUNGE:{readable_by}:")
    monkeypatch.setattr(munge, "decode", lambda text: munge.Message(bytes.fromhex(text), UID, UID))
    answers = Orders(ticket="abc.1"), Orders(ticket="abc.2"), None, None, Orders(), Orders()
    lines, obeyed = [], []
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(20)
        beats = Heartbeats([listening.getsockname()], UID, lambda: BEAT, obeyed.append)
        beats.start()
        for answer in answers:
            connection, _ = listening.accept()
            with connection, connection.makefile("rb") as said:
                lines.append(said.readline().decode())
                if answer is not None:
                    connection.sendall(render(answer).hex().encode() + b"\n")
            beats.now()
    beats.end()
    credential = f"MUNGE:{UID}:\n"
    assert lines == [
        credential, f"abc.1 {credential}", f"abc.2 {credential}", credential, f"abc.2 {credential}", credential
    ]  # fmt: skip
    assert obeyed == [Orders(ticket="abc.1"), Orders(ticket="abc.2"), Orders(), Orders()]
