"""Receivers of alerts: a mail server with STARTTLS and a password, and a receiver of webhooks that fails at times."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import socket
import ssl
import subprocess
import threading
import time
from collections import Counter
from email import message_from_bytes, policy
from email.message import EmailMessage
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from aiosmtpd.smtp import SMTP, AuthResult, LoginPassword

USER, PASSWORD, SECRET = "sluice", "a password", "a secret"


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that only itself vouches for; and its key."""
    certificate, key = folder / "mail.pem", folder / "mail.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate],
        check=True, capture_output=True, timeout=30,
    )  # fmt: skip
    return certificate, key


class MailServer:
    """Takes mail only over TLS and from who knows the password; another's software: no mistake is made twice."""

    def __init__(self, certificate: Path, key: Path) -> None:
        self.mails: list[EmailMessage] = []
        self.encrypted: list[bool] = []
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._context.load_cert_chain(certificate, key)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def _session(self) -> SMTP:
        return SMTP(
            self,
            tls_context=self._context,
            require_starttls=True,
            auth_required=True,
            auth_require_tls=True,
            authenticator=self._login,
            loop=self._loop,
        )

    @staticmethod
    def _login(server: Any, session: Any, envelope: Any, mechanism: str, given: Any) -> AuthResult:
        known = isinstance(given, LoginPassword) and (given.login, given.password) == (USER.encode(), PASSWORD.encode())
        return AuthResult(success=known, handled=False)

    async def handle_DATA(self, server: Any, session: Any, envelope: Any) -> str:
        self.encrypted.append(session.ssl is not None)
        mail = message_from_bytes(envelope.content, policy=policy.default)
        assert isinstance(mail, EmailMessage)
        if mail["Message-ID"] not in {one["Message-ID"] for one in self.mails}:  # at least once is what is promised
            self.mails.append(mail)
        return "250 OK"

    def start(self) -> str:
        """Listen; HOST:PORT."""
        listening = socket.create_server(("127.0.0.1", 0))
        self._loop.run_until_complete(self._loop.create_server(self._session, sock=listening))
        self._thread.start()
        return f"127.0.0.1:{listening.getsockname()[1]}"

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def about(self, rule: str) -> list[str]:
        """The states of a rule that it received, in order."""
        words = [str(mail["Subject"]).split() for mail in self.mails]
        return [one[1] for one in words if one[3] == f"{rule}:"]


class Hook:
    """Webhooks. `fails`: so many are answered 503; `mute`: so many are taken, and the answer gets lost."""

    def __init__(self) -> None:
        self.fails = self.mute = 0
        self.refused = 0
        self.messages: list[dict[str, Any]] = []  # each once
        self.deliveries: Counter[str] = Counter()
        self.unsigned: list[str] = []
        self._lock = threading.Lock()
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                hook._take(self)

            def log_message(self, *words: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/hooks/gpu"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def behave(self, *, fails: int = 0, mute: int = 0) -> None:
        """From the next message on."""
        with self._lock:
            self.fails, self.mute = fails, mute

    def _take(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers["Content-Length"]))
        moment, number = request.headers["X-Sluice-Timestamp"], request.headers["X-Sluice-Id"]
        wanted = hmac.new(SECRET.encode(), f"{moment}.".encode() + body, hashlib.sha256).hexdigest()
        with self._lock:
            if self.fails:
                self.fails -= 1
                self.refused += 1
                request.send_error(503)
                return
            if request.headers["X-Sluice-Signature"] != f"sha256={wanted}" or abs(time.time() - int(moment)) > 60:
                self.unsigned.append(number)
            self.deliveries[number] += 1
            if self.deliveries[number] == 1:
                self.messages.append(json.loads(body))
            if self.mute:
                self.mute -= 1
                request.close_connection = True
                return
        request.send_response(204)
        request.end_headers()

    def about(self, rule: str) -> list[str]:
        """The states of a rule that it received, each message once, in order."""
        with self._lock:
            return [one["state"] for one in self.messages if one["rule"] == rule]

    def subjects(self, rule: str) -> list[str]:
        """Whom the first message about a rule names."""
        with self._lock:
            return [one["name"] for one in next(m for m in self.messages if m["rule"] == rule)["subjects"]]

    def resolved(self, rule: str) -> list[str]:
        """Whom messages named when they were well again, sorted."""
        with self._lock:
            over = [one for one in self.messages if one["rule"] == rule and one["state"] == "resolved"]
            return sorted(subject["name"] for one in over for subject in one["subjects"])
