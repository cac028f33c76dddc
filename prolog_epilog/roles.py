"""Roles inside of one job (`--gpu-role`): which GPUs each has, as slurmctld laid them out, and which role a task has.

The layout comes with the job's prolog (slurm_plugin/hook/roles.c). Where that plugin is not loaded it is the user's own
text: only its length bounds the work here, and it changes nothing but the environment of the job's own tasks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from gres_probe.cores import fold_ranges
from prolog_epilog.refusals import Refusal
from prolog_epilog.state import RefusalError

MOST_TEXT = 32 << 10
"""Characters of a layout, as slurmctld bounds it."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,15}", re.ASCII)
_RANGE = re.compile(r"(\d{1,3})(?:-(\d{1,3}))?", re.ASCII)
_TASKS = re.compile(r"(\d{1,9})(?:\(x(\d{1,9})\))?", re.ASCII)
_MOST_GPUS = 64  # of a node
_MOST_ROLES = 8
_ROCR = "ROCR_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Step:
    """What a task says of its step. Counts are of this node, but for `tasks`."""

    local: int = 0  # the task's number on this node
    rank: int = 0  # and in the step
    size: int = 1  # tasks of the step
    node: int = 0  # this node's number in the step
    tasks: str = ""  # on each node of the step, as SLURM_STEP_TASKS_PER_NODE; empty: a batch script
    gpus: int = 0  # of the step on this node; 0: not known
    bound: bool = False  # Slurm has bound each task to GPUs of its own
    role: str = ""  # that its srun named

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> Step:
        """From a task's request; what is not as the task prolog sends it is left out."""
        counts = ("local", "rank", "size", "node", "gpus")
        numbers = {name: said[name] for name in counts if _is_count(said.get(name))}
        texts = {name: said[name] for name in ("tasks", "role") if isinstance(said.get(name), str)}
        return cls(**numbers, **texts, bound=said.get("bound") is True)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31


@dataclass(frozen=True)
class Given:
    """A task's role, its GPUs by index, and its place among the role's tasks; `rank` is None where it is not known."""

    role: str
    gpus: tuple[int, ...]
    rank: int | None = None
    size: int | None = None


@dataclass(frozen=True)
class Layout:
    """The GPUs of each role, node by node in the job's order."""

    roles: tuple[str, ...]
    nodes: dict[str, tuple[tuple[int, ...], ...]]  # of each role, in their order

    @classmethod
    @lru_cache(maxsize=16)  # each task of a job asks
    def read(cls, text: str) -> Layout:
        """From "prefill,decode n1=0-3/4-7 n2=/0-7". Raises ValueError for anything else."""
        names, *nodes = text.split(" ")
        roles = tuple(names.split(","))
        several = len(set(roles)) == len(roles) <= _MOST_ROLES
        if len(text) > MOST_TEXT or not (several and all(map(_NAME.fullmatch, roles))):
            raise ValueError(f"{names[:64]!r} is not a list of roles")
        found: dict[str, tuple[tuple[int, ...], ...]] = {}
        for node in nodes:
            name, equals, lists = node.partition("=")
            gpus = tuple(_numbers(one) for one in lists.split("/"))
            if len(gpus) != len(roles) or not (name and equals) or name in found:
                raise ValueError(f"{node[:64]!r} is not NODE=GPUS/GPUS...")
            found[name] = gpus
        return cls(roles, found)

    def gpus_of(self, role: str, node: str) -> tuple[int, ...]:
        """The role's GPUs on a node."""
        return self.nodes[node][self.roles.index(role)] if node in self.nodes else ()

    def nodes_of(self, role: str) -> list[str]:
        """The nodes where it has some."""
        index = self.roles.index(role)
        return [node for node, gpus in self.nodes.items() if gpus[index]]

    def exports(self, given: Given | None) -> dict[str, str]:
        """The variables for a task. A batch script and other tasks without a role find where the roles are."""
        export = {"SLUICE_GPU_ROLES": " ".join(f"{role}={self._shown(role)}" for role in self.roles)}
        for role in self.roles:
            export[f"SLUICE_GPU_ROLE_NODES_{role}"] = ",".join(self.nodes_of(role))
        if given is not None:
            export["SLUICE_GPU_ROLE"] = given.role
            if given.rank is not None:
                export["SLUICE_GPU_ROLE_RANK"] = str(given.rank)
                export["SLUICE_GPU_ROLE_SIZE"] = str(given.size)
        return export

    def _shown(self, role: str) -> str:
        return "+".join(f"{node}:{fold_ranges(self.gpus_of(role, node))}" for node in self.nodes_of(role))

    def given_to(self, step: Step, node: str, open: Iterable[int]) -> Given | None:
        """What a task on this node has that can open these GPUs; None: GPUs of several roles, as a batch script has.

        Raises RefusalError where its srun names a role that it cannot have.
        """
        own = sorted(open)
        if step.role:
            return self._of_step(step, node, own)
        counts = [(role, len(set(own) & set(self.gpus_of(role, node)))) for role in self.roles]
        all_here = sum(map(len, self.nodes.get(node, ())))
        tasks = _tasks_of(step.tasks, len(self.nodes))
        here = tasks[step.node] if tasks is not None and step.node < len(tasks) else 1
        if step.bound or len(own) < step.gpus:
            role = next((role for role, count in counts if count == len(own)), None)
            if role is None:
                return None
            given = Given(role, tuple(own))
            before = sum(gpu < own[0] for gpu in self.gpus_of(role, node)) // len(own)
            return self._ranked(given, tasks, node, before) if len(own) * here == all_here else given
        firsts = _first_tasks(here, [count for _, count in counts])
        for (role, _), first, end in zip(counts, firsts or (), (firsts or ())[1:], strict=False):
            if first <= step.local < end:
                given = Given(role, tuple(gpu for gpu in own if gpu in self.gpus_of(role, node)))
                return self._ranked(given, tasks, node, step.local - first) if len(own) == all_here else given
        return None

    def _of_step(self, step: Step, node: str, own: list[int]) -> Given:
        """All tasks of the step have the role, and share its GPUs of their node."""
        if step.role not in self.roles:
            raise RefusalError(
                f"--gpu-role={step.role[:16]}: no role of the job",
                Refusal.ROLE_UNKNOWN,
                remedy=f"name one of {', '.join(self.roles)}",
            )
        gpus = tuple(gpu for gpu in self.gpus_of(step.role, node) if gpu in own)
        if not gpus:
            nodes = ",".join(self.nodes_of(step.role)[:16])
            raise RefusalError(
                f"--gpu-role={step.role}: the step has none of the role's GPUs on {node}",
                Refusal.ROLE_NOT_HERE,
                remedy=f"start it on {nodes} (srun -w), with --overlap where other steps run, and without "
                "--gpus-per-task and --gpu-bind",
            )
        return Given(step.role, gpus, step.rank, step.size)

    def _ranked(self, given: Given, tasks: list[int] | None, node: str, before_here: int) -> Given:
        """With its place, where the step has all nodes of the job, so that all count alike."""
        if tasks is None or len(tasks) != len(self.nodes):
            return given
        index = self.roles.index(given.role)
        before = size = 0
        for name, count in zip(self.nodes, tasks, strict=True):
            firsts = _first_tasks(count, [len(gpus) for gpus in self.nodes[name]])
            if firsts is None:
                return given
            if name == node:
                before = size
            size += firsts[index + 1] - firsts[index]
        return Given(given.role, given.gpus, before + before_here, size)


