"""A replica's whole life as a process, with llama.cpp's own server behind it."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from sluice.exchange.serving import Orders, State
from sluice.serve.engines.base import Start
from sluice.serve.replica import engine_process, main, stage
from tests.serve_models import counted
from tests.unit.serve.replica_bed import (
    LAUNCH,
    ROOT,
    Registry,
    connect,
    read_all,
    replica,
    request,
    spec_of,
    until,
)

LONG = {"messages": [{"role": "user", "content": "six"}], "max_tokens": 1500, "stream": True}


@pytest.fixture
def registry() -> Iterator[Registry]:
    one = Registry()
    yield one
    one.socket.close()


def words_of(answer: bytes) -> tuple[str, str | None]:
    """The text of a stream, and how it ended."""
    text, finish = "", None
    for line in answer.split(b"\n"):
        if line.startswith(b"data: {"):
            for choice in json.loads(line[6:])["choices"]:
                text += choice["delta"].get("content") or ""
                finish = choice["finish_reason"] or finish
    return text, finish


def children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError):
            found += [int(one) for one in (task / "children").read_text().split()]
    return found


def runs(pid: int) -> bool:
    with suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    return False


def test_from_start_to_drain(tmp_path: Path, models: dict[str, Path], registry: Registry) -> None:
    other = Registry()
    ends = time.time() + 3600
    spec = spec_of(models["counting"], registries=(registry.address, other.address))
    with replica(spec, tmp_path, SLURM_JOB_END_TIME=str(int(ends))) as one:
        beat = registry.wait(State.READY)
        assert (beat.service, beat.launch, beat.job, beat.host, beat.slots) == ("tiny", LAUNCH, 77, "node1", 4)
        assert beat.ends == int(ends) and beat.abilities.chat and beat.abilities.resume == "tokens"
        with connect(beat.port, beat.secret) as connection:
            connection.sendall(request("/v1/models"))
            assert b'"id":"tiny"' in read_all(connection)
        with connect(beat.port, beat.secret) as connection:
            connection.sendall(request("/v1/chat/completions", {**LONG, "max_tokens": 20}))
            assert words_of(read_all(connection)) == (counted(6, 20), "length")
        until(lambda: registry.beats[-1].load.completion_tokens >= 20)
        until(lambda: len(registry.beats) >= 5)
        gaps = [later - earlier for earlier, later in zip(registry.times[2:], registry.times[3:], strict=False)]
        assert max(gaps) < 5 and sorted(gaps)[len(gaps) // 2] < 2
        one.process.send_signal(signal.SIGTERM)
        assert one.ended() == 0
        assert not list(one.tmp.iterdir())
    assert registry.states == other.states == [State.STARTING, State.READY, State.DRAINING, State.GONE]
    assert "Slurm ends the job" in registry.beats[-1].why
    assert beat.secret not in one.said


def test_a_stream_is_finished_before_the_end(tmp_path: Path, models: dict[str, Path], registry: Registry) -> None:
    """SIGTERM, as on preemption: said at once, and what is under way is served to its last word."""
    with replica(spec_of(models["counting"], registries=(registry.address,)), tmp_path) as one:
        beat = registry.wait(State.READY)
        with connect(beat.port, beat.secret) as connection:
            connection.sendall(request("/v1/chat/completions", LONG))
            first = connection.recv(1000)
            one.process.send_signal(signal.SIGTERM)
            sent = time.monotonic()
            registry.wait(State.DRAINING)
            assert registry.times[[beat.state for beat in registry.beats].index(State.DRAINING)] - sent < 0.9
            assert words_of(first + read_all(connection)) == (counted(6, 1500), "length")
        assert one.ended() == 0
    assert registry.states[-1] is State.GONE


def test_it_takes_requests_until_its_successor_is_ready(
    tmp_path: Path, models: dict[str, Path], registry: Registry
) -> None:
    """Slurm's notice: replicad knows at once; nothing ends before it gives orders, or before Slurm says it again."""
    registry.successor = False
    with replica(spec_of(models["counting"], registries=(registry.address,)), tmp_path) as one:
        beat = registry.wait(State.READY)
        one.process.send_signal(signal.SIGTERM)
        until(lambda: registry.beats[-1].why)
        heard = len(registry.beats)
        until(lambda: len(registry.beats) >= heard + 4)
        assert registry.states == [State.STARTING, State.READY] and "Slurm ends the job" in registry.beats[-1].why
        with connect(beat.port, beat.secret) as connection:
            connection.sendall(request("/v1/completions", {"prompt": " six", "max_tokens": 1}))
            assert b'" seven"' in read_all(connection)
        one.process.send_signal(signal.SIGTERM)
        assert one.ended() == 0
    assert registry.states[-1] is State.GONE


