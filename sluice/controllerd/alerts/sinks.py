"""Where messages go: the log, e-mail, a webhook, a program of the site. No shell, bounded times, secrets from files."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import signal
import smtplib
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from email.message import EmailMessage
from email.utils import formatdate
from http.client import HTTPException
from pathlib import Path
from typing import Any

from sluice.base.errors import SluiceError
from sluice.base.private import read_private
from sluice.base.text import one_line
from sluice.controllerd.alerts.message import Message
from sluice.controllerd.alerts.outbox import Deliver

TIMEOUT_S = 15.0
_MOST_SECRET = 4096
_THIS_HOST = ("localhost", "127.0.0.1", "::1")

log = logging.getLogger("sluice.alerts")


def make_sinks(settings: Mapping[str, Mapping[str, Any]]) -> dict[str, Deliver]:
    """The sinks of the policy by name."""
    made: dict[str, Deliver] = {}
    for name, one in settings.items():
        kind = one.get("kind")
        if kind == "email":
            made[name] = Email(one).deliver
        elif kind == "webhook":
            made[name] = Webhook(one).deliver
        elif kind == "exec":
            made[name] = Program(one).deliver
        else:
            made[name] = to_log
    return made


def to_log(message: Message) -> None:
    """The daemon's log, in one line."""
    said = "; ".join(f"{one.name}: {one.text}" for one in message.subjects)
    more = f" and {message.more} more" if message.more else ""
    log.warning("%s", one_line(f"ALERT {message.title}: {said}{more}", limit=2000))


def read_secret(path: Path) -> bytes:
    """A secret from a file that only root or this user may read. Raises SluiceError."""
    try:
        data = read_private(path, _MOST_SECRET + 1, follow_links=False).strip()
    except FileNotFoundError as error:
        raise SluiceError(f"{path}: {error.strerror}", remedy="make it SlurmUser's own file, mode 600") from error
    if not data or len(data) > _MOST_SECRET:
        raise SluiceError(f"{path}: empty, or larger than {_MOST_SECRET} bytes", remedy="write the secret to it")
    return data


class Email:
    """E-mail by SMTP."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings

    def deliver(self, message: Message) -> None:
        """Raises SluiceError, OSError."""
        self.send(list(self._settings["to"]), message.title, message.text(), message.id)

    def send(self, to: list[str], title: str, text: str, number: str) -> None:
        """One mail. Raises SluiceError, OSError."""
        mail = EmailMessage()
        mail["From"] = self._settings["sender"]
        mail["To"] = ", ".join(to)
        mail["Subject"] = one_line(title, limit=150)
        mail["Date"] = formatdate(localtime=True)
        mail["Message-ID"] = f"<{number}@sluice.alerts>"
        mail["Auto-Submitted"] = "auto-generated"
        mail.set_content(text)
        try:
            with self._connect() as server:
                if self._settings.get("password_file"):
                    server.login(
                        self._settings["user"], read_secret(Path(self._settings["password_file"])).decode("utf-8")
                    )
                refused = server.send_message(mail)
        except smtplib.SMTPException as error:
            raise SluiceError(f"mail server {self._settings['server']}: {one_line(str(error))}") from error
        for address, why in refused.items():
            log.error("mail to %s was refused: %s", one_line(address), one_line(str(why)))

    def _connect(self) -> smtplib.SMTP:
        host, port = _host_port(self._settings["server"], 25)
        tls = self._settings.get("tls") or ("none" if host in _THIS_HOST else "starttls")
        if tls == "tls":
            return smtplib.SMTP_SSL(host, port, timeout=TIMEOUT_S, context=_tls(self._settings))
        server = smtplib.SMTP(host, port, timeout=TIMEOUT_S)
        if tls == "starttls":
            try:
                server.starttls(context=_tls(self._settings))
            except BaseException:
                server.close()
                raise
        return server


def _tls(settings: Mapping[str, Any]) -> ssl.SSLContext:
    """Certificates to verify a server: the site's, else the system's. Raises SluiceError."""
    path = settings.get("ca_file") or None
    try:
        return ssl.create_default_context(cafile=path)
    except OSError as error:
        raise SluiceError(
            f"{path}: {error.strerror or error}", remedy="name a file of certificates in ca_file"
        ) from error


def _host_port(text: str, port: int) -> tuple[str, int]:
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        return host, int(rest.removeprefix(":") or port)
    host, _, rest = text.partition(":")
    return host, int(rest or port)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A signed message goes nowhere else."""

    def redirect_request(self, *arguments: Any, **more: Any) -> None:
        return None


class Webhook:
    """A JSON document by HTTP POST, signed.

    ``X-Sluice-Signature: sha256=HEX`` is the HMAC of the secret over the time in ``X-Sluice-Timestamp``, a dot and the
    body. ``X-Sluice-Id`` is the same for each attempt, so that a receiver can drop what it has had.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings

    def deliver(self, message: Message) -> None:
        """Raises SluiceError, OSError."""
        body = message.to_json().encode()
        moment = str(int(time.time()))
        headers = {
            "Content-Type": "application/json",
            "User-Agent": "sluice",
            "X-Sluice-Id": message.id,
            "X-Sluice-Timestamp": moment,
        }
        if self._settings.get("secret_file"):
            headers["X-Sluice-Signature"] = sign(read_secret(Path(self._settings["secret_file"])), moment, body)
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=_tls(self._settings)), _NoRedirect
        )
        request = urllib.request.Request(self._settings["url"], data=body, headers=headers, method="POST")  # noqa: S310
        try:
            with opener.open(request, timeout=TIMEOUT_S) as answer:
                answer.read(4096)
        except urllib.error.HTTPError as error:
            error.close()
            raise SluiceError(f"webhook: HTTP {error.code}") from error
        except urllib.error.URLError as error:
            raise SluiceError(f"webhook: {one_line(str(error.reason))}") from error
        except HTTPException as error:
            raise SluiceError(f"webhook: {one_line(repr(error))}") from error


def sign(secret: bytes, moment: str, body: bytes) -> str:
    """The value of X-Sluice-Signature."""
    return "sha256=" + hmac.new(secret, moment.encode() + b"." + body, hashlib.sha256).hexdigest()


class Program:
    """A program of the site. It gets the message as JSON, a small environment, and has to exit with status 0."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._path = Path(settings["program"])
        self._timeout = float(settings.get("timeout", 30))

    def deliver(self, message: Message) -> None:
        """Raises SluiceError, OSError."""
        self._check()
        environment = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "LANG": "C.UTF-8",
            "SLUICE_ALERT_ID": message.id,
            "SLUICE_ALERT_STATE": message.state,
            "SLUICE_ALERT_RULE": one_line(message.rule),
            "SLUICE_ALERT_SEVERITY": message.severity,
        }
        process = subprocess.Popen(
            [str(self._path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
            cwd="/",
            start_new_session=True,
        )
        try:
            process.communicate(message.to_json().encode(), timeout=self._timeout)
        except subprocess.TimeoutExpired as error:
            raise SluiceError(f"{self._path}: did not end within {self._timeout:g} s") from error
        finally:
            _end(process)
        if process.returncode != 0:
            raise SluiceError(f"{self._path}: exit status {process.returncode}")

    def _check(self) -> None:
        """Nobody but root and this user may change what is run. Raises SluiceError."""
        for path in (self._path, self._path.parent):
            facts = path.stat()
            if facts.st_uid not in (0, os.geteuid()) or facts.st_mode & 0o022:
                raise SluiceError(f"{path}: others can change it", remedy=f"chown root {path}; chmod go-w {path}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill all of its session, also what it left behind."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
