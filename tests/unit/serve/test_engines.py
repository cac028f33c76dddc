"""Adapters of engines: command lines, what they listen on, figures, abilities."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from policy.services import HEALTH, TAKEN
from sluice.base.errors import UsageError
from sluice.exchange.serving import ENGINES, Abilities, Load
from sluice.serve.engines import xllamacpp_server
from sluice.serve.engines.base import Group, Place, has_option, option_value, samples
from sluice.serve.engines.known import engine_of
from sluice.serve.gateway import bounds
from sluice.serve.replica.engine_process import Masker
from tests.unit.serve.replica_bed import spec_of

KEY = "k" * 64
PLACE = Place(Path("/run/replica"), 4321, KEY, Path("/stage/model"), gpus=2)


def start_of(engine: str, place: Place = PLACE, **changes: object):  # type: ignore[no-untyped-def]
    spec = spec_of("/models/model", **{"engine": engine, "options": (), **changes})  # type: ignore[arg-type]
    return engine_of(engine).start(spec, place)


def test_every_engine_of_the_policy_has_an_adapter() -> None:
    assert set(HEALTH) == set(ENGINES)
    for name in ENGINES:
        assert engine_of(name).start and engine_of(name).end_s > 0
    with pytest.raises(UsageError, match="engine 'ollama': not known; use vllm, "):
        engine_of("ollama")


def test_vllm() -> None:
    start = start_of("vllm")
    assert start.address == Path("/run/replica/engine.sock")
    assert start.arguments == (
        "vllm", "serve", "/stage/model", "--uds", "/run/replica/engine.sock", "--served-model-name", "tiny",
        "--max-num-seqs", "4", "--tensor-parallel-size", "2", "--disable-uvicorn-access-log",
    )  # fmt: skip
    assert start.environment["HF_HUB_OFFLINE"] == "1"
    own = start_of("vllm", options=("--pipeline-parallel-size=2", "--max-num-seqs", "64")).arguments
    assert own.count("--max-num-seqs") == 1 and "--tensor-parallel-size" not in own
    assert "--tensor-parallel-size" not in start_of("vllm", Place(PLACE.folder, 1, KEY, PLACE.model, gpus=1)).arguments


def test_sglang_has_its_key_in_a_file() -> None:
    start = start_of("sglang", options=("--mem-fraction-static", "0.8"))
    assert start.address == 4321 and not any(KEY in word for word in start.arguments)
    assert start.arguments[-4:] == ("--config", "/run/replica/sglang.yaml", "--mem-fraction-static", "0.8")
    config = start.files["sglang.yaml"]
    assert f'api-key: "{KEY}"\n' in config and 'host: "127.0.0.1"\nport: 4321\n' in config
    assert "max-running-requests: 4\n" in config and "tensor-parallel-size: 2\n" in config
    assert KEY not in "".join(start.environment.values())
    assert 'log-level-http: "warning"\n' in config
    assert "log-level-http" not in start_of("sglang", options=("--log-level-http", "info")).files["sglang.yaml"]


def test_tei_has_its_key_in_its_environment() -> None:
    start = start_of("tei")
    assert start.address == 4321 and start.environment["API_KEY"] == KEY
    words = " ".join(start.arguments)
    assert "--hostname 127.0.0.1 --port 4321" in words and "--model-id /stage/model" in words and KEY not in words
    assert "--max-concurrent-requests 128" in words, "each text of a request counts as one: 4 slots of 32"
    own = start_of("tei", options=("--max-client-batch-size", "512")).arguments
    assert own[own.index("--max-concurrent-requests") + 1] == "2048"
    assert f"--payload-limit {bounds.MOST_BODY}" in words, "what a gateway took is not refused by the engine"
    assert start_of("tei", options=("--payload-limit=9",)).arguments.count("--payload-limit") == 0
    assert "--prometheus-port 0" in words, "two replicas on a node, or anybody who has its usual port"
    assert "--prometheus-port 0" not in " ".join(start_of("tei", options=("--prometheus-port=9100",)).arguments)


@pytest.mark.parametrize("rank", [0, 1])
def test_parts_on_several_nodes(rank: int) -> None:
    place = replace(PLACE, group=Group(3, rank, "n1", 7000))
    words = " ".join(start_of("vllm", place).arguments)
    assert f"--nnodes 3 --node-rank {rank} --master-addr n1 --master-port 7000" in words
    assert "--pipeline-parallel-size 3 --tensor-parallel-size 2" in words and ("--headless" in words) == (rank > 0)
    words = " ".join(start_of("vllm", place, options=("--tensor-parallel-size", "6")).arguments)
    assert "--pipeline" not in words and words.count("--tensor-parallel-size") == 1
    config = start_of("sglang", place).files["sglang.yaml"]
    for line in ("nnodes: 3", f"node-rank: {rank}", 'dist-init-addr: "n1:7000"', "tensor-parallel-size: 6"):
        assert f"{line}\n" in config
    given = start_of("openai", place, command=("/srv/run", "{socket}")).environment
    assert [given[f"SLUICE_{name}"] for name in ("NODES", "NODE_RANK", "LEADER_HOST", "LEADER_PORT")] == [
        "3", str(rank), "n1", "7000",
    ]  # fmt: skip


def test_llama_cpp(tmp_path: Path) -> None:
    start = start_of("llama.cpp")
    assert start.address == PLACE.socket
    words = " ".join(start.arguments)
    assert "--model /stage/model --alias tiny --host /run/replica/engine.sock --parallel 4" in words
    assert "--n-gpu-layers 999" in words
    assert "--n-gpu-layers" not in start_of("llama.cpp", options=("-ngl", "12")).arguments
    for name in ("model-00002-of-00002.gguf", "model-00001-of-00002.gguf", "README.md"):
        (tmp_path / name).touch()
    start = start_of("llama.cpp", Place(PLACE.folder, 1, KEY, tmp_path))
    assert start.arguments[start.arguments.index("--model") + 1] == str(tmp_path / "model-00001-of-00002.gguf")


def test_llama_cpp_takes_the_encoder_of_images_that_lies_with_its_model(tmp_path: Path) -> None:
    for name in ("model-00001-of-00002.gguf", "model-00002-of-00002.gguf", "mmproj-f16.gguf"):
        (tmp_path / name).touch()
    place = Place(PLACE.folder, 1, KEY, tmp_path)
    words = start_of("llama.cpp", place).arguments
    assert words[words.index("--model") + 1] == str(tmp_path / "model-00001-of-00002.gguf")
    assert words[words.index("--mmproj") + 1] == str(tmp_path / "mmproj-f16.gguf")
    for own in (("--mmproj", "/other.gguf"), ("--mmproj=/other.gguf",), ("--mmproj-url", "x://m"), ("--no-mmproj",)):
        words = start_of("llama.cpp", place, options=own).arguments
        assert str(tmp_path / "mmproj-f16.gguf") not in words


def test_llama_cpp_takes_its_own_program_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "llama-server"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert start_of("llama.cpp").arguments[0] == str(program)


def test_what_engines_print_has_no_key() -> None:
    """SGLang and TEI print all their settings."""
    for engine in ("sglang", "tei"):
        assert start_of(engine).secret == KEY
    assert start_of("openai", command=("/srv/run", "{port}")).secret == KEY


@pytest.mark.parametrize("size", [1, 2, 5, 63, 64, 1000])
def test_a_secret_is_taken_out_of_pieces_of_any_size(size: int) -> None:
    secret = b"abab" + b"c" * 60
    said = b"key='" + secret + b"' ab " + secret[:-1] + b"\n" + secret + secret + b"ababab"
    masker = Masker(secret)
    found = b"".join(masker.feed(said[at : at + size]) for at in range(0, len(said), size)) + masker.rest
    assert found == said.replace(secret, b"***")
    assert Masker(b"").feed(said) == said


def test_any_program() -> None:
    start = start_of("openai", command=("/srv/run", "--listen={socket}", "{model}", "{service}", "{other}"))
    assert start.arguments == ("/srv/run", "--listen=/run/replica/engine.sock", "/stage/model", "tiny", "{other}")
    assert start.address == PLACE.socket and KEY not in start.environment.values()
    start = start_of("openai", command=("/srv/run", "{port}"))
    assert start.arguments == ("/srv/run", "4321") and start.address == 4321
    assert start.environment["SLUICE_ENGINE_KEY"] == KEY
    start = start_of("python", command=("/usr/bin/python3", "/srv/embed.py"))
    assert start.address == PLACE.socket and start.environment["SLUICE_ENGINE_SOCKET"] == str(PLACE.socket)


@pytest.mark.parametrize("engine", sorted(TAKEN))
def test_what_the_replica_sets_no_service_may_set(engine: str) -> None:
    """Where and under which name an engine serves is not left to a service's options."""
    start = start_of(engine)
    ours = {"--host", "--hostname", "--port", "--uds", "--api-key", "--served-model-name", "--alias", "--config",
            "--model", "--model-id", "--model-path"}  # fmt: skip
    for word in start.arguments:
        if word in ours:
            assert word in TAKEN[engine], word