def test_it_does_not_wait_for_a_successor_where_nobody_answers(
    tmp_path: Path, models: dict[str, Path], registry: Registry
) -> None:
    registry.successor = False
    with replica(spec_of(models["counting"], registries=(registry.address,)), tmp_path) as one:
        registry.wait(State.READY)
        registry.uid += 1  # so that its answers do not count
        one.process.send_signal(signal.SIGTERM)
        assert one.ended() == 0


def test_a_drain_ends_after_its_time(tmp_path: Path, models: dict[str, Path], registry: Registry) -> None:
    with replica(spec_of(models["counting"], registries=(registry.address,), drain_s=0.3), tmp_path) as one:
        beat = registry.wait(State.READY)
        with connect(beat.port, beat.secret) as connection:
            connection.sendall(request("/v1/chat/completions", LONG))
            connection.recv(100)
            one.process.send_signal(signal.SIGTERM)
            assert words_of(read_all(connection))[1] is None
        assert one.ended() == 0


def test_an_idle_connection_does_not_hold_up_a_drain(
    tmp_path: Path, models: dict[str, Path], registry: Registry
) -> None:
    with replica(spec_of(models["counting"], registries=(registry.address,)), tmp_path) as one:
        beat = registry.wait(State.READY)
        with connect(beat.port, beat.secret) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")
            registry.orders = Orders("drain")
            begun = time.monotonic()
            assert one.ended() == 0 and time.monotonic() - begun < 10
    assert State.DRAINING in registry.states


def test_orders_of_another_user_are_not_obeyed(tmp_path: Path, models: dict[str, Path], registry: Registry) -> None:
    with replica(spec_of(models["counting"], registries=(registry.address,)), tmp_path) as one:
        registry.wait(State.READY)
        registry.uid, registry.orders = 4712, Orders("stop")
        count = len(registry.beats)
        until(lambda: len(registry.beats) >= count + 3)
        assert one.process.poll() is None and registry.states[-1] is State.READY
        assert "orders of uid 4712" in one.said
        registry.uid = 4711
        assert one.ended() == 0
    assert registry.states[-1] is State.GONE


def test_an_engine_that_is_killed(tmp_path: Path, models: dict[str, Path], registry: Registry) -> None:
    with replica(spec_of(models["counting"], registries=(registry.address,)), tmp_path) as one:
        beat = registry.wait(State.READY)
        (engine,) = children(one.process.pid)
        with connect(beat.port, beat.secret) as connection:
            connection.sendall(request("/v1/chat/completions", LONG))
            connection.recv(100)
            os.kill(engine, signal.SIGKILL)
            assert words_of(read_all(connection))[1] is None
        assert one.ended() == 1
    assert registry.states[-1] is State.FAILED
    assert registry.beats[-1].why == "the engine has ended: signal SIGKILL"


