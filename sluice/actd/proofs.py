"""Who a caller is: each kind of proof is verified here, with keys that the web process does not have."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from sluice.base.errors import SluiceError
from sluice.base.oidc import Provider, ProviderError, load_settings, verify_id_token
from sluice.base.tokens import ScopeError, TokenStore
from sluice.exchange.acts import ActError, Proof
from sluice.slurm import jwt

MOST_PROOF = 16 << 10
_AT_PROVIDER = 2  # requests that may wait for it

Checker = Callable[[str, str, float], str]
"""The user whose text it is, if it holds now for a scope. Raises SluiceError."""


class Proofs:
    """The kinds of proofs that are known here."""

    def __init__(self, tokens: Path, config: Callable[[], Mapping[str, str]], oidc: Path | None = None) -> None:
        self._store = TokenStore(tokens)
        self._config = config
        self.checkers: dict[str, Checker] = {"sluice": self._of_sluice, "slurm": self._of_slurm}
        settings = None
        if oidc is not None:
            refuse_forgeable(oidc)
            settings = load_settings(oidc)
        if settings is not None:
            self._provider = Provider(settings)
            self._at_provider = threading.Semaphore(_AT_PROVIDER)
            self.checkers["oidc"] = self._of_oidc

    def user(self, proof: Proof, scope: str, now: float) -> str:
        """Whose proof it is. Raises ActError 401, 403, 503."""
        checker = self.checkers.get(proof.kind)
        if checker is None:
            raise ActError(401, f"proof of kind {proof.kind!r}: not set up here", remedy="log in in another way")
        if len(proof.text) > MOST_PROOF or not proof.text.isascii():
            raise ActError(401, "token: not one", remedy="send a token of Sluice or Slurm")
        try:
            return checker(proof.text, scope, now)
        except ActError:
            raise
        except ScopeError as error:
            raise ActError(403, error.what, remedy="sluice token create --scope read --scope write") from error
        except ProviderError as error:
            raise ActError(503, error.what, remedy=error.remedy, retry_after=10) from error
        except SluiceError as error:
            raise ActError(401, error.what, remedy=error.remedy) from error

    def _of_sluice(self, text: str, scope: str, now: float) -> str:
        refuse_forgeable(self._store.path)
        return self._store.check(text, scope, now).user

    def _of_slurm(self, text: str, scope: str, now: float) -> str:
        del scope  # a token of Slurm may do all
        path = jwt.key_file(self._config())
        try:
            key = path.read_bytes()
        except OSError as error:
            raise ActError(503, "Slurm's key for tokens cannot be read", remedy="see the log of sluice-actd") from error
        return jwt.verify(text, key, now).user

    def _of_oidc(self, text: str, scope: str, now: float) -> str:
        del scope
        waits = self._provider.waits(text, now)
        if waits and not self._at_provider.acquire(blocking=False):
            raise ActError(503, "the keys of the provider are being read", remedy="try again", retry_after=5)
        try:
            return verify_id_token(text, self._provider, now).user
        finally:
            if waits:
                self._at_provider.release()


def refuse_forgeable(path: Path) -> None:
    """Raise ActError 503 for a file that others than root could have written."""
    try:
        facts = path.stat()
    except OSError:
        return  # there is none, and so no token
    if facts.st_uid not in (0, os.geteuid()) or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ActError(503, f"{path}: others than root may write it", remedy=f"chown root {path}; chmod go-w {path}")
