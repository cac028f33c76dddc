"""Sinks on real sockets and processes: e-mail, webhook, a program; and that no text and no file misleads them."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import socketserver
import threading
import time
from collections.abc import Iterator
from email import message_from_bytes, policy
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from sluice.base.errors import SluiceError
from sluice.controllerd.alerts.message import Message, Subject, make
from sluice.controllerd.alerts.sinks import Email, Program, Webhook, make_sinks, read_secret, to_log
from tests.unit.report.test_output import HOSTILE


def message(name: str = "n1 GPU 0", text: str = "90 degrees") -> Message:
    return make(
        id="0123456789abcdef",
        at=1000.0,
        cluster="test",
        state="firing",
        subjects=[Subject(name, 90, text, 900.0)],
        rule={"name": "hot", "kind": "temperature", "severity": "critical"},
    )


class Smtp(socketserver.StreamRequestHandler):
    """As much of SMTP as a client needs."""

    mails: list[tuple[list[str], bytes]] = []  # noqa: RUF012 - one server a test

    def handle(self) -> None:
        self.wfile.write(b"220 test\r\n")
        to: list[str] = []
        while line := self.rfile.readline():
            word = line[:4].upper()
            if word == b"DATA":
                self.wfile.write(b"354 go on\r\n")
                body = b""
                while (part := self.rfile.readline()) != b".\r\n":
                    body += part
                Smtp.mails.append((to, body))
                to = []
            elif word == b"RCPT":
                to.append(line.decode().strip())
            self.wfile.write(b"221 bye\r\n" if word == b"QUIT" else b"250 ok\r\n")
            if word == b"QUIT":
                return


@pytest.fixture
def smtp() -> Iterator[str]:
    Smtp.mails = []
    with socketserver.ThreadingTCPServer(("", 0), Smtp) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.parametrize("name", ["n1 GPU 0", *HOSTILE])
def test_mail_has_our_headers_only(smtp: str, name: str) -> None:
    sink = Email({"to": ["admin@site.org"], "sender": "sluice@site.org", "server": smtp})
    sink.deliver(message(name, name))
    ((to, body),) = Smtp.mails
    assert to == ["rcpt TO:<admin@site.org>"]
    mail = message_from_bytes(body, policy=policy.default)
    assert set(mail.keys()) <= {
        "From",
        "To",
        "Subject",
        "Date",
        "Message-ID",
        "Auto-Submitted",
        "Content-Type",
        "MIME-Version",
        "Content-Transfer-Encoding",
    }
    assert str(mail["Subject"]).startswith("[test] firing critical: hot")
    assert "Bcc" not in mail
    text = mail.get_content()
    assert not [one for one in text if one not in "\r\n" and not one.isprintable()]


def test_mail_leaves_this_host_encrypted_unless_the_admin_says_none(smtp: str) -> None:
    settings = {"to": ["a@b.c"], "sender": "s@b.c", "server": smtp.replace("127.0.0.1", "127.0.0.2")}
    with pytest.raises(SluiceError, match="STARTTLS"):
        Email(settings).deliver(message())
    assert Smtp.mails == []
    Email({**settings, "tls": "none"}).deliver(message())
    Email({**settings, "server": smtp}).deliver(message())
    assert len(Smtp.mails) == 2


def test_a_mail_server_that_is_away_is_an_error() -> None:
    with pytest.raises((SluiceError, OSError)):
        Email({"to": ["a@b.c"], "sender": "s@b.c", "server": "127.0.0.1:1"}).deliver(message())


class Hook(BaseHTTPRequestHandler):
    """Records requests, and answers as the test sets."""

    seen: list[tuple[dict[str, str], bytes]] = []  # noqa: RUF012
    status = 200

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        Hook.seen.append((dict(self.headers.items()), body))
        self.send_response(Hook.status)
        if Hook.status == 302:
            self.send_header("Location", "/elsewhere")
        self.end_headers()

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def hook() -> Iterator[str]:
    Hook.seen, Hook.status = [], 200
    with ThreadingHTTPServer(("127.0.0.1", 0), Hook) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/hook"
        server.shutdown()


@pytest.mark.parametrize("name", ["n1 GPU 0", *HOSTILE])
def test_a_webhook_is_signed_json(hook: str, name: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("very secret\n")
    secret.chmod(0o600)
    Webhook({"url": hook, "secret_file": str(secret)}).deliver(message(name))
    ((headers, body),) = Hook.seen
    signed = headers["X-Sluice-Timestamp"].encode() + b"." + body
    assert headers["X-Sluice-Signature"] == "sha256=" + hmac.new(b"very secret", signed, hashlib.sha256).hexdigest()
    assert headers["X-Sluice-Id"] == "0123456789abcdef"
    assert b"very secret" not in body
    document = json.loads(body)
    assert document["schema_version"] == 1
    assert document["state"] == "firing"
    shown = document["subjects"][0]["name"]
    assert all(one.isprintable() for one in shown)


@pytest.mark.parametrize("status", [302, 400, 404, 500])
def test_a_webhook_that_does_not_take_it_is_an_error_and_redirects_go_nowhere(hook: str, status: int) -> None:
    Hook.status = status
    with pytest.raises(SluiceError, match=str(status)):
        Webhook({"url": hook}).deliver(message())
    assert len(Hook.seen) == 1


def test_the_proxy_of_the_environment_is_not_asked(hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    Webhook({"url": hook}).deliver(message())
    assert len(Hook.seen) == 1


# ---- secrets ----


def test_secrets_that_others_may_read_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("word\n")
    for mode in (0o640, 0o604, 0o660):
        file.chmod(mode)
        with pytest.raises(SluiceError, match="others than its owner"):
            read_secret(file)
    file.chmod(0o600)
    assert read_secret(file) == b"word"
    link = tmp_path / "link"
    link.symlink_to(file)
    with pytest.raises(SluiceError):
        read_secret(link)
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(SluiceError):
        read_secret(tmp_path / "fifo")
    file.write_text("")
    with pytest.raises(SluiceError, match="empty"):
        read_secret(file)
    with pytest.raises(SluiceError, match="none"):
        read_secret(tmp_path / "none")


# ---- programs ----


def script(folder: Path, text: str) -> Path:
    path = folder / "alert"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    folder.chmod(0o755)
    return path


@pytest.mark.parametrize("name", ["$(touch /tmp/sluice-pwned)", *HOSTILE])
def test_a_program_gets_json_and_a_small_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("LD_PRELOAD_TEST", "x")
    path = script(tmp_path, f"cat > {tmp_path}/stdin; env > {tmp_path}/env; echo $# > {tmp_path}/arguments")
    Program({"program": str(path)}).deliver(message(name))
    document = json.loads((tmp_path / "stdin").read_text())
    assert document["rule"] == "hot"
    assert all(one.isprintable() for one in document["subjects"][0]["name"])
    names = {line.partition("=")[0] for line in (tmp_path / "env").read_text().splitlines()}
    assert names <= {"PATH", "LANG", "PWD", "_", "SHLVL", "OLDPWD", "SLUICE_ALERT_ID", "SLUICE_ALERT_STATE",
                     "SLUICE_ALERT_RULE", "SLUICE_ALERT_SEVERITY"}  # fmt: skip
    assert (tmp_path / "arguments").read_text() == "0\n"
    assert not Path("/tmp/sluice-pwned").exists()


def test_a_program_that_fails_or_hangs_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SluiceError, match="exit status 3"):
        Program({"program": str(script(tmp_path, "exit 3"))}).deliver(message())
    path = script(tmp_path, f"sleep 60 & echo $! > {tmp_path}/child; sleep 60")
    begin = time.monotonic()
    with pytest.raises(SluiceError, match="did not end within"):
        Program({"program": str(path), "timeout": 1}).deliver(message())
    assert time.monotonic() - begin < 10
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 5
    while _runs(child):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_program_that_others_may_change_is_not_started(tmp_path: Path) -> None:
    path = script(tmp_path, f"touch {tmp_path}/ran")
    path.chmod(0o777)
    with pytest.raises(SluiceError, match="others can change it"):
        Program({"program": str(path)}).deliver(message())
    path.chmod(0o755)
    tmp_path.chmod(0o777)
    with pytest.raises(SluiceError, match="others can change it"):
        Program({"program": str(path)}).deliver(message())
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", HOSTILE)
def test_the_log_s_lines_are_lines(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        to_log(message(name, name))
    (record,) = caplog.records
    assert record.getMessage().isprintable()


def test_sinks_by_kind() -> None:
    found = make_sinks({"log": {"kind": "log"}, "mail": {"kind": "email"}, "x": {"kind": "exec", "program": "/x"}})
    assert list(found) == ["log", "mail", "x"]
    assert found["log"] is to_log