def test_why_an_engine_did_not_start(tmp_path: Path, models: dict[str, Path], registry: Registry) -> None:
    options = ("--ctx-size", "-1e")
    with replica(spec_of(models["counting"], registries=(registry.address,), options=options), tmp_path) as one:
        assert one.ended() == 1
    why = registry.wait(State.FAILED).why
    assert why.startswith("the engine has ended before it was ready: exit status 2: ") and "--ctx-size" in why
    assert len(why) < 600


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model": "/nowhere/model.gguf"}, "model /nowhere/model.gguf: not there, or not readable by uid"),
        ({"sha256": "0" * 64}, "its SHA-256 is"),
        ({"engine": "vllm"}, "engine vllm: no such program; install it on the node"),
        ({"engine": "openai", "command": ("/bin/sleep", "60"), "ready_s": 1.0}, "not ready within 1 s: before"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_said(
    tmp_path: Path, models: dict[str, Path], registry: Registry, changes: dict[str, object], why: str
) -> None:
    spec = spec_of(**{"model": models["counting"], "registries": (registry.address,), **changes})  # type: ignore[arg-type]
    with replica(spec, tmp_path, PATH="/usr/bin:/bin") as one:
        assert one.ended() == 1 and not list(one.tmp.iterdir())
    assert why in registry.wait(State.FAILED).why and registry.states[-1] is State.FAILED


def test_last_words_have_nothing_of_requests(tmp_path: Path, registry: Registry) -> None:
    """An engine that prints prompts and dies: they are in the job's output, and nowhere else."""
    program = tmp_path / "engine.py"
    program.write_text(
        "import socket, sys, os\n"
        "listening = socket.socket(socket.AF_UNIX); listening.bind(sys.argv[1]); listening.listen(9)\n"
        "while True:\n"
        "    one, _ = listening.accept(); got = one.recv(9999)\n"
        "    if b'confidential' in got:\n"
        "        print(got, flush=True); os._exit(3)\n"
        "    one.sendall(b'HTTP/1.0 200 OK\\r\\nContent-Length: 0\\r\\n\\r\\n'); one.close()\n"
    )
    command = (sys.executable, str(program), "{socket}")
    spec = spec_of("", engine="openai", command=command, registries=(registry.address,))
    with replica(spec, tmp_path) as one:
        beat = registry.wait(State.READY)
        with connect(beat.port, beat.secret) as connection:
            connection.sendall(request("/v1/chat/completions", {"prompt": "confidential"}))
            read_all(connection)
        assert one.ended() == 1
    assert registry.wait(State.FAILED).why == "the engine has ended: exit status 3"


def test_nothing_is_left_of_a_replica_that_is_killed(
    tmp_path: Path, models: dict[str, Path], registry: Registry
) -> None:
    with replica(spec_of(models["counting"], registries=(registry.address,)), tmp_path) as one:
        registry.wait(State.READY)
        engines = children(one.process.pid)
        assert engines and all(map(runs, engines))
        one.process.kill()
        until(lambda: not any(map(runs, engines)), 10)


def test_what_killed_replicas_left_is_removed(tmp_path: Path) -> None:
    """But no folder that is new, locked by a replica that runs, or only linked."""
    left, new, held = (tmp_path / f"sluice-replica.{name}" for name in "abc")
    kept = tmp_path / "kept"
    for folder in (left, new, held, kept):
        folder.mkdir()
        (folder / "tls").write_text("x")
    (tmp_path / "sluice-replica.d").symlink_to(kept)
    for folder in (left, held, kept):
        os.utime(folder, (1, 1))
    lock = os.open(held, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    main._remove_left(tmp_path)
    os.close(lock)
    assert not left.exists() and all((folder / "tls").exists() for folder in (new, held, kept))


def test_another_user_of_the_node_cannot_reach_the_engine(
    tmp_path: Path, models: dict[str, Path], registry: Registry
) -> None:
    """Neither the engine's socket nor, without the secret, the replica's port; nor does a process's list show it."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to be another user")
    with replica(spec_of(models["counting"], registries=(registry.address,)), tmp_path) as one:
        beat = registry.wait(State.READY)
        one.tmp.chmod(0o755)
        (path,) = one.tmp.glob("*/engine.sock")
        tried = (
            "import socket, sys\n"
            "s = socket.socket(socket.AF_UNIX)\n"
            "try: s.connect(sys.argv[1]); print('connected')\n"
            "except PermissionError: print('denied')\n"
        )
        done = subprocess.run(
            ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "/usr/bin/python3", "-c", tried, path],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert done.stdout == "denied\n"
        seen = b"".join(
            Path(f"/proc/{pid}/cmdline").read_bytes() for pid in (one.process.pid, *children(one.process.pid))
        )
        assert beat.secret.encode() not in seen
        own = {
            line.split()[1]
            for pid in (one.process.pid, *children(one.process.pid))
            for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()
            if line.split()[3] == "0A" and line.split()[9] in inodes(pid)
        }
        assert own == {f"00000000:{beat.port:04X}"}  # nothing else listens
        with connect(beat.port, "0" * 64) as connection:
            connection.sendall(request("/v1/models"))
            assert read_all(connection) == b""


def inodes(pid: int) -> set[str]:
    found = set()
    for one in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            name = os.readlink(one)  # noqa: PTH115
            if name.startswith("socket:["):
                found.add(name[8:-1])
    return found


def test_an_engine_on_a_port_asks_for_the_key(tmp_path: Path, models: dict[str, Path], registry: Registry) -> None:
    """As those that have no Unix socket; gateways send the secret as key."""
    program = tmp_path / "engine.sh"
    program.write_text(
        f'#!/bin/sh\necho "$SLUICE_ENGINE_KEY" >"$TMPDIR/key"\nexec {sys.executable} -P -m '
        'sluice.serve.engines.xllamacpp_server --model "$1" --port "$2" --alias tiny --threads 1 --ctx-size 4096 '
        '--api-key-file "$TMPDIR/key"\n'
    )
    program.chmod(0o755)
    command = (str(program), "{model}", "{port}")
    spec = spec_of(models["counting"], engine="openai", command=command, registries=(registry.address,))
    with replica(spec, tmp_path):
        beat = registry.wait(State.READY)
        ask = {"prompt": " six", "max_tokens": 1}
        for key, status in (("", b"401"), (beat.secret, b"200")):
            with connect(beat.port, beat.secret) as connection:
                text = request("/v1/completions", ask)
                connection.sendall(text.replace(b"Host: x", f"Host: x\r\nAuthorization: Bearer {key}".encode()))
                assert read_all(connection).split(b" ")[1] == status


def test_a_port_that_another_user_took_gets_nothing(tmp_path: Path, registry: Registry) -> None:
    """Somebody on the node answers like an engine where the engine was to listen: no key and no request goes there."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to be another user")
    thief = (
        "import socket, sys\n"
        "s = socket.create_server(('127.0.0.1', int(sys.argv[1])))\n"
        "print('listens', flush=True)\n"
        "while True:\n"
        "    c, _ = s.accept(); print(c.recv(9999), flush=True)\n"
        "    c.sendall(b'HTTP/1.0 200 OK\\r\\nContent-Length: 0\\r\\n\\r\\n'); c.close()\n"
    )
    program = tmp_path / "engine.sh"
    other = "setpriv --reuid=65534 --regid=65534 --clear-groups /usr/bin/python3"
    program.write_text(f'#!/bin/sh\n{other} -c "$2" "$1" >"$TMPDIR/seen"\n')
    program.chmod(0o755)
    command = (str(program), "{port}", thief)
    spec = spec_of("", engine="openai", command=command, registries=(registry.address,), ready_s=3.0)
    with replica(spec, tmp_path) as one:
        until(lambda: (one.tmp / "seen").exists() and "listens" in (one.tmp / "seen").read_text())
        assert one.ended() == 1
        assert (one.tmp / "seen").read_text() == "listens\n"
    assert State.READY not in registry.states


def test_a_model_is_staged_while_heartbeats_go_on(tmp_path: Path, models: dict[str, Path], registry: Registry) -> None:
    (tmp_path / "stage").mkdir()
    spec = spec_of(models["counting"], registries=(registry.address,), stage=str(tmp_path / "stage"))
    with replica(spec, tmp_path) as one:
        beat = registry.wait(State.READY)
        assert registry.states[0] is State.STARTING and "copied=1584992" in one.said
        with connect(beat.port, beat.secret) as connection:
            connection.sendall(request("/v1/completions", {"prompt": " six", "max_tokens": 1}))
            assert b'" seven"' in read_all(connection)
        (engine,) = children(one.process.pid)
        assert str(tmp_path / "stage").encode() in Path(f"/proc/{engine}/cmdline").read_bytes()


def test_a_replica_that_waits_for_a_copy_ends_when_it_is_ordered_to(
    tmp_path: Path, models: dict[str, Path], registry: Registry
) -> None:
    (tmp_path / "stage").mkdir()
    spec = spec_of(models["counting"], registries=(registry.address,), stage=str(tmp_path / "stage"))
    staged = stage.stage(spec)
    staged.release()
    entry = staged.path.parent
    shutil.rmtree(entry)
    with entry.with_name(f"{entry.name}.lock").open() as copying:
        fcntl.flock(copying, fcntl.LOCK_EX)
        with replica(spec, tmp_path) as one:
            registry.wait(State.STARTING)
            one.process.send_signal(signal.SIGTERM)
            assert one.ended(20) == 0
    assert registry.states[-1] is State.GONE


def test_an_engine_that_hangs_in_a_driver_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "_KILLED_S", 0.2, raising=False)
    engine = engine_process.EngineProcess(Start(("sleep", "20"), 1), tmp_path)
    try:
        with monkeypatch.context() as deaf:
            deaf.setattr(os, "killpg", lambda *_: None)
            engine.end(0.1)
        assert engine.ended() is None
    finally:
        engine.end(0)
    assert engine.ended() is not None


