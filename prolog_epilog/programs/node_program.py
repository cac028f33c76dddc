#!/usr/bin/python3 -IS
"""What slurmd and slurmstepd start on a node: one program under four names, each of which asks the node agent.

sluice-prolog, sluice-epilog   Prolog and Epilog of slurm.conf, as root
sluice-task-init               the SPANK plugin's helper, as root, before a task becomes its user
sluice-task-prolog             TaskProlog, as the job's user in the task's cgroup

The standard library alone, and no site packages, as this starts with every job and task. No answer, a bad answer and
a slow one are failures: a job with GPUs is not run without its limits. A job without GPUs does not need the agent.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import sys

SOCKET = "/run/sluice/agent.sock"
MOST = 1 << 20
SECONDS = 20.0


class RefusedError(Exception):
    """Why not."""


class Agent:
    """The node agent."""

    def __init__(self) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(SECONDS)
        self.rest = b""
        try:
            self.socket.connect(SOCKET)
        except OSError as error:
            raise RefusedError(
                f"the node agent does not answer at {SOCKET} ({error.strerror or error}); "
                "start it: systemctl start sluice-agent"
            ) from None

    def ask(self, **request: object) -> dict[str, Any]:  # type: ignore[name-defined]  # noqa: F821 - typing takes long to load
        """The answer's content. Raises RefusedError."""
        try:
            self.socket.sendall(json.dumps(request).encode() + b"\n")
            while b"\n" not in self.rest:
                part = self.socket.recv(1 << 16)
                if not part or len(self.rest) > MOST:
                    raise RefusedError("the node agent broke off; see its log: journalctl -u sluice-agent")
                self.rest += part
        except TimeoutError:
            raise RefusedError(
                f"the node agent gave no answer within {SECONDS:g} s; see: journalctl -u sluice-agent"
            ) from None
        except OSError as error:
            raise RefusedError(
                f"the node agent broke off ({error.strerror}); see: journalctl -u sluice-agent"
            ) from None
        line, _, self.rest = self.rest.partition(b"\n")
        try:
            answer = json.loads(line)
            if "error" in answer:
                raise RefusedError(str(answer["error"]))
            return answer["ok"]
        except (ValueError, KeyError, TypeError):
            raise RefusedError(
                "the node agent's answer makes no sense; are agent and programs of one version?"
            ) from None


def number(name: str) -> int:
    """A variable that Slurm sets to a number."""
    text = os.environ.get(name, "")
    if not text.isdecimal():
        raise RefusedError(f"{name}={text!r} is no number")
    return int(text)


def numbers(name: str) -> list[int]:
    """A variable that holds a list of GPUs' numbers; empty where it is not set."""
    text = os.environ.get(name, "")
    if not all(part.isdecimal() for part in text.split(",") if text):
        raise RefusedError(f"{name}={text!r} is no list of numbers")
    return [int(part) for part in text.split(",") if text]


def prolog() -> None:
    """Register a job that has GPUs."""
    if numbers("SLURM_JOB_GPUS"):
        Agent().ask(
            do="prolog",
            job=number("SLURM_JOB_ID"),
            uid=number("SLURM_JOB_UID"),
            user=os.environ.get("SLURM_JOB_USER", ""),
            account=os.environ.get("SLURM_JOB_ACCOUNT", ""),
            partition=os.environ.get("SLURM_JOB_PARTITION", ""),
            gpus=numbers("SLURM_JOB_GPUS"),
        )


def epilog() -> None:
    """End what a job left, and take back its GPUs."""
    if numbers("SLURM_JOB_GPUS"):
        unclean = Agent().ask(do="epilog", job=number("SLURM_JOB_ID"))["unclean"]
        if unclean:
            raise RefusedError("; ".join(unclean))


def task_init() -> None:
    """Tell the SPANK plugin where the job's limits lie."""
    shards = number("SLUICE_SHARDS") if os.environ.get("SLUICE_SHARDS") else 0
    answer = Agent().ask(
        do="limit",
        job=number("SLUICE_JOB"),
        uid=number("SLUICE_UID"),
        whole=os.environ.get("SLUICE_STEP") == "whole",
        gpus=numbers("SLUICE_GPUS"),
        shards=shards,
    )
    print(f"region {answer['region']}" if answer["region"] else "none")


def opens(path: str) -> bool:
    """Whether this process may open a device file; a device without a driver behind it counts, too."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError as error:
        return error.errno not in (errno.EPERM, errno.EACCES, errno.ENOENT)
    return True


def task_prolog() -> None:
    """Check what the task can open, and tell slurmstepd what to put into its environment."""
    if not numbers("SLURM_STEP_GPUS") and not numbers("SLURM_JOB_GPUS"):
        return
    agent = Agent()
    files = agent.ask(do="devices")["files"]
    for name, value in agent.ask(do="task", open=[path for path in files if opens(path)])["export"].items():
        if name not in os.environ:
            print(f"export {name}={value}")


def main() -> int:
    """Run what the name says."""
    name = os.path.basename(sys.argv[0])  # noqa: PTH119 - pathlib takes longer to load than all of this
    try:
        {
            "sluice-prolog": prolog,
            "sluice-epilog": epilog,
            "sluice-task-init": task_init,
            "sluice-task-prolog": task_prolog,
        }[name]()
    except RefusedError as why:
        # The task's helper has one pipe for both; slurmd logs standard error of the others.
        print(f"{name}: {why}", file=sys.stdout if name == "sluice-task-init" else sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
