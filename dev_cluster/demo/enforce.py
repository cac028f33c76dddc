"""Chapter: limits of GPU memory that hold."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable
from typing import Any

from dev_cluster.demo.stage import SLUICE, Stage
from dev_cluster.layout import INSIDE

# Allocates one size after the other, prints the driver's answers, and waits a moment.
CUDA = """
import ctypes, sys, time
cuda, context, address = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_uint64()
assert cuda.cuInit(0) == 0 and cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cuda.cuCtxSetCurrent(context) == 0
for mib in sys.argv[1:]:
    print(cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(int(mib) << 20)), flush=True)
time.sleep(20 if len(sys.argv) == 2 else 0)
"""
HIP = """
import ctypes, sys, time
hip, address = ctypes.CDLL("libamdhip64.so.6"), ctypes.c_void_p()
assert hip.hipInit(0) == 0
for mib in sys.argv[1:]:
    print(hip.hipMalloc(ctypes.byref(address), ctypes.c_size_t(int(mib) << 20)), flush=True)
time.sleep(600 if len(sys.argv) == 2 else 0)
"""
PYTHON = "/usr/bin/python3"


def enforce(stage: Stage) -> None:
    """Limits that jobs cannot take away, and an escape that ends."""
    _two_tenants(stage)
    if stage.cluster.run(["unshare", "-Urm", "true"], user="bob", node="h100-1", check=False).returncode == 0:
        _escape(stage)  # else this kernel lets no user make namespaces: that way out is closed


def _two_tenants(stage: Stage) -> None:
    stage.step(
        "Two tenants share a GPU, at 30 and at 50 GiB",
        "Alice holds 28 of her 30 GiB. Of Bob's 50, 40 are granted; 10 more with the driver's context would be over, "
        "and are refused with HIP's own error 2 (out of memory), whatever his job does to its environment; 9 more fit.",
    )
    node = "mi300x-1"
    hold = f"exec {PYTHON} -c {shlex.quote(HIP)} 28672"
    alice = stage.run(
        ["sbatch", "--parsable", "-C", "xgmi8", "--gpu-mem=30G", "-o/dev/null", "--wrap", hold],
        user="alice",
        shown="sbatch --parsable -C xgmi8 --gpu-mem=30G hold-28-gib.sh",
    ).strip()
    stage.wait("Alice's job runs", lambda: stage.state(alice) == "RUNNING")
    held = stage.run(
        ["srun", "-C", "xgmi8", "--gpu-mem=50G", "env", "-i", PYTHON, "-c", HIP, "40960", "10240", "9216"],
        user="bob",
        shown="srun -C xgmi8 --gpu-mem=50G env -i python3 allocate.py 40960 10240 9216    # MiB",
    )
    stage.expect(held.splitlines()[:3] == ["0", "2", "0"], "only what is within the limit was granted")
    bob = _record(stage, node, lambda record: record["user"] == "bob" and record["grants"][0]["refused"] > 0)
    stage.cluster.run(["scancel", alice])
    hers = _find(stage, node, lambda record: record["job"] == int(alice))
    stage.expect(hers["grants"][0]["uuid"] == bob["grants"][0]["uuid"], "both were on one GPU")


def _escape(stage: Stage) -> None:
    stage.step(
        "An escape ends",
        "A private mount namespace, as rootless containers have it, takes the preloaded limiter away. The node "
        "agent's watchdog sees the memory all the same, ends the step, and writes it into the job's record.",
    )
    allocate = [PYTHON, "-c", CUDA, "8192"]
    escape = 'mount --bind /dev/null /etc/ld.so.preload && exec env -i "$@"'
    began = time.monotonic()
    ended = stage.run(
        ["srun", "-w", "h100-1", "--gpu-mem=4G", "unshare", "-Urm", "sh", "-c", escape, "x", *allocate],
        user="bob",
        shown="srun -w h100-1 --gpu-mem=4G escape python3 allocate.py 8192",
        check=False,
    )
    stage.expect("is ended" in ended and time.monotonic() - began < 30, "the watchdog ended the step, and said so")
    _record(stage, "h100-1", lambda record: any(event["action"] == "end" for event in record["events"]))


def _record(stage: Stage, node: str, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Show the newest record on a node that is the wanted one, once it is there."""
    record = _find(stage, node, wanted)
    job = str(record["job"])
    command = [*SLUICE, "agent", "record", "--records", f"{INSIDE}/nodes/{node}/records", job]
    stage.run(command, node=node, shown=f"sluice agent record {job}", lines=60)
    return record


def _find(stage: Stage, node: str, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    folder = stage.cluster.folder / "nodes" / node / "records"
    found: dict[int, dict[str, Any]] = {}

    def there() -> bool:
        records = [json.loads(path.read_text()) for path in folder.glob("*.json")]
        found.update({record["job"]: record for record in records if wanted(record)})
        return bool(found)

    stage.wait("the record is there", there)
    return found[max(found)]
