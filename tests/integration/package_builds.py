"""Sluice's Debian packages of the checked out commit, built once and kept in build/packages."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from sluice.base.run import run_command
from sluice.plugin.sources import release_name

ROOT = Path(__file__).resolve().parents[2]
_NEWER = '\nextern const char sluice_newer[];\nconst char sluice_newer[] = "newer";\n'
_WHO = ["-c", "user.name=Test", "-c", "user.email=test@localhost"]


def build(checkout: Path, suite: str = "") -> Path:
    """The folder with the packages of a checkout, for a Debian release: this machine's, unless `suite` is another's."""
    if suite in ("", release_name()):
        run_command(["make", "-C", checkout, "deb"], timeout=1800)
    else:
        run_command([ROOT / "tools/deb-of", suite, checkout / "dist", checkout], timeout=3600)
    return checkout / "dist"


def clone(folder: Path, origin: Path = ROOT) -> Path:
    """A checkout of a checkout's commit, with Slurm's sources if they were fetched before."""
    run_command(["git", "clone", "-q", origin, folder], timeout=300)
    for source in (origin / "build").glob("slurm-[0-9]*.[0-9]*.[0-9]*"):
        shutil.copytree(source, folder / "build" / source.name, symlinks=True)
    return folder


def committed_later(checkout: Path) -> Path:
    """One more commit, in which a plugin differs."""
    file = checkout / "slurm_plugin/entry/spank_sluice.c"
    file.write_text(file.read_text() + _NEWER)
    run_command(["git", "-C", checkout, *_WHO, "commit", "-q", "-a", "-m", "newer"], timeout=60)
    return checkout


def kept_packages(suite: str = "") -> list[Path]:
    """The packages of HEAD for a Debian release, as `build` takes it; without symbols for debuggers."""
    head = run_command(["git", "-C", ROOT, "rev-parse", "HEAD"], timeout=60).stdout.strip()
    folder = ROOT / "build/packages" / f"{suite or release_name()}-{head[:12]}"
    if not folder.exists():
        with tempfile.TemporaryDirectory(prefix="sluice-packages-") as work:
            built = build(clone(Path(work) / "checkout"), suite)
            folder.parent.mkdir(parents=True, exist_ok=True)
            fresh = folder.with_name(f".{folder.name}.{os.getpid()}")
            shutil.copytree(built, fresh)
            fresh.rename(folder)
    return installable(folder)


def installable(folder: Path) -> list[Path]:
    """The packages in a folder, without symbols for debuggers."""
    return sorted(path for path in folder.glob("*.deb") if "-dbgsym_" not in path.name)
