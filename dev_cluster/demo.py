"""The main job on a cluster on this machine, as `make demo` shows it: every command is real, and so is what it prints.

Each step checks that it showed what it says; a step that did not ends the demonstration with exit status 1.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from dev_cluster.cluster import DevCluster, require_root
from dev_cluster.description import Sluice, load_description
from dev_cluster.layout import INSIDE, LOGIN
from policy.compiled import ClassRule, CompiledPolicy, Global, GpuClass, Tenant, Weights
from sluice_base.errors import SluiceError
from slurm_plugin.sources import SourcesUnavailableError

SLUICE = (sys.executable, "-m", "admin_cli.main")

# What a tenant would try: open every GPU of the node. No driver stands behind a simulated device file, so that one that
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

POLICY = CompiledPolicy(
    settings=Global(weight=Weights(fair_share=1000)),
    classes=[GpuClass(name="hopper", gpu_types=["h100"], gpu_memory_mib=81008)],
    tenants=[Tenant(account="physics", class_rules={"hopper": ClassRule(gpus_per_job=4)}), Tenant(account="biology")],
)

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


class Stage:
    """Prints what happens and why, runs it, and checks it."""

    def __init__(self, cluster: DevCluster) -> None:
        self.cluster = cluster
        self.colour = sys.stdout.isatty()
        self.steps = 0
        self.explain = ["explain", "--records", f"{INSIDE}/state/sluice.records"]
        self.plugins = True

    def step(self, title: str, why: str) -> None:
        """Announce a step."""
        self.steps += 1
        head = f"{self.steps}. {title}"
        print(f"\n\033[1m{head}\033[0m" if self.colour else f"\n{head}")
        print(textwrap.fill(why, 110, initial_indent="   ", subsequent_indent="   "), flush=True)

    def run(
        self,
        words: Sequence[str],
        *,
        user: str = "root",
        node: str = LOGIN,
        shown: str | None = None,
        lines: int = 40,
        check: bool = True,
    ) -> str:
        """Run a command inside the cluster, show it as typed and what it printed, and return that."""
        typed = shown or shlex.join(words)
        done = self.cluster.run(list(words), user=user, node=node, timeout=120, check=check)
        output = done.stdout + done.stderr
        prompt = f"   {user}@{node}$ "
        print(f"\033[36m{prompt}{typed}\033[0m" if self.colour else prompt + typed)
        printed = output.rstrip().splitlines()
        for line in printed[:lines]:
            print(f"   {line}")
        if len(printed) > lines:
            print(f"   ... {len(printed) - lines} more lines")
        sys.stdout.flush()
        return output

    def sluice(self, *words: str, node: str = LOGIN, lines: int = 40) -> str:
        """A command of Sluice itself."""
        return self.run([*SLUICE, *words], node=node, shown=shlex.join(["sluice", *words]), lines=lines)

    def start_explaind(self) -> None:
        """Start the explain service, where SlurmUser can read this checkout; else the records are read as root."""
        load = [sys.executable, "-c", "import slurm_plugin.explain_service"]
        if self.cluster.run(load, user="slurm", node="ctl1", check=False).returncode == 0:
            self.cluster.start_program("explaind", [*SLUICE, "explaind"], node="ctl1")
            self.explain = ["explain"]

    def expect(self, truth: bool, claim: str) -> None:
        """Stop unless what was just shown is what was claimed."""
        if not truth:
            raise SluiceError(f"demo, step {self.steps}: not as it should be: {claim}")

    def wait(self, what: str, done: Callable[[], bool], timeout: float = 180) -> None:
        """Wait quietly until something has happened."""
        deadline = time.monotonic() + timeout
        while not done():
            if time.monotonic() > deadline:
                raise SluiceError(f"demo, step {self.steps}: {what}: not within {timeout:g} s")
            time.sleep(0.2)


def discover(stage: Stage) -> None:
    """Probe, inventory, topology, and what became of them in Slurm."""
    stage.step(
        "Find the GPUs of a node",
        "The probe asks each vendor's own library. On this node NVIDIA's device numbers differ from its ordinals; "
        "Slurm has to be told the file, not the number.",
    )
    probed = stage.sluice("probe", node="mixed-1")
    stage.expect(all(word in probed for word in ("nvidia", "intel", "amd")), "all three vendors were found")

    stage.step("The whole cluster", "Every node left its inventory in the drop folder; nothing is typed by hand.")
    inventory = stage.sluice("inventory", "--by", "model", "--inventory-dir", f"{INSIDE}/inventory")
    stage.expect("H100" in inventory and "MI300X" in inventory, "models of several vendors are listed")

    stage.step(
        "How GPUs are linked", "The matrix known from nvidia-smi topo -m, for every vendor: here Intel's Xe Link."
    )
    stage.sluice("topo", node="max1550-1", lines=6)

    stage.step(
        "What Slurm was told",
        "From the inventories Sluice wrote gres.conf and the node lines. One shard is one MiB of GPU memory. The "
        "linter knows what slurmd and slurmctld would complain about.",
    )
    told = stage.run(["sinfo", "-N", "-o", "%.10N %.6t %G"])
    stage.expect("gpu:mi300x:8" in told and "gpu:h100:8" in told, "sinfo shows the GPUs")
    stage.sluice("lint", "--no-devices", "--inventory-dir", f"{INSIDE}/inventory")


def schedule(stage: Stage) -> None:
    """What Sluice's plugins in slurmctld do: refuse with a reason, pack, start gangs together, explain."""
    stage.step(
        "A request that the tenant may not make",
        "Alice's tenant may use four H100 in a job. Who asks for more is told so at submission.",
    )
    refused = stage.run(["sbatch", "--gres=gpu:h100:8", "--wrap=true"], user="alice", check=False)
    stage.expect("hopper" in refused and "4" in refused, "the refusal names the class and what is allowed")

    stage.step(
        "Packing: four shares of a GPU, then seven whole GPUs of that node",
        "First as stock Slurm does it: one line sets the plugins' level to off, without a restart. Then at level "
        "place: stock Slurm still checks and allocates, on the node and the GPUs that Sluice's core has chosen.",
    )
    for level in ("off", "place"):
        stage.sluice("plugin", "level", level, node="ctl1")
        stage.wait(f"level {level}", lambda level=level: _level(stage) == level)  # type: ignore[misc]
        shares = [_job(stage, "--gres=shard:19456", "-C", "nvlink8", "-J", "quarter", running=True) for _ in range(4)]
        whole = _job(stage, "--gres=gpu:h100:7", "-n8", "-J", "seven-gpus")
        time.sleep(3)
        stage.run(["squeue", "-u", "bob", "-o", "%.6i %.12j %.10T %.10N %.16b %r"])
        held = [_gpus(stage, job) for job in shares]
        print(f"   the four shares are on GPUs {', '.join(held)}", flush=True)
        if level == "place":
            stage.expect(len(set(held)) == 1, "the four shares are on one GPU")
            stage.expect(_state(stage, whole) == "RUNNING", "the seven whole GPUs were left over")
        _cancel(stage)

    stage.step(
        "A gang starts together or not at all",
        "Three jobs of one gang. The first two wait, with the reason in squeue; when the third is there and all have a "
        "place, they start in the same second.",
    )
    gang = []
    for number in (1, 2, 3):
        said = stage.run(
            [
                "sbatch",
                "--gang=ring:3",
                "--gres=gpu:2",
                "-n2",
                "-J",
                f"ring-{number}",
                "-o/dev/null",
                "--wrap=sleep 600",
            ],
            user="bob",
            shown=f"sbatch --gang=ring:3 --gres=gpu:2 -n2 -J ring-{number} train.sh",
        )
        gang.append(said.split()[-1])
        if number == 2:
            stage.wait("the reason is shown", lambda: "2 of 3" in stage.cluster.run(["squeue", "-o", "%r"]).stdout)
            stage.run(["squeue", "-u", "bob", "-o", "%.6i %.12j %.10T %.10N %r"])
    stage.wait("all run", lambda: all(_state(stage, job) == "RUNNING" for job in gang))
    stage.run(["squeue", "-u", "bob", "-o", "%.6i %.12j %.10T %.10N %.20S"])

    stage.step(
        "Why there, and why not yet",
        "Every decision is recorded, and can be replayed outside slurmctld with the same result. Users ask from the "
        "login host, and see their own jobs.",
    )
    waiting = _job(stage, "--gres=gpu:h100:8", "-n8", "-J", "whole-node", running=True)
    behind = _job(stage, "--gres=gpu:h100:5", "-n5", "-J", "behind")
    stage.wait("it was looked at", lambda: _state(stage, behind) == "PENDING" and bool(_explained(stage, behind)))
    stage.sluice(*stage.explain, gang[-1])
    explained = stage.sluice(*stage.explain, behind)
    stage.expect("wait" in explained and waiting != behind, "it is explained why the job waits")
    _cancel(stage)


