"""slurmdbd's way to the controllers, run on its host as ``relay.py LISTEN_ADDRESS PORT CONTROLLER_ADDRESS ...``.

slurmdbd sends changes of associations and QOS to the address that slurmctld's connection came from. On the loopback
network that is 127.0.0.1 for every controller, where none of them listens. Standard library only: it runs inside.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys

CONNECT_TIMEOUT_S = 2


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    with contextlib.suppress(OSError, RuntimeError):
        writer.write_eof()


async def _serve(listen: str, port: int, controllers: list[str]) -> None:
    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for controller in controllers:
            try:
                connecting = asyncio.open_connection(controller, port)
                back, forth = await asyncio.wait_for(connecting, CONNECT_TIMEOUT_S)
            except (OSError, TimeoutError):
                continue
            await asyncio.gather(_copy(reader, forth), _copy(back, writer))
            forth.close()
            break
        writer.close()

    async with await asyncio.start_server(relay, listen, port) as server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
