"""What the gateway is compared with: `python -m benchmarks.serve_peers FOLDER` installs them.

Each has a virtual environment there; nginx is Debian's (`apt-get install nginx-light`). All have one worker for an
engine on this host, without TLS and without access logs; LiteLLM checks one key, the others check nothing, and none
counts or limits anything. `limited_litellm` has a key with limits and several workers, which share them in Redis as its
documentation says (Debian's, `apt-get install redis-server`).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click

from benchmarks.serve_site import MODEL, START_S, free_port, stop, wait_port
from sluice.base.errors import SluiceError
from sluice.base.run import run_command

PACKAGES: Mapping[str, tuple[str, str]] = {
    "litellm": ("litellm[proxy]", "litellm"),
    "vllm_router": ("vllm-router", "vllm-router"),
    "sglang_router": ("sglang-router", "sglang_router"),
}
"""Name -> what pip installs, and whose version is shown."""
NAMES = ("nginx", *PACKAGES)
_ALIVE = "/health/liveliness"
_LITELLM_START_S = 300.0  # each worker imports 10 s of CPU
_NGINX = """
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log {folder}/nginx.error;
events {{ worker_connections 2048; }}
http {{
  access_log off;
  client_body_temp_path {folder}/b;
  proxy_temp_path {folder}/p;
  fastcgi_temp_path {folder}/f;
  uwsgi_temp_path {folder}/u;
  scgi_temp_path {folder}/s;
  upstream engine {{ server 127.0.0.1:{engine}; keepalive 256; keepalive_requests 1000000000; }}
  server {{
    listen 127.0.0.1:{port};
    keepalive_requests 1000000000;
    location / {{
      proxy_pass http://engine;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
    }}
  }}
}}
"""
_LITELLM = """
model_list:
- model_name: {model}
  litellm_params: {{model: openai/{model}, api_base: "http://127.0.0.1:{engine}/v1", api_key: none}}
general_settings: {{master_key: {key}}}
litellm_settings: {{telemetry: false}}
"""

_LITELLM_LIMITED = """
model_list:
- model_name: {model}
  litellm_params: {{model: openai/{model}, api_base: "http://127.0.0.1:{engine}/v1", api_key: none}}
general_settings: {{custom_auth: limited.check}}
litellm_settings:
  telemetry: false
  cache: true
  cache_params: {{type: redis, host: 127.0.0.1, port: {redis}, supported_call_types: []}}
"""
_LITELLM_KEY = """
from litellm.proxy._types import UserAPIKeyAuth


async def check(request, api_key):
    return UserAPIKeyAuth(api_key=api_key, **{limits})