def _job(stage: Stage, *options: str, running: bool = False) -> str:
    line = ["sbatch", "--parsable", "-t30", *options, "-o/dev/null", "--wrap=sleep 600"]
    job = stage.cluster.run(line, user="bob").stdout.strip()
    if running:
        stage.wait(f"job {job} runs", lambda: _state(stage, job) == "RUNNING")
    return job


def _state(stage: Stage, job: str) -> str:
    return stage.cluster.run(["squeue", "-h", "-j", job, "-o", "%T"]).stdout.strip()


def _gpus(stage: Stage, job: str) -> str:
    shown = stage.cluster.run(["scontrol", "show", "job", "-d", job]).stdout
    found = re.search(r" GRES=\S*?\((?:IDX:)?([^)]*)\)", shown)
    return found[1] if found else "?"


def _level(stage: Stage) -> str:
    text = stage.cluster.run(["cat", f"{INSIDE}/state/sluice.status.ctl1"]).stdout
    return str(json.loads(text)["level"])


def _explained(stage: Stage, job: str) -> str:
    done = stage.cluster.run([*SLUICE, *stage.explain, job], check=False)
    return done.stdout if done.returncode == 0 and "wait" in done.stdout else ""


def _cancel(stage: Stage) -> None:
    stage.cluster.run(["scancel", "-u", "bob"])
    stage.wait("no job is left", lambda: stage.cluster.run(["squeue", "-h"]).stdout == "")


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
        wish = f"--gpu-mem={gib}G" if stage.plugins else f"--gres=shard:{gib * 1024}"
        said = stage.run(
            ["sbatch", "-w", "rtx4090-1", wish, "-J", f"train-{user}", "--wrap", script],
            user=user,
            shown=f"sbatch -w rtx4090-1 {wish} -J train-{user} train.sh",
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


def _memory_in_use(stage: Stage) -> int:
    printed = stage.cluster.run([*SLUICE, "probe", "--json"], node="rtx4090-1", timeout=60).stdout
    from gres_probe.inventory import Inventory

    return sum(gpu.memory_used_mib or 0 for gpu in Inventory.from_json(printed, source="probe").gpus)


def report(stage: Stage) -> None:
    """What accounting knows."""
    stage.step("Who used what", "Slurm's accounting has every GPU and every MiB, by tenant.")
    fields = ["sacct", "-a", "-X", "-S", "now-1hour", "-o", "JobID,User,Account,AllocTRES%62,State,Elapsed"]
    stage.wait("accounting has all jobs", lambda: _settled(stage))
    accounted = stage.run(fields)
    stage.expect("gres/shard=10240" in accounted and "biology" in accounted, "shares of GPU memory are accounted")


def _settled(stage: Stage) -> bool:
    listed = stage.cluster.run(["sacct", "-a", "-X", "-n", "-P", "-S", "now-1hour", "-o", "State"]).stdout.split("\n")
    states = [state for state in listed if state]
    return len(states) >= 7 and not any(state.startswith(("RUNNING", "PENDING")) for state in states)


def main() -> int:
    """Run the whole demonstration; 0 when everything was as it should be."""
    try:
        require_root("make demo")
        with tempfile.TemporaryDirectory(prefix="sluice-demo-", dir="/run") as folder:
            _show(DevCluster(Path(folder) / "cluster"))
    except SluiceError as error:
        print(f"sluice: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nsluice: interrupted; the cluster is down", file=sys.stderr)
        return 130
    return 0


def _show(cluster: DevCluster) -> None:
    stage = Stage(cluster)
    try:
        stage.step(
            "A Slurm cluster on this machine",
            "munge, MariaDB, slurmdbd, two slurmctld and a slurmd for each node: Slurm's own daemons. Only the "
            "hardware is simulated, below the vendors' C libraries.",
        )
        description = load_description("demo")
        description.agent = True
        description.sluice = Sluice(level="place", policy=POLICY.render())
        try:
            cluster.up(description, attached=True, progress=lambda line: print(f"   {line}", flush=True))
        except SourcesUnavailableError as error:
            print(f"   Without Sluice's plugins in slurmctld, whose build needs Slurm's sources: {error}", flush=True)
            stage.plugins, description.sluice = False, None
            cluster.up(description, attached=True, progress=lambda line: print(f"   {line}", flush=True))
        discover(stage)
        submit(stage)
        if stage.plugins:
            stage.start_explaind()
            enforce(stage)
            schedule(stage)
        report(stage)
    finally:
        cluster.down()
    print("\nThe cluster is down; no process, mount or file of it is left. Try your own: sluice cluster up")


if __name__ == "__main__":
    sys.exit(main())
