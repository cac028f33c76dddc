"""Chapter: limits of GPU memory that hold."""

from __future__ import annotations

import time

from dev_cluster.demo.stage import SLUICE, Stage
from dev_cluster.layout import INSIDE

# Allocates one size after the other, prints the driver's answers, and waits a moment.
ALLOCATE = """
import ctypes, sys, time
cuda, context, address = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_uint64()
assert cuda.cuInit(0) == 0 and cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cuda.cuCtxSetCurrent(context) == 0
for mib in sys.argv[1:]:
    print(cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(int(mib) << 20)), flush=True)
time.sleep(20 if len(sys.argv) == 2 else 0)
"""


def enforce(stage: Stage) -> None:
    """A limit that the job cannot take away, and an escape that ends."""
    stage.step(
        "A limit that holds",
        "Of 30 GiB, 20 are granted; 10 more with the driver's context would be over, and are refused with CUDA's own "
        "error 2 (out of memory), whatever the job does to its environment; 9 more fit.",
    )
    allocate = ["/usr/bin/python3", "-c", ALLOCATE]
    held = stage.run(
        ["srun", "-w", "h100-1", "--gpu-mem=30G", "env", "-i", *allocate, "20480", "10240", "9216"],
        user="alice",
        shown="srun -w h100-1 --gpu-mem=30G env -i python3 allocate.py 20480 10240 9216    # MiB, one after the other",
    )
    stage.expect(held.splitlines()[:3] == ["0", "2", "0"], "only what is within the limit was granted")
    if stage.cluster.run(["unshare", "-Urm", "true"], user="bob", node="h100-1", check=False).returncode:
        return  # this kernel lets no user make namespaces: this way out is closed
    stage.step(
        "An escape ends",
        "A mount namespace of one's own, as rootless containers have it, takes the preloaded limiter away. The node "
        "agent's watchdog sees the memory all the same, ends the step, and writes it into the job's record.",
    )
    escape = 'mount --bind /dev/null /etc/ld.so.preload && exec env -i "$@"'
    began = time.monotonic()
    ended = stage.run(
        ["srun", "-w", "h100-1", "--gpu-mem=4G", "unshare", "-Urm", "sh", "-c", escape, "x", *allocate, "8192"],
        user="bob",
        shown="srun -w h100-1 --gpu-mem=4G escape python3 allocate.py 8192",
        check=False,
    )
    stage.expect("is ended" in ended and time.monotonic() - began < 30, "the watchdog ended the step, and said so")
    records = stage.cluster.folder / "nodes/h100-1/records"
    stage.wait("the record is there", lambda: any('"end"' in path.read_text() for path in records.glob("*.json")))
    job = max(int(path.stem) for path in records.glob("*.json"))
    shown = f"sluice agent record {job}"
    record = [*SLUICE, "agent", "record", "--records", f"{INSIDE}/nodes/h100-1/records", str(job)]
    stage.run(record, node="h100-1", shown=shown, lines=60)
