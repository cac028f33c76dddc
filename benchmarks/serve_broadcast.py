"""One model for many nodes at once, from a storage that gives all of them together so many bytes a second.

Nodes are processes with a stage folder in memory each, which stage by the replicas' own code and hear what replicad's
own code says of the others. The storage's rate is one bucket for all. Over UCX it is UCX's TCP: nodes that are
processes of one machine have no RDMA between them.
`python -m benchmarks.serve_broadcast SPEC NODE BUCKET RATE` is one node: it prints what it offers and what it took, and
reads its orders.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median

from benchmarks.serve_site import ROOT, cpu_s
from sluice.base.errors import SluiceError
from sluice.exchange.serving import Abilities, DataPath, Heartbeat, Load, Orders, ReplicaSpec, State, Weights, render
from sluice.serve.replica.certificate import make_context
from sluice.serve.replica.heartbeats import parse_orders
from sluice.serve.replica.pieces import Pieces
from sluice.serve.replica.share import Share
from sluice.serve.replica.spec import parse_spec
from sluice.serve.replica.stage import pieces_of, stage
from sluice.serve.replica.ucx import why_not
from sluice.serve.replicad.weights import peers_of

_MIB = 1 << 20
_ROUNDS = 5
_FAST = 1e12  # bytes a second: the storage keeps nobody waiting
_MEMORY = "/dev/shm"  # noqa: S108 - a folder of one's own there: the nodes have one disk here


# ---- a node ----


class _Storage:
    """One that all nodes share, and that is slow."""

    def __init__(self, bucket: Path, rate: float) -> None:
        self.bucket, self.rate, self.read = bucket, rate, 0

    def slow(self, read: Callable[[Pieces, int], bytes]) -> Callable[[Pieces, int], bytes]:
        """The same, when it is its turn."""

        def later(pieces: Pieces, number: int) -> bytes:
            with self.bucket.open("r+") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                end = max(time.monotonic(), float(file.read() or 0)) + pieces.size(number) / self.rate
                file.seek(0)
                file.write(f"{end:.9f}")
            time.sleep(max(0.0, end - time.monotonic()))
            self.read += pieces.size(number)
            return read(pieces, number)

        return later


def node(spec: ReplicaSpec, number: int, bucket: Path, rate: float) -> None:
    """Stage it, say so, and give it to others until standard input ends."""
    storage = _Storage(bucket, rate)
    Pieces.read_source = storage.slow(Pieces.read_source)  # type: ignore[method-assign, assignment]
    context, fingerprint = make_context("node")
    secret = f"{number:064x}"
    words = threading.Lock()

    def say(**more: object) -> None:
        weights = share.weights if share is not None else None
        with words:
            print(json.dumps({"weights": weights and asdict(weights), "fingerprint": fingerprint, **more}), flush=True)

    share = Share(context, secret, spec.broadcast * _MIB, say, spec.data_path) if spec.broadcast else None

    def hear() -> None:
        for line in sys.stdin:
            if share is not None:
                share.tell(parse_orders(line.encode()))
        os._exit(0)

    threading.Thread(target=hear, daemon=True).start()
    began, began_cpu = time.monotonic(), time.process_time()
    staged = stage(spec, share=share)
    if share is not None and (pieces := pieces_of(staged)) is not None:
        share.offer(pieces)
    seconds = time.monotonic() - began
    cpu = {"pid": os.getpid(), "began_cpu": began_cpu, "cpu": time.process_time()}
    say(seconds=seconds, read=storage.read, taken=staged.taken, ucx=staged.by_ucx, **cpu)
    threading.Event().wait()


# ---- all of them ----


@contextmanager
def _nodes(
    spec: ReplicaSpec, count: int, rate: float, *, later: bool = False
) -> Iterator[list[dict[str, float]]]:  # fmt: skip
    """Start them at once, or all others when the first one has the model; what each says at its end."""
    folder = Path(tempfile.mkdtemp(prefix="stage-", dir=Path(spec.model).parent))
    bucket = folder / "bucket"
    bucket.write_text("")
    running: list[subprocess.Popen[bytes]] = []

    def start(number: int) -> None:
        (folder / str(number)).mkdir()
        own = replace(spec, stage=str(folder / str(number)), launch=f"{number:016x}")
        words = [sys.executable, "-m", "benchmarks.serve_broadcast", json.dumps(asdict(own)), str(number), str(bucket)]
        running.append(
            subprocess.Popen(
                [*words, str(rate)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        )

    beats: dict[int, Heartbeat] = {}
    with_model: dict[int, Heartbeat] = {}  # those first that staged first
    done: dict[int, dict[str, float]] = {}
    lock = threading.Lock()

    def listen(number: int) -> None:
        output = running[number].stdout
        assert output is not None
        for line in output:
            said = json.loads(line)
            with lock:
                weights = Weights(**said["weights"]) if said["weights"] else None
                beats[number] = Heartbeat(
                    "m", f"{number:016x}", 1, "127.0.0.1", 1, said["fingerprint"], f"{number:064x}", State.STARTING,
                    Abilities(), 1, Load(), None, weights=weights,
                )  # fmt: skip
                if weights is not None:
                    with_model[number] = beats[number]
                for one, beat in beats.items():
                    orders = Orders("go on", *peers_of(beat, [*with_model.values()]))
                    own = running[one].stdin
                    assert own is not None
                    own.write(render(orders) + b"\n")
                    own.flush()
                if "seconds" in said:
                    done[number] = said
                    return

    threads = [threading.Thread(target=listen, args=(number,), daemon=True) for number in range(count)]
    try:
        for number, thread in enumerate(threads):
            start(number)
            thread.start()
            if later and number == 0:
                thread.join()
        for thread in threads:
            thread.join()
        yield [done[number] for number in range(count)]
    finally:
        for process in running:
            process.kill()
            process.wait()
        shutil.rmtree(folder)


def measure(figures: dict[str, float], nodes: int, mib: int, rate: float) -> None:
    """Each by itself, and with each other. `rate`: MiB a second of the storage, for all nodes together."""
    with tempfile.TemporaryDirectory(prefix="broadcast-", dir=_MEMORY) as name:
        model = Path(name) / "model"
        digest = hashlib.sha256()
        with model.open("wb") as file:
            for _ in range(mib):
                piece = os.urandom(_MIB)
                digest.update(piece)
                file.write(piece)
        spec = ReplicaSpec(
            "m", "0" * 16, "openai", str(model), digest.hexdigest(), name, (), (), 1, (), 0, 900.0, 1.0, "/", 0, 1
        )
        by_tcp = replace(spec, broadcast=1 << 20, data_path="tcp")
        by_ucx = replace(by_tcp, data_path="ucx")
        kinds = {"alone": replace(by_tcp, broadcast=0), "broadcast": by_tcp, "broadcast_ucx": by_ucx}
        paths: dict[DataPath, list[float]] = {"tcp": [], "ucx": []}
        if why := why_not("ucx"):
            print(f"without UCX: {why}", file=sys.stderr)
            del kinds["broadcast_ucx"], paths["ucx"]
        used: dict[DataPath, list[float]] = {path: [] for path in paths}
        for name_, one_kind in kinds.items():
            with _nodes(one_kind, nodes, rate * _MIB) as said:
                figures[f"{name_}_last_s"] = max(one["seconds"] for one in said)
                figures[f"{name_}_median_s"] = median(one["seconds"] for one in said)
                figures[f"{name_}_storage_read_times"] = sum(one["read"] for one in said) / (mib * _MIB)
        for _ in range(_ROUNDS):
            for path, seconds in paths.items():
                with _nodes(replace(by_tcp, data_path=path), 2, _FAST, later=True) as said:
                    giver, taker = said
                    used[path].append(
                        cpu_s(int(taker["pid"])) - taker["began_cpu"] + cpu_s(int(giver["pid"])) - giver["cpu"]
                    )
                    if taker["taken"] != mib * _MIB or taker["ucx"] != (mib * _MIB if path == "ucx" else 0):
                        raise SluiceError(f"the model did not go by {path}: {taker}", remedy="see why by hand")
                    seconds.append(taker["seconds"])
        for path, seconds in paths.items():
            figures[f"path_{path}_mib_per_s"] = mib / median(seconds)
            figures[f"path_{path}_worst_mib_per_s"] = mib / max(seconds)
            figures[f"path_{path}_cpu_s_per_gib"] = median(used[path]) * 1024 / mib
    figures["broadcast_nodes"], figures["broadcast_mib"], figures["storage_mib_per_s"] = nodes, mib, rate


if __name__ == "__main__":
    node(parse_spec(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), float(sys.argv[4]))