@pytest.mark.parametrize(
    ("engine", "options", "expected"),
    [
        ("vllm", (), "chat"), ("vllm", ("--runner", "pooling"), "embeddings"),
        ("vllm", ("--task=embed",), "embeddings"),
        ("sglang", (), "chat"), ("sglang", ("--is-embedding",), "embeddings"), ("llama.cpp", (), "chat"),
        ("llama.cpp", ("--embeddings",), "embeddings"), ("tei", (), "embeddings"), ("python", (), "embeddings"),
    ],
)  # fmt: skip
def test_abilities(engine: str, options: tuple[str, ...], expected: str) -> None:
    found = engine_of(engine).abilities(spec_of("/m", engine=engine, options=options))
    assert (found.chat, found.embeddings) == (expected == "chat", expected == "embeddings")
    assert found.resume == ("tokens" if expected == "chat" else "none")


def test_abilities_of_what_is_not_known() -> None:
    found = engine_of("openai").abilities(spec_of("", engine="openai"))
    assert found == Abilities(chat=True, completions=True, embeddings=True, responses=True, resume="none")


VLLM = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 3.0
vllm:num_requests_running{engine="1",model_name="tiny"} 1.0
vllm:num_requests_waiting{engine="0",model_name="a } b"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.25
vllm:prompt_tokens_total{engine="0",model_name="tiny"} 1.2e+03
vllm:generation_tokens_total{engine="0",model_name="tiny"} 77.0 1700000000000
vllm:broken NaN
vllm:endless +Inf
not a sample
"""


def load_of(engine: str, text: str) -> Load:
    return engine_of(engine).load(samples(text))


def test_figures() -> None:
    found = samples(VLLM)
    assert "vllm:broken" not in found and "vllm:endless" not in found
    assert engine_of("vllm").load(found) == Load(4, 2, 1200, 77, 0.25)
    assert load_of("sglang", "sglang:num_running_reqs 2\nsglang:token_usage 0.5") == Load(2, 0, 0, 0, 0.5)
    assert load_of(
        "llama.cpp",
        "llamacpp:requests_processing 1\nllamacpp:requests_deferred 5\nllamacpp:tokens_predicted_total 9",
    ) == Load(1, 5, 0, 9)
    assert load_of("python", "sluice_model_running 8\nsluice_model_waiting 2") == Load(8, 2)
    assert load_of("tei", "te_queue_size 3") == Load(0, 3)
    assert load_of("vllm", "") == Load()


@pytest.mark.parametrize("engine, name", [("vllm", "vllm:kv_cache_usage_perc"), ("sglang", "sglang:token_usage")])
def test_parts_of_an_engine_have_the_mean_of_their_caches(engine: str, name: str) -> None:
    """Of data-parallel parts: their sum, above 1, would have the replica's heartbeats refused."""
    assert load_of(engine, f'{name}{{part="0"}} 0.75\n{name}{{part="1"}} 0.5\n').cache_used == 0.625
    assert load_of(engine, f"{name} 1.0000001").cache_used == 1.0


def test_figures_that_no_number_can_be() -> None:
    endless = 'vllm:num_requests_running{engine="0"} 1.7e308\nvllm:num_requests_running{engine="1"} 1.7e308\n'
    assert load_of("vllm", endless) == Load()


def test_options() -> None:
    assert has_option(("--max_num_seqs=3",), "--max-num-seqs") and not has_option(
        ("--max-num-seqs2",), "--max-num-seqs"
    )
    assert option_value(("--task", "a", "--task=b"), "--task") == "b"
    assert option_value(("x", "--task"), "--task") == "" and option_value((), "--task") is None


def test_options_of_the_package_s_server() -> None:
    options = xllamacpp_server.parse(
        ["--model", "m.gguf", "--host", "/x/e.sock", "--parallel", "3", "--alias", "tiny", "--metrics", "--no-webui"]
    )
    assert (options.host, options.parallel, options.metrics) == ("/x/e.sock", 3, True)
    with pytest.raises(SystemExit):
        xllamacpp_server.parse(["--model", "m.gguf", "--no-such-option"])
