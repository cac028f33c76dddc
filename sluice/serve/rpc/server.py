"""The server: both services, health and reflection, with what bounds their clients."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from sluice.base.errors import SluiceError
from sluice.base.service import notify
from sluice.serve.rpc.gateway import Gateway
from sluice.serve.rpc.inference import Inference
from sluice.serve.rpc.jobs import Jobs
from sluice.serve.rpc.table import INFERENCE, JOBS, MOST_MESSAGE, handlers

MOST_CALLS = 1000
"""At once; more are refused with RESOURCE_EXHAUSTED."""
_MOST_OF_A_CONNECTION = 256
_MOST_METADATA = 16 << 10
_GRACE_S = 20.0
_HEALTH_S = 2.0
_OPTIONS: Sequence[tuple[str, int]] = (
    ("grpc.max_receive_message_length", MOST_MESSAGE),
    ("grpc.max_send_message_length", MOST_MESSAGE),
    ("grpc.max_metadata_size", _MOST_METADATA),
    ("grpc.absolute_max_metadata_size", _MOST_METADATA),
    ("grpc.max_concurrent_streams", _MOST_OF_A_CONNECTION),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 3),
    ("grpc.max_connection_idle_ms", 600_000),
    ("grpc.so_reuseport", 0),
)


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where to listen, and whom to ask. `certificate` and `key`: files, both or none."""

    listen: str
    gateway: str
    api: str
    api_ca: str | None
    program: str
    certificate: Path | None = None
    key: Path | None = None


class Certificate:
    """The files of the certificate, read again when they were changed."""

    def __init__(self, certificate: Path, key: Path) -> None:
        self._paths = key, certificate
        self._stamp = self._stamp_now()
        self._read = self._read_now()

    def _stamp_now(self) -> list[tuple[int, int]]:
        return [(path.stat().st_mtime_ns, path.stat().st_ino) for path in self._paths]

    def _read_now(self) -> grpc.ServerCertificateConfiguration:
        key, certificate = (path.read_bytes() for path in self._paths)
        return grpc.ssl_server_certificate_configuration([(key, certificate)])

    def credentials(self) -> grpc.ServerCredentials:
        """What a server listens with. Handshakes after a change have the new one, if it can be read."""
        return grpc.dynamic_ssl_server_credentials(self._read, self._changed, require_client_authentication=False)

    def _changed(self) -> Any:
        try:
            stamp = self._stamp_now()
            if stamp == self._stamp:
                return None
            self._read, self._stamp = self._read_now(), stamp
        except OSError:
            return None
        return self._read


class Server:
    """Both services on one address."""

    def __init__(self, addresses: Addresses, gateway: Gateway | None = None, jobs: Jobs | None = None) -> None:
        self._addresses = addresses
        self._gateway = gateway or Gateway(addresses.gateway, MOST_CALLS)
        self._jobs = jobs or Jobs(addresses.api, addresses.api_ca, addresses.program)
        self._server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=MOST_CALLS)
        self._health = health.aio.HealthServicer()
        self._watch: asyncio.Task[None] | None = None
        self.port = 0

    async def start(self) -> None:
        """Listen. Raises SluiceError."""
        server, addresses = self._server, self._addresses
        server.add_generic_rpc_handlers((handlers(INFERENCE, Inference(self._gateway)), handlers(JOBS, self._jobs)))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (INFERENCE, JOBS, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        try:
            if addresses.certificate is not None and addresses.key is not None:
                credentials = Certificate(addresses.certificate, addresses.key).credentials()
                self.port = server.add_secure_port(addresses.listen, credentials)
            else:
                self.port = server.add_insecure_port(addresses.listen)
        except (OSError, RuntimeError) as error:
            remedy = "is the address free, and can the certificate and its key be read?"
            raise SluiceError(f"{addresses.listen}: {error}", remedy=remedy) from error
        if self.port == 0:
            raise SluiceError(
                f"{addresses.listen}: cannot listen", remedy="is the address free, is the certificate one?"
            )
        await server.start()
        await self._health.set(JOBS, health_pb2.HealthCheckResponse.SERVING)
        await self._look()
        self._watch = asyncio.create_task(self._keep_looking())

    async def _look(self) -> None:
        serves = health_pb2.HealthCheckResponse.SERVING
        state = serves if await self._gateway.healthy() else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", INFERENCE):
            await self._health.set(name, state)

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(_HEALTH_S)
            await self._look()

    async def stop(self, grace_s: float = _GRACE_S) -> None:
        """No new calls; those that there are have so long to end."""
        if self._watch is not None:
            self._watch.cancel()
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)
        await self._gateway.close()
        await self._jobs.close()


async def _run(addresses: Addresses) -> None:
    server = Server(addresses)
    await server.start()
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    notify("READY=1")
    await ended.wait()
    notify("STOPPING=1")
    await server.stop()


def serve(addresses: Addresses) -> None:
    """Until SIGTERM. Raises SluiceError."""
    asyncio.run(_run(addresses))
