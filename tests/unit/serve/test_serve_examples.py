"""examples/serve: the policy is valid, the client works with the openai package, the function is served."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from policy.document import parse
from policy.service_jobs import compile_services, replica_job
from sluice.serve.engines.base import Place
from sluice.serve.engines.known import engine_of
from tests.serve_engine import engine
from tests.serve_models import counted
from tests.unit.serve.replica_bed import LAUNCH, ROOT
from tests.unit.serve.test_model_server import Server

EXAMPLES = ROOT / "examples/serve"


def test_the_policy_makes_the_jobs_that_it_says() -> None:
    services = compile_services(parse((EXAMPLES / "sluice.yaml").read_text()))
    job = replica_job(
        services, "deepseek-7b", LAUNCH, registry_uid=990, program=Path("/usr/bin/sluice-replica"),
        registries=("ctl1:6824",),
    )  # fmt: skip
    assert job.user == "nlp-serve" and "--account=nlp" in job.arguments and "--gres=gpu:1" in job.arguments
    start = engine_of("vllm").start(job.spec, Place(Path("/run/r"), 1, "k", Path("/scratch/staged"), gpus=1))
    words = " ".join(start.arguments)
    assert words.startswith("vllm serve /scratch/staged --uds /run/r/engine.sock --served-model-name deepseek-7b")
    assert words.endswith("--max-model-len 4096 --gpu-memory-utilization 0.9") and "--max-num-seqs 64" in words
    job = replica_job(
        services, "sentences", LAUNCH, registry_uid=990, program=Path("/x"), registries=("ctl1:6824",)
    )  # fmt: skip
    start = engine_of("python").start(job.spec, Place(Path("/run/r"), 1, "k", Path("/scratch/staged")))
    assert start.arguments == ("/opt/embed/bin/python", "/opt/embed/embed.py")
    assert start.environment["SLUICE_MODEL"] == "/scratch/staged"


def test_the_client_prints_a_stream(tmp_path: Path, models: dict[str, Path]) -> None:
    pytest.importorskip("openai", reason="needs the package openai (pip install -e '.[dev]')")
    port = free_port()
    with engine(models["counting"], port, name="deepseek-7b", key="sluice_key"):
        done = subprocess.run(
            [sys.executable, EXAMPLES / "chat.py", "deepseek-7b", "six"],
            env={**os.environ, "OPENAI_BASE_URL": f"http://127.0.0.1:{port}/v1", "OPENAI_API_KEY": "sluice_key"},
            capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
    assert done.stdout == f"{counted(6, 400)}\n[6 + 400 tokens]\n"


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_the_function_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for sentence_transformers, which has torch below it."""
    (tmp_path / "sentence_transformers.py").write_text(
        "class SentenceTransformer:\n"
        "    def __init__(self, path): self.path = path\n"
        "    def tokenizer(self, text): return {'input_ids': text.split()}\n"
        "    def encode(self, texts, normalize_embeddings): return [[len(text), len(self.path)] for text in texts]\n"
    )
    monkeypatch.setenv("SLUICE_MODEL", "/models/x")
    server = Server(tmp_path, (EXAMPLES / "embed.py").read_text())
    try:
        status, answer = server.ask("/v1/embeddings", {"input": ["two words", "one"]})
    finally:
        server.process.kill()
    assert status == 200 and [one["embedding"] for one in answer["data"]] == [[9.0, 9.0], [3.0, 9.0]]
    assert answer["usage"]["prompt_tokens"] == 3
