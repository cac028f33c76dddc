"""Which Slurm the cluster runs: the distribution's, one under a prefix, or that of another system's tree."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from sluice.base.errors import UsageError
from sluice.base.run import run_command
from sluice.base.slurm_version import SlurmVersion, parse_slurm_version
from sluice.plugin.builder import PluginBuild, packaged_build
from sluice.plugin.sources import distribution_source, release_name

_DAEMONS = ("slurmctld", "slurmd", "slurmdbd")
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True)
class SlurmTree:
    """Where programs are; paths are those inside `root`."""

    prefix: Path = Path("/usr")
    root: Path | None = None

    @property
    def path(self) -> str:
        """PATH of everything that runs in the cluster."""
        programs = "" if self.is_distribution else f"{self.prefix}/bin:{self.prefix}/sbin:"
        return programs + _SYSTEM_PATH

    @property
    def is_distribution(self) -> bool:
        """Whether Slurm looks for its configuration in /etc/slurm by itself."""
        return self.prefix == Path("/usr")

    def program(self, name: str) -> str | None:
        """Path (inside) of a program that the cluster needs, or None."""
        for folder in self.path.split(":"):
            outside = self._outside(Path(folder) / name)
            if outside.is_file() and os.access(outside, os.X_OK):
                return f"{folder}/{name}"
        return None

    def check(self, *, accounting: bool) -> None:
        """Raise UsageError when a program is missing."""
        place = f"{self.root or ''}{'' if self.is_distribution else self.prefix}" or "this system"
        if self.root is not None and not (self.root / "etc/passwd").is_file():
            raise UsageError(f"--root {self.root}: no system tree", remedy="make one with tools/debian-tree")
        if not self.is_distribution:
            for name in _DAEMONS:
                if not self._outside(self.prefix / "sbin" / name).is_file():
                    raise UsageError(
                        f"--slurm-prefix {self.prefix}: no sbin/{name} there",
                        remedy="name the prefix that Slurm was installed with",
                    )
        needed = ["slurmctld", "slurmd", "sinfo", "srun", "munged", "ldconfig"]
        if accounting:
            needed += ["slurmdbd", "sacctmgr", "mariadbd", "mariadb-install-db"]
        missing = [name for name in needed if self.program(name) is None]
        if missing:
            raise UsageError(
                f"{', '.join(missing)}: not installed in {place}",
                remedy="install slurmctld slurmd slurmdbd slurm-client slurm-wlm-basic-plugins munge mariadb-server",
            )

    def version(self) -> SlurmVersion:
        """What slurmctld says it is. Raises SluiceError."""
        program = self.program("slurmctld") or "slurmctld"
        command = [program, "-V"] if self.root is None else ["chroot", str(self.root), program, "-V"]
        return parse_slurm_version(run_command(command).stdout)

    def suite(self) -> str:
        """Debian's name of the tree's release. Raises SluiceError."""
        return release_name(self.root or Path("/"))

    def packaged(self) -> PluginBuild | None:
        """The plugins that a package brought for this Slurm, or None."""
        return packaged_build(self.version()) if self.root is None and self.is_distribution else None

    @property
    def source(self) -> Path | None:
        """The configured sources that tools/build-slurm left in the prefix, or None."""
        source = self._outside(self.prefix / "src")
        return None if self.is_distribution or not (source / "config.h").is_file() else source

    def headers(self) -> Path:
        """A folder with slurm/slurm.h: the development package's, else that of the sources. Raises SluiceError."""
        if (self.include / "slurm/slurm.h").is_file():
            return self.include
        return distribution_source(self.version(), suite=self.suite()).folder

    @property
    def include(self) -> Path:
        """Where the development package puts its headers."""
        return self._outside(self.prefix / "include")

    def _outside(self, path: Path) -> Path:
        return path if self.root is None else self.root / path.relative_to("/")
