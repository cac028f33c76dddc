"""Identity tokens: which are believed, and whom they name."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from joserfc import jwt
from joserfc.jwk import ECKey, OctKey, RSAKey

from sluice.base import oidc
from sluice.base.errors import SluiceError, UsageError
from sluice.base.oidc import Provider, ProviderError, Settings, fetch, issuer_of, load_settings, verify_id_token

ISSUER = "https://id.example"
NOW = 1_800_000_000.0
SETTINGS = Settings(issuer=ISSUER, client_id="sluice", redirect_uri="https://sluice.example/login/oidc/callback")
RSA = RSAKey.generate_key(2048, {"kid": "a", "use": "sig"})
OTHER = RSAKey.generate_key(2048, {"kid": "a", "use": "sig"})
EC = ECKey.generate_key("P-256", {"kid": "e"})
CLAIMS = {
    "iss": ISSUER, "aud": "sluice", "sub": "1", "exp": NOW + 300, "iat": NOW, "nonce": "n",
    "preferred_username": "alice",
}  # fmt: skip


class World:
    """A provider without a network."""

    def __init__(self, *keys: Any) -> None:
        self.keys: list[dict[str, Any]] = [key.as_dict(private=False) for key in keys]
        self.asked: list[str] = []
        self.away = False
        self.document = {
            "issuer": ISSUER, "authorization_endpoint": f"{ISSUER}/auth", "token_endpoint": f"{ISSUER}/token",
            "jwks_uri": f"{ISSUER}/keys",
        }  # fmt: skip

    def fetch(self, url: str) -> tuple[int, dict[str, Any]]:
        self.asked.append(url)
        if self.away:
            raise ProviderError("refused")
        return 200, {"keys": self.keys} if url.endswith("/keys") else self.document


def token(key: Any = RSA, alg: str = "RS256", header: dict[str, Any] | None = None, **claims: Any) -> str:
    found = {name: value for name, value in {**CLAIMS, **claims}.items() if value is not None}
    return jwt.encode({"alg": alg, "kid": key.kid, **(header or {})}, found, key, algorithms=[alg])


def _settled(provider: Provider) -> None:
    with provider._lock:  # what a thread reads is there
        pass


def test_tokens_of_this_provider_for_this_client_are_believed() -> None:
    provider = Provider(SETTINGS, World(RSA, EC).fetch)
    found = verify_id_token(token(), provider, NOW)
    assert (found.user, found.expires, found.nonce) == ("alice", NOW + 300, "n")
    assert verify_id_token(token(EC, "ES256"), provider, NOW).user == "alice"
    assert verify_id_token(token(aud=["x", "sluice"], azp="sluice"), provider, NOW).user == "alice"
    assert verify_id_token(token(iat=NOW + 50), provider, NOW).user == "alice", "a clock that is ahead a little"
    assert issuer_of(token()) == ISSUER and issuer_of("a.b.c") is None


@pytest.mark.parametrize(
    ("why", "text"),
    [
        ("over", token(exp=NOW)),
        ("exp", token(exp=None)),
        ("exp", token(exp="9999999999")),
        ("exp", token(exp=float("inf"))),
        ("iat", token(iat=None)),
        ("future", token(iat=NOW + 3600)),
        ("future", token(nbf=NOW + 3600)),
        ("iss", token(iss="https://id.example/")),
        ("iss", token(iss=[ISSUER])),
        ("aud", token(aud="other")),
        ("aud", token(aud=["other"])),
        ("aud", token(aud={"sluice": 1})),
        ("azp", token(aud=["sluice", "other"])),
        ("azp", token(azp="other")),
        ("sub", token(sub=None)),
        ("not signed", token(OTHER)),
        ("not signed", token()[:-8] + "AAAAAAAA"),
        ("not signed", token(EC, "ES256", {"kid": "a"})),
        ("not signed", token(RSA, "RS256", {"kid": "e"})),
        ("not one of the provider's", token(header={"kid": "b"})),
        ("key", token(header={"kid": ""})),
        ("typ", token(header={"typ": "at+jwt"})),
        ("typ", token(header={"typ": "logout+jwt"})),
        ("alg", token(OctKey.import_key(json.dumps(RSA.as_dict(private=False)), {"kid": "a"}), "HS256")),
        ("alg", "eyJhbGciOiJub25lIn0." + token().split(".")[1] + "."),
        ("not one", "a.b"),
        ("not one", "a.b.c.d.e"),
        ("longer", "a" * 20_000),
        ("longer", "é.é.é"),
        ("user", token(preferred_username=None)),
        ("user", token(preferred_username=["alice"])),
        *[
            ("user", token(preferred_username=bad))
            for bad in ("root", "slurm", "Alice", "al@site.org", "0", "1000", "-x", "a b", "a\n", "../b", "", "x" * 33)
        ],
    ],
)  # fmt: skip
def test_others_are_refused(why: str, text: str) -> None:
    with pytest.raises(SluiceError, match=why):
        verify_id_token(text, Provider(SETTINGS, World(RSA, EC).fetch), NOW)


def test_a_domain_is_taken_off_only_where_it_is_the_settings() -> None:
    settings = SETTINGS.model_copy(update={"domain": "site.org", "user_claim": "email"})
    provider = Provider(settings, World(RSA).fetch)
    assert verify_id_token(token(email="alice@Site.org", email_verified=True), provider, NOW).user == "alice"
    for bad in ("alice", "alice@evil.org", "alice@site.org@evil.org", "alice@evil.org@site.org", "root@site.org"):
        with pytest.raises(SluiceError):
            verify_id_token(token(email=bad, email_verified=True), provider, NOW)
    for verified in (None, False, "true"):
        with pytest.raises(SluiceError, match="verified"):
            verify_id_token(token(email="alice@site.org", email_verified=verified), provider, NOW)


def test_keys_are_kept_and_read_again_seldom() -> None:
    world = World(RSA)
    provider = Provider(SETTINGS, world.fetch)
    verify_id_token(token(), provider, NOW)
    for n in range(20):
        with pytest.raises(SluiceError, match="key"):
            verify_id_token(token(header={"kid": f"x{n}"}), provider, NOW + 1)
    assert len(world.asked) == 2, "not once for each name that a caller invents"
    later = NOW + oidc._AGAIN_S
    world.keys = [RSA.as_dict(private=False), EC.as_dict(private=False)]
    assert provider.waits(token(EC, "ES256"), later) and not provider.waits(token(), later)
    assert verify_id_token(token(EC, "ES256"), provider, later).user == "alice", "a new key"
    world.keys = [EC.as_dict(private=False)]
    later += oidc._FRESH_S
    verify_id_token(token(exp=later + 9), provider, later)  # nobody waits while known keys are read again
    _settled(provider)
    with pytest.raises(SluiceError, match="key"):
        verify_id_token(token(exp=later + 9), provider, later)


def test_while_the_provider_is_away_known_keys_hold_for_a_day() -> None:
    world = World(RSA)
    world.away = True
    provider = Provider(SETTINGS, world.fetch)
    with pytest.raises(ProviderError):
        verify_id_token(token(), provider, NOW)
    with pytest.raises(ProviderError):
        provider.endpoints(NOW)
    world.away = False
    verify_id_token(token(), provider, NOW + oidc._AGAIN_S)
    world.away = True
    later = NOW + 20 * 3600
    assert verify_id_token(token(exp=later + 9), provider, later).user == "alice"
    _settled(provider)
    assert "refused" in provider.problem and not provider.waits(token(exp=later + 9), later)
    later = NOW + 25 * 3600
    with pytest.raises(ProviderError):
        verify_id_token(token(exp=later + 9), provider, later)


def test_what_the_provider_says_of_itself_is_checked() -> None:
    for name, value in (
        ("issuer", "https://evil.example"), ("token_endpoint", "http://id.example/t"), ("jwks_uri", None),
        ("authorization_endpoint", "javascript:alert(1)"), ("jwks_uri", "http://127.0.0.1/keys"),
        ("end_session_endpoint", "https://x@evil/"),
    ):  # fmt: skip
        world = World(RSA)
        world.document = {**world.document, name: value}
        with pytest.raises(ProviderError):
            verify_id_token(token(), Provider(SETTINGS, world.fetch), NOW)
    weak = RSAKey.generate_key(1024, {"kid": "a"})
    for keys in (
        [weak.as_dict(private=False)],
        [{**RSA.as_dict(private=False), "use": "enc"}],
        [7, {}, {"kty": "RSA"}],
    ):
        world = World()
        world.keys = keys  # type: ignore[assignment]
        with pytest.raises(SluiceError, match="not one of the provider's"):
            verify_id_token(token(), Provider(SETTINGS, world.fetch), NOW)


GOOD = {"issuer": ISSUER, "client_id": "sluice", "redirect_uri": "https://s.example/login/oidc/callback"}


def test_settings(tmp_path: Path) -> None:
    path = tmp_path / "oidc.json"
    assert load_settings(path) is None
    path.write_text(json.dumps(GOOD))
    assert load_settings(path) == Settings(**GOOD)
    for change in (
        {"issuer": "http://id.example"}, {"issuer": "https://u:p@id.example"}, {"redirect_uri": "https://s.example/x"},
        {"scopes": ["profile"]}, {"domain": "@site.org"}, {"client_secret": "x"}, {"client_id": ""},
        {"issuer": "https://id.example:x"}, {"redirect_uri": "https://s.example/login/oidc/callback?x=1"},
    ):  # fmt: skip
        path.write_text(json.dumps({**GOOD, **change}))
        with pytest.raises(UsageError, match=next(iter(change))):
            load_settings(path)
    for text in ("", "[", "[]", '{"issuer": 1, "issuer": 2}', "\xff", "[" * 60_000):
        path.write_bytes(text.encode("latin-1"))
        with pytest.raises(UsageError):
            load_settings(path)


Answer = Callable[[BaseHTTPRequestHandler], None]


def _asked(answer: Answer, form: dict[str, str] | None = None) -> tuple[int, dict[str, Any]]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self)

        do_POST = do_GET  # noqa: N815

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        return fetch(f"http://127.0.0.1:{server.server_port}/x", form)
    finally:
        server.shutdown()
        server.socket.close()
        thread.join()


def test_answers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oidc, "_ANSWER_S", 0.5)

    def head(request: BaseHTTPRequestHandler, status: int = 200, **headers: str) -> None:
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.end_headers()

    def good(request: BaseHTTPRequestHandler) -> None:
        sent = request.rfile.read(int(request.headers["content-length"]))
        head(request, 400)
        request.wfile.write(json.dumps({"sent": sent.decode()}).encode())

    def large(request: BaseHTTPRequestHandler) -> None:
        head(request)
        request.wfile.write(b'{"a":"' + b"x" * (1 << 20) + b'"}')

    def slow(request: BaseHTTPRequestHandler) -> None:
        head(request)
        for _ in range(100):
            try:
                request.wfile.write(b" ")
            except OSError:
                return
            time.sleep(0.1)

    def elsewhere(request: BaseHTTPRequestHandler) -> None:
        head(request, 302, location="http://127.0.0.1:1/")

    assert _asked(good, {"a": "b c"}) == (400, {"sent": "a=b+c"})
    for answer in (large, slow, elsewhere, lambda request: head(request)):
        began = time.monotonic()
        with pytest.raises(ProviderError):
            _asked(answer)
        assert time.monotonic() - began < 5
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        with pytest.raises(ProviderError, match="refused"):
            fetch(f"http://127.0.0.1:{closed.getsockname()[1]}/")
