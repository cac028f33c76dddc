"""The load, run inside a cluster as one of its users; standard library only.

    driver.py FOLDER RATE SEED [SHAPE...]

Submits RATE jobs a second (batch, held, arrays), each with the sbatch options of one of the SHAPEs; cancels some while
they wait and some while they run. Writes each answer of Slurm's to FOLDER/log: one JSON object a line. Ends when
FOLDER/stop is there and all calls have returned.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

MOST_AT_ONCE = 48
# What a job says of itself, in a file of its own: "start ID NODE PID UPTIME", "end ...", and "twice ..." when one that
# started before still runs (all nodes of the cluster share their process numbers). A process number that was given
# again belongs to no script of this job: its command line is looked at.
SCRIPT = """#!/bin/sh
said=$SLUICE_RUNS/$1.${SLURM_ARRAY_TASK_ID:-x}
say() { read -r up _ </proc/uptime; echo "$1 $SLURM_JOB_ID $SLURMD_NODENAME $$ $up" >>"$said"; }
if [ -e "$said" ]; then
    while read -r what _ _ pid _; do
        if [ "$what" = start ] && [ "$pid" != $$ ] && grep -qsa "slurm_script" "/proc/$pid/cmdline" &&
            grep -qsa "$1" "/proc/$pid/cmdline"; then say twice; fi
    done <"$said"
fi
say start
sleep "$2" &
wait $!
say end
"""


class Driver:
    """Threads that call Slurm's commands, and the log of their answers."""

    def __init__(self, folder: Path, rate: float, seed: int, shapes: list[str]) -> None:
        self.folder = folder
        self.rate = rate
        self.draw = random.Random(seed)
        self.seed = seed
        self.shapes = [shape.split() for shape in shapes] or [[]]
        self.slots = threading.Semaphore(MOST_AT_ONCE)
        self.lock = threading.Lock()
        self.log = (folder / "log").open("a", buffering=1)
        self.threads: list[threading.Thread] = []
        self.later: list[tuple[float, str, int]] = []  # when, what, job id

    def say(self, what: str, **fields: object) -> None:
        """One line of the log; the time is of the clock that jobs use."""
        with self.lock:
            self.log.write(json.dumps({"what": what, "up": time.clock_gettime(time.CLOCK_BOOTTIME), **fields}) + "\n")

    def call(self, *argv: str) -> subprocess.CompletedProcess[str]:
        """One of Slurm's commands."""
        return subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)

    def submit(self, tag: str, options: list[str], seconds: float, fate: str) -> None:
        """One job; `fate` is what becomes of it: run, cancel, release."""
        self.say("asked", tag=tag)
        begun = time.monotonic()
        done = self.call(
            "sbatch", "--parsable", "-o/dev/null", *options, f"{self.folder}/job.sh", tag, f"{seconds:.2f}"
        )
        took = time.monotonic() - begun
        if done.returncode != 0:
            self.say("refused", tag=tag, why=done.stderr.strip()[-200:], took=took)
            return
        number = int(done.stdout)
        self.say("accepted", tag=tag, id=number, took=took, tasks=3 if "--array=1-3" in options else 1, fate=fate)
        if fate != "run":
            with self.lock:
                self.later.append((time.monotonic() + self.draw.uniform(0.3, 4), fate, number))

    def do(self, what: str, number: int) -> None:
        """Cancel or release a job; repeated until Slurm has answered, as a user would."""
        argv = ("scancel", str(number)) if what == "cancel" else ("scontrol", "release", str(number))
        for _ in range(20):
            self.say("asks", do=what, id=number)
            done = self.call(*argv)
            if done.returncode == 0:
                self.say("done", do=what, id=number)
                return
            if "Invalid job id" in done.stderr or "already completing" in done.stderr:
                self.say("gone", do=what, id=number, why=done.stderr.strip()[-200:])
                return
            time.sleep(1)

    def start(self, function: object, *arguments: object) -> None:
        """In a thread, when there is a slot; else not at all."""

        def run() -> None:
            try:
                function(*arguments)  # type: ignore[operator]
            except (subprocess.TimeoutExpired, ValueError, OSError) as error:
                self.say("error", why=str(error)[-200:])
            finally:
                self.slots.release()

        if self.slots.acquire(blocking=False):
            thread = threading.Thread(target=run)
            thread.start()
            self.threads = [one for one in self.threads if one.is_alive()] + [thread]

    def job(self, number: int) -> tuple[str, list[str], float, str]:
        """The next job: its tag, options, run time and fate."""
        tag = f"t{self.seed}-{number}"
        kind = self.draw.random()
        seconds = self.draw.uniform(0.5, 5)
        if kind < 0.10:
            return tag, ["--begin=now+1hour"], seconds, "cancel"
        if kind < 0.25:
            return tag, [], self.draw.uniform(5, 20), "cancel"
        if kind < 0.33:
            return tag, ["--hold"], seconds, "release"
        if kind < 0.38:
            return tag, ["--array=1-3"], seconds, "run"
        return tag, [], seconds, "run"

    def work(self) -> None:
        """Until the file `stop` is there."""
        script = self.folder / "job.sh"
        script.write_text(SCRIPT)
        script.chmod(0o755)
        begun = time.monotonic()
        number = 0
        while not (self.folder / "stop").exists():
            while number < (time.monotonic() - begun) * self.rate:
                number += 1
                tag, options, seconds, fate = self.job(number)
                self.start(self.submit, tag, options + self.draw.choice(self.shapes), seconds, fate)
            self.take_up()
            time.sleep(0.02)
        deadline = time.monotonic() + 120
        while (self.later or any(one.is_alive() for one in self.threads)) and time.monotonic() < deadline:
            self.take_up(everything=True)
            time.sleep(0.05)
        self.say("over", left=len(self.later))

    def take_up(self, *, everything: bool = False) -> None:
        """Do what is due."""
        now = time.monotonic()
        with self.lock:
            due = [one for one in self.later if everything or one[0] <= now]
            self.later = [one for one in self.later if one not in due]
        for one in due:
            if not self.slots.acquire(blocking=False):
                with self.lock:
                    self.later.append(one)
                continue
            self.slots.release()
            self.start(self.do, one[1], one[2])


if __name__ == "__main__":
    os.umask(0)
    os.environ["SLUICE_RUNS"] = f"{sys.argv[1]}/runs"
    Driver(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]).work()
