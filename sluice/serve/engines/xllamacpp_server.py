"""llama.cpp's server from the Python package xllamacpp, with options of llama-server: for nodes without that one.

`python -m sluice.serve.engines.xllamacpp_server --model FILE --host SOCKET`; on a GPU with the package's CUDA, ROCm or
Vulkan wheel. Checked with xllamacpp 2026.10.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import Any


def parse(arguments: list[str]) -> argparse.Namespace:
    """The options of llama-server that xllamacpp's parameters have by the same meaning."""
    parser = argparse.ArgumentParser(prog="xllamacpp_server", allow_abbrev=False)
    add = parser.add_argument
    add("-m", "--model", required=True)
    add("-mm", "--mmproj", default="", help="of a model that takes images: the file of its vision encoder")
    add("--no-mmproj", action="store_true")
    add("-a", "--alias", default="")
    add("--host", default="127.0.0.1", help="an address, or a socket's path that ends in .sock")
    add("--port", type=int, default=8080)
    add("--api-key", default="")
    add("--api-key-file", type=Path)
    add("-np", "--parallel", type=int, default=1)
    add("-c", "--ctx-size", type=int, default=0)
    add("-b", "--batch-size", type=int)
    add("-ub", "--ubatch-size", type=int)
    add("-t", "--threads", type=int)
    add("-ngl", "--n-gpu-layers", type=int, default=-1)
    add("--chat-template", default="")
    add("--cache-ram", type=int, default=0, help="MiB")
    add("--metrics", action="store_true")
    add("--no-slots", action="store_true")
    add("--no-webui", action="store_true")
    add("--no-warmup", action="store_true")
    add("--kv-unified", action="store_true")
    add("--embeddings", "--embedding", action="store_true")
    add("--pooling", choices=("none", "mean", "cls", "last", "rank"))
    add("-fit", "--fit", choices=("on", "off"), default="off")
    return parser.parse_args(arguments)


def parameters(options: argparse.Namespace) -> Any:
    """What xllamacpp's server takes."""
    import xllamacpp

    given = xllamacpp.CommonParams()
    given.model.path = options.model
    given.mmproj.path = "" if options.no_mmproj else options.mmproj
    given.model_alias = {options.alias} if options.alias else set()
    given.hostnames = [options.host]
    given.port = options.port
    keys = [options.api_key] if options.api_key else []
    if options.api_key_file is not None:
        keys += [line for line in options.api_key_file.read_text().splitlines() if line]
    given.api_keys = keys
    given.n_parallel = options.parallel
    given.n_ctx = options.ctx_size
    given.n_gpu_layers = options.n_gpu_layers
    given.cache_ram_mib = options.cache_ram
    given.endpoint_metrics = options.metrics
    given.endpoint_slots = not options.no_slots
    given.ui = False
    given.warmup = not options.no_warmup
    given.fit_params = options.fit == "on"
    given.kv_unified = options.kv_unified
    given.embedding = options.embeddings
    given.verbosity = 1  # errors; never prompts
    if options.batch_size:
        given.n_batch = options.batch_size
    if options.ubatch_size:
        given.n_ubatch = options.ubatch_size
    if options.threads:
        given.cpuparams.n_threads = options.threads
        given.cpuparams_batch.n_threads = options.threads
    if options.chat_template:
        given.chat_template = options.chat_template
    if options.pooling:
        name = f"LLAMA_POOLING_TYPE_{options.pooling.upper()}"
        given.pooling_type = getattr(xllamacpp.llama_pooling_type, name)
    return given


def main() -> int:
    """Serve until SIGTERM."""
    options = parse(sys.argv[1:])
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})  # also in the server's threads
    import xllamacpp

    server = xllamacpp.Server(parameters(options))
    print(f"listens on {server.listening_address}", file=sys.stderr, flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    return 0


if __name__ == "__main__":
    sys.exit(main())
