"""A helper whose Slurm is a folder of small programs, and which acts as who runs the tests."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import pwd
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sluice.actd import server
from sluice.actd.become import Account
from sluice.actd.server import Actd, Settings
from sluice.base.tokens import TokenStore
from sluice.exchange.acts import ActError, Proof, ProofKind, Request, parse_answer, render_request

KEY = b"k" * 32
_SBATCH = """
echo "$@" >>SEEN/calls; cat >SEEN/script; env >SEEN/environment; id -u >SEEN/uid
for word in "$@"; do case $word in --export-file=*) cat /dev/fd/${word#*=} >SEEN/exported;; esac; done
[ -e SEEN/refuse ] && { cat SEEN/refuse >&2; exit 1; }
[ -e SEEN/slow ] && sleep 30
number=$(cat SEEN/next 2>/dev/null || echo 100); echo $((number + 1)) >SEEN/next
cp SEEN/script SEEN/job-$number; echo "$number $(date +%s)" >>SEEN/jobs; echo $number
"""
_SQUEUE = "cat SEEN/jobs 2>/dev/null; true"
_SCONTROL = 'if [ "$1" = write ]; then cat SEEN/job-$3; else echo "scontrol $@" >>SEEN/calls; fi'
_SCANCEL = 'echo "scancel $@" >>SEEN/calls'


class World:
    """The helper, and what its programs saw."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.slurm = folder / "slurm"
        (self.slurm / "bin").mkdir(parents=True)
        self.seen = folder / "seen"
        self.seen.mkdir()
        for name, text in {"sbatch": _SBATCH, "squeue": _SQUEUE, "scontrol": _SCONTROL, "scancel": _SCANCEL}.items():
            program = self.slurm / "bin" / name
            program.write_text("#!/bin/sh\n" + text.replace("SEEN", str(self.seen)))
            program.chmod(0o755)
        self.tokens = TokenStore(folder / "tokens.json")
        self.users: dict[str, int] = {"alice": 0, "oper": 1, "root2": 2}
        self.config = {
            "SlurmUser": "slurm(64030)", "StateSaveLocation": str(folder / "state"), "AuthAltTypes": "auth/jwt",
            "AuthAltParameters": f"jwt_key={folder}/key",
        }  # fmt: skip
        (folder / "key").write_bytes(KEY)
        monkeypatch.setattr(server, "account", self._account)
        self.monkeypatch = monkeypatch
        self.actd = self.begin()

    def begin(self) -> Actd:
        """A helper that has just started."""
        settings = Settings(
            self.folder / "socket", "nobody", self.folder / "tokens.json", self.folder / "oidc.json",
            self.folder / "lib", self.folder / "sluice.yaml", None, self.slurm,
        )  # fmt: skip
        self.actd = Actd(settings)
        self.monkeypatch.setattr(self.actd._client, "config", lambda: self.config)
        levels = self._levels
        self.monkeypatch.setattr(self.actd._accounting, "level", levels)
        return self.actd

    def _levels(self, user: str) -> tuple[int, frozenset[str]]:
        return self.users.get(user, 0), frozenset()

    def _account(self, name: str, least: int, never: object = ()) -> Account:
        if name not in self.users:
            raise ActError(403, f"user {name!r}: not known on this host")
        me = pwd.getpwuid(os.getuid())
        return Account(name, me.pw_uid, me.pw_gid, (me.pw_gid,), str(self.folder), "/bin/sh")

    def proof(self, user: str, *scopes: str) -> Proof:
        made = self.tokens.create(user, scopes or ("read", "write"), now=time.time(), seconds=60)
        return Proof("sluice", made[1])

    def ask(
        self, do: str, user: str = "alice", /, *, proof: Proof | None = None, key: str | None = None, **words: Any
    ) -> dict[str, Any]:
        """What was done. Raises ActError."""
        request = Request(do, proof or self.proof(user), words, "id", key, "10.0.0.1")
        return parse_answer(self.actd.answer(render_request(request)))

    def refusal(self, do: str, user: str = "alice", /, **words: Any) -> ActError:
        with pytest.raises(ActError) as caught:
            self.ask(do, user, **words)
        return caught.value

    def calls(self) -> list[str]:
        path = self.seen / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def read(self, name: str) -> str:
        return (self.seen / name).read_text()

    def audited(self) -> list[dict[str, Any]]:
        return [entry.document() for entry in self.actd.audit.entries()]


def jwt(claims: Mapping[str, Any], key: bytes = KEY, **head: str) -> str:
    """A token of Slurm."""

    def part(one: object) -> str:
        return base64.urlsafe_b64encode(json.dumps(one).encode()).rstrip(b"=").decode()

    text = f"{part({'alg': 'HS256', 'typ': 'JWT', **head})}.{part(claims)}"
    signed = base64.urlsafe_b64encode(hmac.new(key, text.encode(), hashlib.sha256).digest()).rstrip(b"=").decode()
    return f"{text}.{signed}"


def of_kind(proof: Proof, kind: ProofKind) -> Proof:
    """The same text, as of another kind."""
    return replace(proof, kind=kind)
