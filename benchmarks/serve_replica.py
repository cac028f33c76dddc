"""A replica with a real engine and no job: `python -m benchmarks.serve_replica MODEL SLOTS [OPTION...]`.

llama.cpp's server behind the replica's own relay. Prints a line of JSON when it is ready; runs until it is killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
import tempfile
from pathlib import Path

from sluice.exchange.serving import ReplicaSpec
from sluice.serve.engines.base import Place
from sluice.serve.engines.known import engine_of
from sluice.serve.replica.asking import get
from sluice.serve.replica.certificate import make_context
from sluice.serve.replica.engine_process import EngineProcess
from sluice.serve.replica.relay import Relay


async def main(model: Path, slots: int, options: tuple[str, ...]) -> None:
    """Run it."""
    with tempfile.TemporaryDirectory() as name:
        folder, secret = Path(name), secrets.token_hex(32)
        spec = ReplicaSpec(
            "m", "0" * 16, "llama.cpp", str(model), None, None, options, (), slots, (), 0, 60.0, 10.0, "/health", 0, 1
        )
        engine = engine_of("llama.cpp")
        process = EngineProcess(engine.start(spec, Place(folder, 0, secret, model)), folder)
        context, fingerprint = make_context("replica")
        relay = Relay(context, secret, process.address)
        while (answer := await get(process.address, "/health", secret, 5.0)) is None or answer[0] != 200:
            if (why := process.ended()) is not None:
                sys.exit(why)
            await asyncio.sleep(0.05)
        relay.open = True
        words = {"port": relay.listen("127.0.0.1"), "secret": secret, "fingerprint": fingerprint, "engine": process.pid}
        print(json.dumps(words), flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), tuple(sys.argv[3:])))
