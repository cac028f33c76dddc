"""Chapter: a model as a service, on a small cluster of its own; its engine is llama.cpp with a model that counts.

That cluster also has the pool of the next chapter.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from dev_cluster.cluster import DevCluster
from dev_cluster.configuration import ADDRESSES
from dev_cluster.demo.elastic import FLEET, NODE, POOL, elastic
from dev_cluster.demo.stage import Stage
from dev_cluster.description import parse_description
from dev_cluster.layout import LOGIN
from sluice.base.errors import SluiceError
from sluice.base.run import PYTHON, run_command
from sluice.base.tokens import DEFAULT_FILE
from sluice.exchange.serving import JOB_PREFIX

_NEEDED = ("gguf", "httptools", "httpx", "uvloop", "xllamacpp")
_MAKE = """
import sys, pathlib
sys.path.insert(0, sys.argv[1])
from tests.serve_models import make_model
make_model(pathlib.Path(sys.argv[2]), "counting", layers=20, feed=8192)
"""
_WORDS = 1800
_PAUSE_S = 0.2
"""Longer than between two words, and shorter than another job takes to start."""
_CLUSTER: dict[str, Any] = {
    "nodes": [{"names": "n[1-2]", "platform": "none"}, {"names": NODE, "platform": "none", "pool": True}],
    "partitions": [{"name": "main", "nodes": "n[1-2]"}],
    "controllers": 1,
    "controllerd": True,
    "serve": True,
    "accounts": [{"name": "physics"}, {"name": "biology"}],
    "users": [{"name": "alice", "accounts": ["physics"]}, {"name": "bob", "accounts": ["biology"]}],
    "slurm_conf": "SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=1\n"
    "SlurmctldParameters=power_save_interval=1\n",
}


def _policy(model: Path) -> dict[str, Any]:
    service = {
        "tenant": "physics", "user": "alice", "engine": "llama.cpp", "model": str(model), "cpus": 1, "memory": "500M",
        "options": ["--ctx-size", "16384", "--threads", "1"], "callers": ["physics", "biology"],
        "replicas": {"least": 0, "most": 1, "slots": 4}, "idle": "5m", "walltime": "1h", "ready_within": "60s",
    }  # fmt: skip
    return {
        "version": 1,
        "tenants": {"physics": {"members": ["alice"]}, "biology": {"members": ["bob"]}},
        "services": {"counting": service},
        "pools": {"burst": POOL},
        "fleet": FLEET,
        "serving": {"tenants": {"biology": {"requests_per_minute": 3}}},
    }


def models(stage: Stage, folder: Path) -> None:
    """From no replica to words, a tenant over its limit, and a replica that dies in the middle of a sentence."""
    stage.step(
        "A model as a service",
        "Replicas are jobs of Slurm, and a gateway gives them one address with OpenAI's API. There is none at first: "
        "the request is held, not refused, until one is ready.",
    )
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        print(f"   Not shown: {', '.join(missing)} is not installed", flush=True)
        return
    with tempfile.TemporaryDirectory(prefix="sluice-demo-", dir="/var/tmp") as shared:  # /run is each host's own
        Path(shared).chmod(0o755)
        _play(stage, folder / "models", Path(shared) / "counting.gguf")


def _play(stage: Stage, folder: Path, model: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    run_command([*PYTHON, "-c", _MAKE, str(root), str(model)], timeout=60)
    sluice = {"sluice": {"level": "admit"}} if stage.plugins else {}
    described = parse_description(
        yaml.safe_dump({**_CLUSTER, **sluice, "policy": json.dumps(_policy(model), indent=1)}), source="demo"
    )
    cluster = DevCluster(folder)
    first, stage.cluster = stage.cluster, cluster
    try:
        cluster.up(described, attached=True, progress=lambda line: None)
        _show(stage, cluster)
        elastic(stage, cluster)
    finally:
        cluster.down()
        stage.cluster = first


def _show(stage: Stage, cluster: DevCluster) -> None:
    keys = {user: _key(cluster, user) for user in ("alice", "bob")}
    cluster.run(["chown", "root:sluice-gateway", str(DEFAULT_FILE)], node="ctl1", cwd="/")
    cluster.run(["chmod", "640", str(DEFAULT_FILE)], node="ctl1", cwd="/")
    port = cluster.run(["printenv", "SLUICE_GATEWAY_PORT"], node="ctl1", cwd="/").stdout.strip()
    url = f"http://{ADDRESSES['ctl1']}:{port}/v1"
    stage.run(["squeue", "--noheader"], shown="squeue --noheader")
    began = time.monotonic()
    words: list[str] = []
    for text in _stream(url, keys["alice"], "twenty", 8):
        if not words:
            print(f"   first word after {time.monotonic() - began:.1f} s:", end="")
        words.append(text)
        print(text, end="", flush=True)
    print()
    stage.expect("".join(words).split()[:2] == ["twenty-one", "twenty-two"], "the model counts on from twenty")
    shown = stage.run(["squeue", "--noheader", "--format=%i %u %a %T %j"])
    stage.expect(JOB_PREFIX in shown, "the replica is a job")

    stage.step("One tenant over its limit", "biology may ask three times a minute; physics does not notice.")
    answers = [_ask(url, keys["bob"]) for _ in range(5)]
    for status, words_ in answers:
        print(f"   bob: {status} {words_}", flush=True)
    stage.expect([status for status, _ in answers] == [200] * 3 + [429] * 2, "two of five requests were refused")
    other = _ask(url, keys["alice"])
    print(f"   alice: {other[0]} {other[1]}", flush=True)
    stage.expect(other[0] == 200, "the other tenant is served")

    stage.step(
        "A replica dies in the middle of a sentence",
        "SIGKILL of all of the job's processes. Another replica goes on where the words ended.",
    )
    _kill_in_the_middle(stage, cluster, url, keys["alice"])


def _kill_in_the_middle(stage: Stage, cluster: DevCluster, url: str, key: str) -> None:
    whole = "".join(_stream(url, key, "one-hundred", _WORDS))
    killed = _running(cluster)
    words, longest, last, killing = [], 0.0, 0.0, None
    for text in _stream(url, key, "one-hundred", _WORDS):
        now = time.monotonic()
        longest, last = max(longest, now - (last or now)), now
        words.append(text)
        if len(words) == 8:
            print(f"   {''.join(words).strip()}", flush=True)
            print(f"   root@{LOGIN}$ scancel --full --signal=KILL {' '.join(killed)}", flush=True)
            kill = ["scancel", "--full", "--signal=KILL", *killed]
            killing = threading.Thread(target=cluster.run, args=(kill,), kwargs={"check": False})
            killing.start()
    if killing is not None:
        killing.join()
    said = "".join(words)
    print(f"   ... {' '.join(said.split()[-8:])}", flush=True)
    now_runs = _running(cluster)
    stage.expect(said == whole and len(said.split()) == _WORDS, "the sentence is whole")
    stage.expect(longest > _PAUSE_S, f"it was interrupted: the longest pause was {longest:.2f} s")
    stage.expect(bool(now_runs) and not set(now_runs) & set(killed), "it went on in another job")
    print(
        f"   {_WORDS} words, the same as without the kill; the longest pause was {longest:.1f} s, and job "
        f"{' '.join(now_runs)} went on",
        flush=True,
    )


def _running(cluster: DevCluster) -> list[str]:
    return cluster.run(["squeue", "--noheader", "--states=RUNNING", "--format=%i"]).stdout.split()


def _key(cluster: DevCluster, user: str) -> str:
    words = [*PYTHON, "-m", "sluice.main", "token", "create", user, "--for", "1d", "--scope", "serve"]
    return cluster.run(words, node="ctl1", cwd="/").stdout.split()[-1]


def _body(text: str, most: int, *, stream: bool) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": "counting", "messages": messages, "max_tokens": most, "temperature": 0, "stream": stream}


def _ask(url: str, key: str) -> tuple[int, str]:
    import httpx

    answer = httpx.post(
        f"{url}/chat/completions", json=_body("twenty", 3, stream=False), timeout=60, trust_env=False,
        headers={"authorization": f"Bearer {key}"},
    )  # fmt: skip
    document = answer.json()
    if answer.is_success:
        return answer.status_code, str(document["choices"][0]["message"]["content"]).strip()
    return answer.status_code, f"{document['error']['message']} (Retry-After: {answer.headers.get('retry-after')})"


def _stream(url: str, key: str, text: str, most: int) -> Iterator[str]:
    """Its words. Raises SluiceError where it is not whole."""
    import httpx

    headers = {"authorization": f"Bearer {key}"}
    body = _body(text, most, stream=True)
    with httpx.stream(
        "POST", f"{url}/chat/completions", json=body, headers=headers, timeout=60, trust_env=False
    ) as one:
        for line in one.iter_lines():
            if line == "data: [DONE]":
                return
            if line.startswith("data: "):
                for choice in json.loads(line[6:]).get("choices", []):
                    if said := choice["delta"].get("content"):
                        yield said
    raise SluiceError("the stream was cut", remedy="see the log of the gateway")
