"""Slurm's commands, of any installation and configuration, with output that the caller's settings do not change."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from sluice.base.errors import UsageError
from sluice.base.run import CommandError, read_command, run_command

# Users set these to shape what commands print (SQUEUE_FORMAT, SINFO_SORT, ...): they would break what we parse.
_SHAPING = (
    "SQUEUE_",
    "SINFO_",
    "SACCT_",
    "SCONTROL_",
    "SLURM_TIME_FORMAT",
    "SLURM_BITSTR_LEN",
    "SLURM_JSON",
    "SLURM_YAML",
)


def words_of(name: str, text: str) -> str:
    """A command's message, its lines one after the other, each once and without its own name and ``error`` before."""
    lines = [line.strip().removeprefix(f"{name}: ").removeprefix("error: ") for line in text.splitlines()]
    return "; ".join(dict.fromkeys(line for line in lines if line))


@dataclass(frozen=True, slots=True)
class Commands:
    """Where Slurm's commands are and which cluster they talk to.

    `prefix`: the installation, e.g. /opt/slurm (None: what PATH finds); `conf`: slurm.conf or its folder (None: what
    SLURM_CONF or Slurm's default says); `timeout`: seconds for one command.
    """

    prefix: Path | None = None
    conf: Path | None = None
    timeout: float = 60

    def __post_init__(self) -> None:
        if self.conf is not None and not self.conf_file().is_file():
            raise UsageError(f"{self.conf_file()}: no such file", remedy="name slurm.conf or the folder that holds it")

    def conf_file(self) -> Path:
        """The slurm.conf in use; only with `conf`."""
        if self.conf is None:
            raise ValueError("no configuration was named")
        return self.conf / "slurm.conf" if self.conf.is_dir() else self.conf

    def program(self, name: str) -> str:
        """The path of a command, or its name for PATH to find. Raises UsageError when `prefix` has none."""
        if self.prefix is None:
            return name
        for folder in ("bin", "sbin", "usr/bin", "usr/sbin"):
            if os.access(self.prefix / folder / name, os.X_OK):
                return str(self.prefix / folder / name)
        raise UsageError(f"{self.prefix}: no {name} in its bin or sbin", remedy="name the folder Slurm is installed in")

    def environment(self) -> dict[str, str]:
        """The environment of each command: C locale, times as seconds since 1970, nothing of the caller's formats."""
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(_SHAPING)}
        if self.conf is not None:
            inherited["SLURM_CONF"] = str(self.conf_file())
        return inherited | {"LC_ALL": "C", "SLURM_TIME_FORMAT": "%s", "SLURM_BITSTR_LEN": "0"}

    def run(
        self,
        name: str,
        *arguments: str,
        check: bool = True,
        env: Mapping[str, str] | None = None,
        input_text: str | None = None,
        timeout: float | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run one command to its end. Raises CommandError when it fails, is missing or takes too long."""
        done = run_command(
            [self.program(name), *arguments],
            timeout=timeout or self.timeout,
            env=env or self.environment(),
            input_text=input_text,
            check=False,
        )
        if check and done.returncode != 0:
            said = words_of(name, done.stderr) or words_of(name, done.stdout) or f"exit status {done.returncode}"
            raise CommandError(f"{name}: {said}", returncode=done.returncode, stderr=done.stderr)
        return done

    def read(self, name: str, *arguments: str, env: Mapping[str, str]) -> Iterator[bytes]:
        """What one command prints, piece by piece (`read_command`). Raises CommandError."""
        try:
            yield from read_command([self.program(name), *arguments], timeout=self.timeout, env=env)
        except CommandError as error:
            if error.returncode is None:
                raise
            said = words_of(name, error.stderr) or f"exit status {error.returncode}"
            raise CommandError(f"{name}: {said}", returncode=error.returncode, stderr=error.stderr) from error

    def output(self, name: str, *arguments: str) -> str:
        """What the command printed."""
        return self.run(name, *arguments).stdout
