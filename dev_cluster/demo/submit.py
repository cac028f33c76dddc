"""Chapter: jobs of several tenants on GPUs of several vendors."""

from __future__ import annotations

import shlex

from dev_cluster.demo.stage import SLUICE, Stage

# What a tenant would try: open every GPU of the node. A simulated device file has no driver, so that one that
# may be opened answers "No such device or address", and one that may not "Operation not permitted".
OPEN_EVERY_GPU = """
import errno, glob, os
for path in sorted(glob.glob("/dev/nvidia[0-9]*") + glob.glob("/dev/dri/renderD*")):
    try:
        os.close(os.open(path, os.O_RDWR))
        answer = "opens"
    except OSError as error:
        answer = "opens" if error.errno == errno.ENXIO else "refused: " + os.strerror(error.errno)
    print(f"{path}  {answer}")
"""

# Allocates device memory through the simulated driver's own C interface, as a training run would, and holds it.
HOLD_MEMORY = """
import ctypes, sys, time
cuda = ctypes.CDLL("libcuda.so.1")
context, address = ctypes.c_void_p(), ctypes.c_uint64()
for call in (cuda.cuInit(0), cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0),
             cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(int(sys.argv[1]) << 20))):
    assert call == 0, f"CUDA error {call}"
print("allocated", sys.argv[1], "MiB", flush=True)
time.sleep(600)
"""


def submit(stage: Stage) -> None:
    """Jobs of two tenants on each vendor, across nodes, and on one shared GPU."""
    stage.step(
        "Two tenants, three vendors",
        "Plain srun. Each job sees its GPUs through its vendor's own variable, as its vendor's libraries expect.",
    )
    variables = "CUDA_VISIBLE_DEVICES|ROCR_VISIBLE_DEVICES|ZE_AFFINITY_MASK"
    show = f"echo $(id -un) on $(hostname): $(env | grep -E '^({variables})=')"
    for user, gres, variable in (
        ("alice", "gpu:h100:2", "CUDA_VISIBLE_DEVICES"),
        ("bob", "gpu:mi300x:4", "ROCR_VISIBLE_DEVICES"),
        ("bob", "gpu:max1550:1", "ZE_AFFINITY_MASK"),
    ):
        printed = stage.run(["srun", f"--gres={gres}", "bash", "-c", show], user=user, shown=f"srun --gres={gres} ...")
        stage.expect(variable in printed and f"{user} on" in printed, f"{user}'s job got {variable}")

    stage.step("Across nodes", "One job, a GPU on each of three nodes, NVIDIA only (features come from the inventory).")
    hosts = stage.run(["srun", "-N3", "--gres=gpu:1", "--constraint=nvidia", "hostname"], user="alice")
    stage.expect(len(set(hosts.split())) == 3, "three hosts answered")

    stage.step(
        "Isolation",
        "A job that was given one GPU tries to open all of its node's; the kernel's device cgroup decides.",
    )
    opened = stage.run(
        ["srun", "-w", "h100-1", "--gres=gpu:1", "/usr/bin/python3", "-c", OPEN_EVERY_GPU],
        user="bob",
        shown="srun -w h100-1 --gres=gpu:1 python3 open-every-gpu.py",
    )
    stage.expect(opened.count("opens") == 1 and opened.count("refused") == 7, "one of eight GPUs opens")

    stage.step(
        "Two tenants on one GPU",
        "--gpu-mem=10G becomes 10,240 shards of one MiB. Alice's 10 GiB and Bob's 12 GiB fit one RTX 4090 of 24 GB; "
        "what their processes allocate on the (simulated) device is what the probe sees.",
    )
    jobs: list[str] = []
    for user, gib in (("alice", 10), ("bob", 12)):
        script = f"exec /usr/bin/python3 -c {shlex.quote(HOLD_MEMORY)} {gib * 1024 - 640}"
        request = f"--gpu-mem={gib}G" if stage.plugins else f"--gres=shard:{gib * 1024}"
        said = stage.run(
            ["sbatch", "-w", "rtx4090-1", request, "-J", f"train-{user}", "--wrap", script],
            user=user,
            shown=f"sbatch -w rtx4090-1 {request} -J train-{user} train.sh",
        )
        jobs.append(said.split()[-1])
    stage.wait("both jobs hold their memory", lambda: _memory_in_use(stage) > 21_000)
    stage.run(["squeue", "-o", "%.6i %.12j %.8u %.2t %.10N %b"])
    used = stage.run(
        [*SLUICE, "probe", "-o", "index,model,memory,used"],
        node="rtx4090-1",
        shown="sluice probe -o index,model,memory,used",
    )
    stage.expect(used.count(" 0M") == 3, "one of four GPUs holds the memory of both")
    stage.run(["scancel", *jobs])


def _memory_in_use(stage: Stage) -> int:
    printed = stage.cluster.run([*SLUICE, "probe", "--json"], node="rtx4090-1", timeout=60).stdout
    from gres_probe.inventory import Inventory

    return sum(gpu.memory_used_mib or 0 for gpu in Inventory.from_json(printed, source="probe").gpus)
