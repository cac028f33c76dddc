"""Chapter: jobs that move, so that a large one need not wait."""

from __future__ import annotations

from dev_cluster.demo.stage import Stage
from dev_cluster.layout import INSIDE

# Counts from what it has saved, and saves when it starts and when it is asked to.
COUNT = """f={file}; n=$(cat $f 2>/dev/null || echo 0); echo $n >> $f.starts
save() {{ echo $n > $f.new; mv $f.new $f; touch "$SLUICE_CHECKPOINT_FILE"; }}
trap save USR1; save; while :; do n=$((n+1)); sleep 0.1; done"""
_FOLDER = "counts"
_NODES = ("h100-1", "l40s-1")


def moves(stage: Stage) -> None:
    """Two small jobs leave a node for a job that needs all of it, and go on where they were."""
    stage.step(
        "Small jobs move, and a large one starts",
        "Two jobs of one GPU count, and save when they are asked to (SIGUSR1). They are on the only node with eight "
        "H100, and a job that needs all eight fits nowhere. The planner asks both to save, requeues them when they "
        "have, and keeps places for them on another node.",
    )
    (stage.cluster.folder / _FOLDER).mkdir(mode=0o777)
    (stage.cluster.folder / _FOLDER).chmod(0o777)
    elsewhere = ["-w", _NODES[1], "--gres=gpu:4", "--wrap=sleep 600"]
    filler = stage.cluster.run(["sbatch", "--parsable", "-o/dev/null", *elsewhere], user="bob").stdout.strip()
    stage.wait("the other node is full", lambda: stage.state(filler) == "RUNNING")
    small = [_count(stage, number) for number in (1, 2)]
    stage.wait("both count", lambda: all((stage.cluster.folder / _FOLDER / f"{n}.starts").exists() for n in (1, 2)))
    stage.cluster.run(["scancel", filler])
    said = stage.run(
        ["sbatch", "-t30", "--gres=gpu:h100:8", "-n8", "-J", "large", "-o/dev/null", "--wrap=sleep 600"],
        user="bob",
        shown="sbatch --gres=gpu:h100:8 -n8 -J large train.sh",
    )
    large = said.split()[-1]
    stage.wait("all three run", lambda: all(stage.state(job) == "RUNNING" for job in (large, *small)))
    stage.run(["squeue", "-u", "bob", "-o", "%.6i %.10j %.10T %.10N %.16b"])
    for number, job in enumerate(small, 1):
        stage.wait(f"job {job} goes on", lambda number=number: len(_starts(stage, number)) == 2)  # type: ignore[misc]
        first, again = _starts(stage, number)
        print(f"   job {job} began at {first}, and went on from {again} on {_NODES[1]}", flush=True)
        stage.expect(first == 0 < again == _saved(stage, number), "it went on from what it had saved")
    explained = stage.sluice("explain", small[0])
    stage.expect(f"to make room for job {large}" in explained, "it is explained why the job moved")
    stage.cluster.run(["scancel", "-u", "bob"])
    stage.wait("no job is left", lambda: stage.cluster.run(["squeue", "-h"]).stdout == "")


def _count(stage: Stage, number: int) -> str:
    """Submit one; it has started when this returns."""
    others = ",".join(name for name in stage.cluster.nodes if name not in _NODES)
    script = COUNT.format(file=INSIDE / _FOLDER / str(number))
    job = stage.run(
        [
            "sbatch",
            "--parsable",
            "-t30",
            "--checkpoint=app",
            "--gres=gpu:1",
            f"--exclude={others}",
            "-Jcount",
            "-o/dev/null",
            f"--wrap={script}",
        ],
        user="bob",
        shown="sbatch --parsable --checkpoint=app --gres=gpu:1 -J count count.sh",
    ).strip()
    stage.wait(f"job {job} runs", lambda: stage.state(job) == "RUNNING")
    return job


def _starts(stage: Stage, number: int) -> list[int]:
    text = (stage.cluster.folder / _FOLDER / f"{number}.starts").read_text()
    return [int(line) for line in text.split()]


def _saved(stage: Stage, number: int) -> int:
    return int((stage.cluster.folder / _FOLDER / str(number)).read_text())
