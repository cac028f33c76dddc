"""Jobs of the accounting database one after the other, for reports on more of them than fit into memory.

`AccountingJob` of `SlurmClient.accounting_jobs` serves where a list will do. This streams sacct's output with the few
fields that usage is counted from, in windows of time that bound what sacct and slurmdbd hold at once.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from sluice.base.errors import SluiceError
from sluice.base.text import one_line
from sluice.slurm.answers import UNLIMITED, parse_tres
from sluice.slurm.commands import Commands, words_of
from sluice.slurm.text import accounting_filters, new_mark

_FIELDS = (
    "JobIDRaw", "JobID", "User", "Account", "QOS", "Partition", "State", "ExitCode", "Submit", "Eligible",
    "Start", "End", "ElapsedRaw", "TimelimitRaw", "NNodes", "NodeList", "ReqTRES", "AllocTRES", "AdminComment",
)  # fmt: skip
_NAMES = ("JobIDRaw", "JobName")
_BLOCK = 1 << 20
_UNKNOWN_ENERGY = 1 << 62  # slurmdbd shows NO_VAL64 where nothing was gathered


@dataclass(frozen=True, slots=True)
class Allocation:
    """One job, or one step where steps were asked for. Times in seconds since 1970, None: not yet or unknown."""

    id: int
    label: str  # "17", "17_3", "17+1", "17.batch"
    name: str
    user: str
    account: str
    qos: str
    partition: str
    state: str  # upper case, first word
    exit_code: str
    submit: int | None
    eligible: int | None
    start: int | None
    end: int | None
    elapsed_s: int
    limit_s: int | None
    node_count: int
    nodes: str
    requested: str  # TRES as sacct writes them
    allocated: str
    admin_comment: str

    @property
    def tres(self) -> dict[str, int]:
        """What was allocated; memory in MiB, energy in joules."""
        return dict(tres_of(self.allocated))

    @property
    def wait_s(self) -> int | None:
        """From being eligible to the start, sacct's Planned; None while it waits."""
        if self.start is None or self.eligible is None:
            return None
        return max(0, self.start - self.eligible)


@lru_cache(maxsize=4096)
def tres_of(text: str) -> dict[str, int]:
    """`parse_tres`, remembered: jobs ask for few different things. Not to be changed by callers."""
    found = parse_tres(text)
    if found.get("energy", 0) >= _UNKNOWN_ENERGY:
        del found["energy"]
    return found


def stream(
    commands: Commands,
    *,
    start: int | None = None,
    end: int | None = None,
    ids: Iterable[str] = (),
    users: Iterable[str] = (),
    accounts: Iterable[str] = (),
    partitions: Iterable[str] = (),
    states: Iterable[str] = (),
    steps: bool = False,
    names: bool = False,
    timeout: float = 600,
) -> Iterator[Allocation]:
    """Jobs that waited or ran between `start` and `end`, as the invoking user may see them.

    Each filter that is given must hold. `names`: job names, too, with a separate call: a user who reads the mark
    among sacct's options, and renames a job in time, changes no more than names. `timeout`: seconds for each call.
    Raises SluiceError with sacct's message.
    """
    words = [] if steps else ["--allocations"]
    words += accounting_filters(start, end, (), users, states)
    for option, values in (("--jobs", ids), ("--accounts", accounts), ("--partition", partitions)):
        if chosen := list(values):
            words.append(f"{option}={','.join(chosen)}")
    called = dict(_sacct(commands, _NAMES, words, timeout)) if names else {}
    for value in _sacct(commands, _FIELDS, words, timeout):
        yield _allocation(value, called.get(value[0], ""))


def _sacct(commands: Commands, fields: Sequence[str], filters: Sequence[str], timeout: float) -> Iterator[list[str]]:
    mark = new_mark()
    words = [
        "timeout",
        "--kill-after=5",
        str(int(timeout)),
        commands.program("sacct"),
        "--noheader",
        "--duplicates",
        "--parsable",
        f"--delimiter={mark}",
        f"--format={','.join(fields)}",
        *filters,
    ]
    with tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                words, stdout=subprocess.PIPE, stderr=errors, stdin=subprocess.DEVNULL, env=commands.environment()
            )
        except OSError as error:
            raise SluiceError(
                f"sacct: {error.strerror}", remedy="install Slurm's client commands, or name their folder with --prefix"
            ) from error
        with process:
            assert process.stdout is not None  # noqa: S101 - asked for above
            try:
                blocks = iter(lambda: process.stdout.read(_BLOCK), b"")  # type: ignore[union-attr]
                yield from _rows(blocks, mark.encode(), len(fields))
            finally:
                if process.poll() is None:
                    process.kill() if _abandoned(process) else process.wait()
        errors.seek(0)
        said = one_line(words_of("sacct", errors.read(4096).decode("utf-8", "replace")))
    if process.returncode == 124:
        raise SluiceError(
            f"sacct: no answer within {timeout:g} s", remedy="ask for a shorter time, or let days roll up"
        )
    if process.returncode != 0:
        raise SluiceError(f"sacct: {said or f'exit status {process.returncode}'}", remedy=_remedy(said))


def _remedy(said: str) -> str:
    if "accounting storage is disabled" in said:
        return "reports need slurmdbd: set AccountingStorageType in slurm.conf"
    if "persistent connection" in said or "the database" in said:
        return "check slurmdbd on its host: systemctl status slurmdbd"
    return "write users as `id` knows them" if "Invalid user id" in said else ""


def _abandoned(process: subprocess.Popen[bytes]) -> bool:
    """Whether its reader stopped in the middle: it would block on the pipe forever."""
    assert process.stdout is not None  # noqa: S101 - asked for
    try:
        process.wait(timeout=2)
    except subprocess.TimeoutExpired:
        return True
    return False


def _rows(blocks: Iterator[bytes], mark: bytes, width: int) -> Iterator[list[str]]:
    """Every field ends with the mark and every row with a line break; a free text may hold line breaks itself."""
    left = b""
    for block in blocks:
        fields = (left + block).split(mark)
        whole = (len(fields) - 1) // width * width
        for at in range(0, whole, width):
            first, *others = (field.decode("utf-8", "replace") for field in fields[at : at + width])
            yield [first.lstrip("\n"), *others]
        left = mark.join(fields[whole:])
    if left.strip():
        raise SluiceError("sacct: its answer is cut off", remedy="try again")


def _allocation(value: list[str], name: str) -> Allocation:
    number, state, limit = value[0], value[6], value[13]
    return Allocation(
        id=int(number.partition(".")[0]) if number.partition(".")[0].isdecimal() else 0,
        label=value[1],
        name=name,
        user=value[2],
        account=value[3],
        qos=value[4],
        partition=value[5],
        state=state.split(" ", 1)[0],
        exit_code=value[7],
        submit=_time(value[8]),
        eligible=_time(value[9]),
        start=_time(value[10]),
        end=_time(value[11]),
        elapsed_s=int(value[12]) if value[12].isdecimal() else 0,
        limit_s=int(limit) * 60 if limit.isdecimal() else UNLIMITED if limit == "UNLIMITED" else None,
        node_count=int(value[14]) if value[14].isdecimal() else 0,
        nodes="" if value[15] == "None assigned" else value[15],
        requested=value[16],
        allocated=value[17],
        admin_comment=value[18],
    )


def _time(text: str) -> int | None:
    return int(text) if text.isdecimal() else None
