"""Processes that are killed at any moment: exactly what they held is free again."""

from __future__ import annotations

import json
from collections.abc import Callable

from limited import Job, look
from sim_node import Node

from gpu_sim import holdings
from tests.programs.begin import CUDA

CONTEXT = 520
PROCESSES = 16

# A parent that never uses the GPU itself forks workers, kills one of them at a random moment, and forks another.
STORM = (
    CUDA
    + """
import random, signal
kills, limit = int(sys.argv[1]), int(sys.argv[2])
chance = random.Random(int(sys.argv[3]))
def work(seed):
    own, kept = random.Random(seed), []
    start()
    while True:
        mib = own.choice([0.25, 1, 7, 40, 150])
        kind = own.randrange(4)
        if kept and own.random() < 0.45:
            kept.pop(own.randrange(len(kept)))()
        elif kind == 0:
            handle = create(40)
            if handle > 0:
                kept.append(lambda handle=handle: release(handle))
        elif kind == 1:
            address = alloc_async(mib)
            if address > 0:
                kept.append(lambda address=address: cu.cuMemFreeAsync(c.c_uint64(address), None))
        else:
            address = alloc(mib)
            if address > 0:
                kept.append(lambda address=address: free(address))
def fork():
    seed = chance.randrange(1 << 30)
    pid = os.fork()
    if pid == 0:
        try:
            work(seed)
        finally:
            os._exit(9)
    return pid
workers = [fork() for _ in range(16)]
for _ in range(kills):
    time.sleep(chance.random() * 0.02)
    place = chance.randrange(16)
    os.kill(workers[place], signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(workers[place], 0)[1]) == -signal.SIGKILL
    workers[place] = fork()
step("storm over")
for pid in workers:
    os.kill(pid, signal.SIGSTOP)
step("stopped")
for pid in workers:
    os.kill(pid, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
start()
print(fill(), flush=True)
"""
)


def test_kills_among_sixteen_processes(make_job: Callable[..., Job], dgx: Node, full_scale: bool) -> None:
    limit = PROCESSES * CONTEXT + 2000
    job = make_job(limit)
    process = job.start(STORM, 1000 if full_scale else 120, limit, 7)
    assert process.stdout and process.stdin and process.stderr

    def go_on() -> str:
        assert process.stdin and process.stdout
        process.stdin.write("\n")
        process.stdin.flush()
        return process.stdout.readline().strip()

    assert process.stdout.readline() == "storm over\n", process.stderr.read()
    look(job.folder)
    with job.region() as region:
        assert region.usage(0).peak <= limit << 20
    assert go_on() == "stopped"
    # A process that is stopped within a call may be charged before it has the memory, but never the reverse.
    charged, held = job.charged(), sum(h.memory_mib for h in holdings(dgx.folder))
    assert held <= charged <= limit
    assert int(json.loads(go_on())) == limit - CONTEXT
    assert job.charged() == sum(h.memory_mib for h in holdings(dgx.folder)) or process.wait() == 0
    process.wait()
    assert job.charged() == 0