def test_an_engine_that_prints_its_key_prints_it_to_nobody(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    words = ("sh", "-c", "printf 'api_key=5ec'; sleep 0.2; echo 2e7; printf 'key 5ec'; exit 3")
    engine = engine_process.EngineProcess(Start(words, 1, secret="5ec2e7"), tmp_path)
    until(lambda: engine.ended() is not None, 20)
    assert engine.ended() == "the engine has ended before it was ready: exit status 3: api_key=*** | key 5ec"
    assert capfdbinary.readouterr().err == b"api_key=***\nkey 5ec"


def test_a_full_disk_under_its_output_ends_nothing(tmp_path: Path, models: dict[str, Path], registry: Registry) -> None:
    (tmp_path / "stderr").symlink_to("/dev/full")
    with replica(spec_of(models["counting"], registries=(registry.address,)), tmp_path) as one:
        beat = registry.wait(State.READY)
        with connect(beat.port, beat.secret) as connection:
            connection.sendall(request("/v1/completions", {"prompt": " six", "max_tokens": 1}))
            assert b'" seven"' in read_all(connection)
        one.process.send_signal(signal.SIGTERM)
        registry.wait(State.GONE)
        assert one.ended() == 0 and State.FAILED not in registry.states


def test_only_one_replicad_is_there(tmp_path: Path, models: dict[str, Path], registry: Registry) -> None:
    """The other one takes connections and says nothing: the one that works hears each second."""
    silent = socket.create_server(("127.0.0.1", 0))
    spec = spec_of(
        models["counting"], registries=(f"127.0.0.1:{silent.getsockname()[1]}", "127.0.0.1:1", registry.address)
    )
    with silent, replica(spec, tmp_path) as one:
        registry.wait(State.READY)
        until(lambda: len(registry.beats) >= 4, 20)
        one.process.send_signal(signal.SIGTERM)
        assert one.ended(20) == 0
    assert registry.states[-1] is State.GONE


def test_sixteen_streams_of_four_slots(tmp_path: Path, models: dict[str, Path], registry: Registry) -> None:
    """More than slots: they wait in the engine, each gets its own words."""
    with replica(spec_of(models["counting"], registries=(registry.address,)), tmp_path):
        beat = registry.wait(State.READY)
        got: dict[int, tuple[str, str | None]] = {}

        def ask(after: int) -> None:
            with connect(beat.port, beat.secret, timeout=120) as connection:
                connection.sendall(
                    request("/v1/chat/completions", {**LONG, "max_tokens": 100, "messages": [
                        {"role": "user", "content": counted(after - 1, 1).strip()}]})
                )  # fmt: skip
                got[after] = words_of(read_all(connection))

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(1, 17)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert got == {number: (counted(number, 100), "length") for number in range(1, 17)}


def test_a_spec_that_is_none(tmp_path: Path) -> None:
    for text, said in (
        ("", "not JSON"),
        ("[]", "not an object"),
        ("{}", "service: missing"),
        ('{"service": 3}', "service: '3' is no str"),
    ):
        done = subprocess.run(
            [sys.executable, "-P", "-m", "sluice.serve.replica.main"],
            input=text, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False,
        )  # fmt: skip
        assert done.returncode == 2 and said in done.stderr, done.stderr


def test_tls_1_2_is_refused(tmp_path: Path, models: dict[str, Path], registry: Registry) -> None:
    with replica(spec_of(models["counting"], registries=(registry.address,)), tmp_path):
        beat = registry.wait(State.READY)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises(ssl.SSLError), socket.create_connection(("127.0.0.1", beat.port)) as plain:
            context.wrap_socket(plain)


def test_embeddings_of_llama_cpp(tmp_path: Path, models: dict[str, Path], registry: Registry) -> None:
    options = ("--ctx-size", "4096", "--threads", "1", "--embeddings", "--pooling", "mean")
    spec = spec_of(models["random"], registries=(registry.address,), options=options)
    with replica(spec, tmp_path):
        beat = registry.wait(State.READY)
        assert beat.abilities.embeddings and not beat.abilities.chat
        with connect(beat.port, beat.secret) as connection:
            connection.sendall(request("/v1/embeddings", {"input": ["one two", "three", "one two"]}))
            answer = json.loads(read_all(connection).partition(b"\r\n\r\n")[2])
    first, second, again = (one["embedding"] for one in answer["data"])
    assert len(first) > 8 and any(first) and first == again and first != second
    assert answer["usage"]["prompt_tokens"] >= 5