def _first_tasks(tasks: int, gpus: Sequence[int]) -> list[int] | None:
    """The first task of each role on a node, and the end: its tasks are divided as its GPUs are, in their order.

    None: a task would have GPUs of two roles.
    """
    firsts, before, total = [0], 0, sum(gpus)
    for count in gpus:
        before += count
        first = -(-before * tasks // total) if total else 0
        if total and tasks and first * total // tasks != before:
            return None
        firsts.append(first)
    return firsts


def _tasks_of(text: str, most: int) -> list[int] | None:
    """ "4(x2),1" as [4, 4, 1]; None for anything else, and for more than `most` nodes."""
    found: list[int] = []
    for part in text.split(","):
        match = _TASKS.fullmatch(part)
        times = int(match[2] or 1) if match else 0
        if match is None or len(found) + times > most:
            return None
        found += [int(match[1])] * times
    return found


def _numbers(text: str) -> tuple[int, ...]:
    """ "0-2,5" as (0, 1, 2, 5); empty: none. Raises ValueError."""
    found: list[int] = []
    for part in text.split(",") if text else ():
        match = _RANGE.fullmatch(part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not first <= last < _MOST_GPUS or (found and first <= found[-1]):
            raise ValueError(f"{text[:64]!r} is not a list of GPUs")
        found += range(first, last + 1)
    return tuple(found)


def narrowed(visible: Mapping[str, Any], open: Sequence[int], kept: Iterable[int], vendor: str) -> dict[str, str]:
    """Slurm's lists of visible devices (CUDA_VISIBLE_DEVICES, ...) with only those that are kept.

    `open`: the GPUs that a list names, in its order. A list of another length is its user's, and stays. HIP and OpenCL
    of AMD number what ROCR_VISIBLE_DEVICES leaves.
    """
    chosen = set(kept)
    found: dict[str, str] = {}
    for name, value in visible.items():
        devices = value.split(",") if isinstance(value, str) else []
        if len(devices) == len(open) and len(chosen) < len(open):
            found[name] = ",".join(device for device, gpu in zip(devices, open, strict=True) if gpu in chosen)
    if vendor == "amd" and _ROCR in found:
        found |= {name: ",".join(map(str, range(len(chosen)))) for name in found if name != _ROCR}
    return found