"""

# So that engines that come back get requests at once: the usual values are a minute.
_QUICK = (
    "--health-check-interval-secs", "1", "--health-success-threshold", "1", "--cb-timeout-duration-secs", "1",
    "--cb-success-threshold", "1",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Peer:
    """One that runs."""

    port: int
    pid: int


def version(name: str, peers: Path | None) -> str | None:
    """Of one that is installed; None: it is not."""
    if name == "nginx":
        found = shutil.which("nginx") or shutil.which("/usr/sbin/nginx")
        return found and run_command([found, "-v"]).stderr.rpartition("/")[2].strip()
    python = None if peers is None else peers / name / "bin/python"
    if python is None or not python.exists():
        return None
    code = f"from importlib.metadata import version; print(version({PACKAGES[name][1].replace('_', '-')!r}))"
    return run_command([str(python), "-c", code]).stdout.strip()


def _words(name: str, peers: Path | None, folder: Path, port: int, engines: Sequence[int], key: str) -> list[str]:
    if name == "nginx":
        file = folder / "nginx.conf"
        file.write_text(_NGINX.format(folder=folder, port=port, engine=engines[0]))
        return [shutil.which("nginx") or "/usr/sbin/nginx", "-c", str(file)]
    assert peers is not None
    at, addresses = peers / name / "bin", [f"http://127.0.0.1:{engine}" for engine in engines]
    place = ["--host", "127.0.0.1", "--port", str(port)]
    if name == "litellm":
        file = folder / "litellm.yaml"
        file.write_text(_LITELLM.format(model=MODEL, engine=engines[0], key=key))
        return [str(at / "litellm"), "--config", str(file), *place, "--num_workers", "1"]
    words = ["--worker-urls", *addresses, "--policy", "round_robin", "--prometheus-port", str(free_port())]
    program = (
        [str(at / "vllm-router")]
        if name == "vllm_router"
        else [str(at / "python"), "-m", "sglang_router.launch_router"]
    )
    level = "warning" if name == "vllm_router" else "warn"
    return [*program, *place, *words, *_QUICK, "--log-level", level]


@contextmanager
def peer(name: str, peers: Path | None, folder: Path, engines: Sequence[int], key: str) -> Iterator[Peer]:
    """Start one before engines at ports; nginx and LiteLLM take the first. Raises SluiceError."""
    port = free_port()
    own = folder / name
    own.mkdir(exist_ok=True)
    words = _words(name, peers, own, port, engines, key)
    with _running(name, words, own, port, _ALIVE if name == "litellm" else "/v1/models") as found:
        yield found


def redis() -> str | None:
    """The program; None: it is not installed."""
    return shutil.which("redis-server")


@contextmanager
def limited_litellm(peers: Path, folder: Path, engine: int, workers: int, **limits: int) -> Iterator[Peer]:
    """LiteLLM with so many workers that hold a key to limits: rpm_limit, tpm_limit, max_parallel_requests. Raises
    SluiceError."""
    own = folder / f"limited-{'-'.join(limits)}"
    own.mkdir()
    port, store = free_port(), free_port()
    (own / "limited.py").write_text(_LITELLM_KEY.format(limits=limits))
    (own / "litellm.yaml").write_text(_LITELLM_LIMITED.format(model=MODEL, engine=engine, redis=store))
    program = redis()
    assert program is not None
    memory = [program, "--port", str(store), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    words = [str(peers / "litellm/bin/litellm"), "--config", str(own / "litellm.yaml"), "--host", "127.0.0.1"]
    words += ["--port", str(port), "--num_workers", str(workers)]
    words += ["--timeout_worker_healthcheck", "600"]  # after 5 s uvicorn kills workers that still import
    with _running("redis", memory, own, store), _running("litellm", words, own, port, _ALIVE) as found:
        yield found


@contextmanager
def _running(name: str, words: Sequence[str], own: Path, port: int, path: str = "") -> Iterator[Peer]:
    log = (own / f"{name}.log").open("wb")
    environment = {"PATH": "/usr/bin:/bin:/usr/sbin", "HOME": str(own), "LITELLM_LOG": "ERROR"}
    environment |= {  # nobody else gets to it; what models cost is not asked of GitHub
        "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true", "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }  # fmt: skip
    process = subprocess.Popen(words, cwd=own, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_port(port, process, name, path, seconds=_LITELLM_START_S if name == "litellm" else START_S)
        yield Peer(port, process.pid)
    except SluiceError:
        print((own / f"{name}.log").read_text(errors="replace")[-3000:], file=sys.stderr)
        raise
    finally:
        stop(process)
        log.close()


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
def main(folder: Path) -> None:
    """Install all that are on PyPI into FOLDER."""
    folder.mkdir(parents=True, exist_ok=True)
    tools = folder / "tools"
    run_command([sys.executable, "-m", "venv", str(tools)], timeout=300)
    run_command([str(tools / "bin/pip"), "install", "-q", "uv"], timeout=300)
    for name, (package, _) in PACKAGES.items():
        uv = str(tools / "bin/uv")
        run_command([uv, "venv", "-q", "--clear", str(folder / name)], timeout=300)
        install = [uv, "pip", "install", "-q", "--compile-bytecode", "-p", str(folder / name / "bin/python"), package]
        run_command(install, timeout=1800)
        click.echo(f"{name} {version(name, folder)}")


if __name__ == "__main__":
    main()
