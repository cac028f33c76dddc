"""The server: uvicorn with what bounds its clients."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import uvicorn

from sluice.base.networks import Network
from sluice.base.oidc import Provider, Settings
from sluice.base.rates import FewLines
from sluice.base.service import notify
from sluice.base.tokens import TokenStore
from sluice.web.app import make_app
from sluice.web.endpoint import Site
from sluice.web.feed import Feed
from sluice.web.limits import BoundedProtocol
from sluice.web.login import Login, Proxy
from sluice.web.store import Store

_MOST_CONNECTIONS = 4000
_KEEP_S = 30
_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""For TLS 1.2, without those of uvicorn, which are the oldest ones; 1.3 has its own."""


class _Server(uvicorn.Server):
    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        await super().startup(sockets)  # type: ignore[arg-type]
        notify("READY=1")


def make_site(snapshot: Path, tokens: Path, proxy: Proxy, settings: Settings | None = None) -> Site:
    """What the endpoints use. `settings`: of the identity provider. Raises ModuleNotFoundError."""
    store = Store()
    feed = Feed(snapshot, store)
    if settings is not None:
        import_module("joserfc")
    provider = None if settings is None else Provider(settings)
    return Site(store, feed, Login(store, TokenStore(tokens), feed, proxy, provider))


def serve(
    address: str,
    port: int,
    snapshot: Path,
    tokens: Path,
    peers: Sequence[Network],
    header: str,
    certificate: Path | None,
    key: Path | None,
    settings: Settings | None,
) -> None:
    """Until SIGTERM."""
    proxy = Proxy(peers, header)

    class Protocol(BoundedProtocol):
        trusted = staticmethod(proxy.is_peer)

    logging.getLogger("uvicorn.error").addFilter(FewLines())
    config = uvicorn.Config(
        make_app(make_site(snapshot, tokens, proxy, settings)),
        host=address,
        port=port,
        loop="uvloop",
        http=Protocol,
        ws="none",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=_MOST_CONNECTIONS,
        timeout_keep_alive=_KEEP_S,
        timeout_graceful_shutdown=3,
        ssl_ciphers=_CIPHERS,
        ssl_certfile=certificate,
        ssl_keyfile=None if key is None else str(key),
    )
    _Server(config).run()
