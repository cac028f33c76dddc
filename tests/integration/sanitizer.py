"""What the sanitizer and slurmctld's own checks said in slurmctld's log, over all its starts."""

from __future__ import annotations

import re
from collections import Counter

START = "slurmctld: slurmctld version "  # the first words of each slurmctld


def sanitizer_ends(log: str) -> tuple[list[str], str]:
    """What the sanitizer said of each slurmctld that it ended, and what else is in the log."""
    reports, rest = [], []
    for process in re.split(f"^(?={START})", log, flags=re.M):
        before, error, after = process.partition("ERROR: AddressSanitizer: ")
        rest.append(before)
        if error:  # slurmctld's other threads go on while it is written
            lines = after.splitlines(keepends=True)
            rest += ["\n", *(line for line in lines if line.startswith("slurmctld: "))]
            reports.append("".join(line for line in lines if not line.startswith("slurmctld: ")))
    return reports, "".join(rest)


FREED = re.compile(r"attempting (?:double-free|free on address which was not malloc\(\)-ed)\b.* \(dbinx\)")


def is_stocks_own(report: str) -> bool:
    """Whether it is the one fault of slurmctld 22.05 itself that docs/scheduling-in-slurm.md describes: while a
    reconfiguration has no nodes, acct_storage_p_node_inx writes behind its bitmap, on the sanitizer's record of a block
    of its own, and is told so when it frees that."""
    what, *lines = report.splitlines()
    frames = [found.groups() for line in lines if (found := re.match(r" +#(\d+) 0x[0-9a-f]+ +(.*)", line))]
    freeing = [frame for place, (number, frame) in enumerate(frames) if int(number) == place]  # the first stack
    ours = any("sluice" in frame or "/slurm_plugin/" in frame for _, frame in frames)
    by_its_thread = any(frame.startswith("in acct_storage_p_node_inx ") for frame in freeing)
    return FREED.match(what) is not None and by_its_thread and not ours


def complaints(log: str) -> set[str]:
    """What the sanitizer, but for leaks, or slurmctld's own checks said, without numbers."""
    wrong = re.compile(
        r"AddressSanitizer|runtime error:|underflow|under-count|negative|fatal:|inconsisten", re.IGNORECASE
    )
    leaked = re.compile(r"SUMMARY: AddressSanitizer: \d+ byte\(s\) leaked in ")
    lines = [line for line in log.splitlines() if wrong.search(line) and not leaked.match(line)]
    return {re.sub(r"\d+", "#", line) for line in lines}


# A leak: bytes of each object, and the calls that led to it, the inner ones first, with their places in Slurm's files.
# Those further out are who starts a job, be it restored, replayed or new, main or a thread.
FRAMES = 5
Leak = tuple[int, tuple[str, ...]]


def leaks(text: str) -> list[Counter[Leak]]:
    """What the sanitizer says that each process has leaked, and of how many objects. Where our select plugin handed a
    call on to Slurm's own function of the same name, it is left out: on stock Slurm there is nothing between."""
    *reports, _ = re.split(r"^SUMMARY: AddressSanitizer: (\d+) byte\(s\) leaked in .*\n", text, flags=re.M)
    processes = []
    for report, said in zip(reports[::2], reports[1::2], strict=True):
        found: Counter[Leak] = Counter()
        total = 0
        for size, count, stack in LEAK.findall(report):
            frames = re.findall(r"^ +#\d+ 0x[0-9a-f]*([0-9a-f]{3}) (?:in (.*)| .*)$", stack, re.M)
            # A plugin that Slurm has unloaded has no name, or another's stands there: its place in the page is left.
            led = [name or f"...{place}" for place, name in frames if not HANDED_ON.match(name)]
            found[int(size) // int(count), tuple(led[:FRAMES])] += int(count)
            total += int(size)
        assert total == int(said), f"a report that is not understood: {report[-20000:]}"
        processes.append(found)
    return processes


def most(processes: list[Counter[Leak]]) -> Counter[Leak]:
    """Of each leak the most that one process has."""
    found: Counter[Leak] = Counter()
    for process in processes:
        found |= process
    return found


LEAK = re.compile(
    r"^(?:Direct|Indirect) leak of (\d+) byte\(s\) in (\d+) object\(s\) allocated from:\n((?: +#.*\n)+)", re.M
)
HANDED_ON = re.compile(r"select_p_\w+ \S*/slurm_plugin/entry/select_cons_tres\.c:\d+$")
