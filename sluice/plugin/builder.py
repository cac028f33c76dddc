"""The plugins, built for one Slurm."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sluice.base.errors import SluiceError, UsageError
from sluice.base.run import CommandError, run_command
from sluice.base.slurm_version import SlurmVersion, format_slurm_version, parse_slurm_version
from sluice.core import version
from sluice.plugin.sources import (
    SlurmSource,
    default_cache,
    distribution_source,
    header_source,
    is_checkout,
    locked,
    named_source,
)

MANIFEST = "manifest.json"
SUPERVISOR = "sluice-supervise"
"""The program that slurmctld runs under; built and installed with the plugins."""
SCHEMA_VERSION = 1
SUPPORTED: tuple[tuple[int, int], ...] = ((22, 5), (24, 11))
"""Slurm's releases that the plugins support and were tested with."""
PACKAGED = Path("/usr/lib/sluice/plugins")
"""Where packages bring builds, each in a folder named after Slurm's version; `install` copies from there."""
ADMITTED: tuple[tuple[int, int], ...] = ((23, 2), (23, 11), (24, 5), (25, 11), (26, 5))
"""Releases that no distribution has sources of: job_submit and SPANK are built from public headers alone, for levels
off and admit."""
FROM_NAMED_SOURCES: tuple[tuple[int, int], ...] = ((26, 5),)
"""Those of them for which all plugins but the journal's are built where `--slurm-source` names configured sources."""
_BUILD_TIMEOUT = 900.0

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PluginBuild:
    """Built plugins in a folder."""

    folder: Path
    slurm: SlurmVersion
    sluice: str
    sanitizer: str
    files: dict[str, str] = field(default_factory=dict)
    """What Slurm loads: names and SHA-256."""
    programs: dict[str, str] = field(default_factory=dict)
    """What is run: likewise."""

    def has(self, name: str) -> bool:
        """Whether a plugin, e.g. ``job_submit_sluice``, was built."""
        return f"{name}.so" in self.files

    @property
    def digest(self) -> str:
        """Twelve hex digits that differ between builds that differ."""
        text = "\n".join(f"{name} {value}" for name, value in sorted((self.files | self.programs).items()))
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def sources_folder() -> Path:
    """The project's C sources: a checkout, or what an installed Sluice brought. Raises SluiceError."""
    for folder in (Path(__file__).resolve().parents[2], Path(sys.prefix) / "share/sluice/src"):
        if (folder / "slurm_plugin/CMakeLists.txt").is_file() and (folder / "native/core").is_dir():
            return folder
    raise SluiceError(
        "the plugins' sources are not installed", remedy="install Sluice with its data files, or a checkout"
    )


def check_supported(slurm: SlurmVersion) -> None:
    """Raise SluiceError for a Slurm that none of the plugins supports."""
    if slurm[:2] not in (*SUPPORTED, *ADMITTED):
        raise SluiceError(
            f"Slurm {format_slurm_version(slurm)}: the plugins support {_releases(SUPPORTED)}; "
            f"job_submit and SPANK also {_releases(ADMITTED)}",
            remedy="probe, gres, lint and reports work without them",
        )


def _releases(known: Sequence[tuple[int, int]]) -> str:
    names = [f"{major}.{minor:02}" for major, minor in known]
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def find_source(
    slurm: SlurmVersion,
    *,
    named: Path | None = None,
    installed: Path = Path("/usr/include"),
    suite: str | None = None,
    cache: Path | None = None,
) -> SlurmSource:
    """What the plugins for a Slurm are built against: `named`, else for ADMITTED releases the installed headers, else
    the distribution's. `named` may be a folder of headers for such a release. Raises SluiceError."""
    check_supported(slurm)
    from_named = slurm[:2] in FROM_NAMED_SOURCES and named is not None and (named / "META").is_file()
    if slurm[:2] not in SUPPORTED and not from_named:
        return header_source(slurm, named=named, installed=installed, suite=suite, cache=cache)
    return named_source(named, slurm) if named else distribution_source(slurm, suite=suite, cache=cache)


def build_plugins(
    source: SlurmSource,
    output: Path,
    *,
    plugin_dir: Path,
    root: Path | None = None,
    sanitizer: str = "",
    cache: Path | None = None,
    progress: Progress | None = None,
) -> PluginBuild:
    """Build for `source`, and put the plugins with their manifest into the new or empty folder `output`.

    `plugin_dir` is Slurm's own plugin folder as slurmctld sees it, in the tree `root` where that is not this system.
    What was compiled is kept in `cache`, so that the next build takes a moment. Raises SluiceError.
    """
    check_supported(source.version)
    text = format_slurm_version(source.version)
    cache = cache or default_cache()
    work = cache / "-".join(["plugins", text, *filter(None, sanitizer.split(","))])
    say = progress or (lambda _: None)
    with locked(cache / f".{work.name}.lock"):
        say(f"building the plugins for Slurm {text}")
        _compile(source, work, plugin_dir, root, sanitizer)
        output.mkdir(parents=True, exist_ok=True)
        made = work / "made"
        shutil.rmtree(made, ignore_errors=True)
        run_command(["cmake", "--install", work, "--prefix", made], timeout=120)
        for file in (*made.glob("*.so"), made / SUPERVISOR):
            shutil.copyfile(file, output / file.name)
            (output / file.name).chmod(0o755)
    write_manifest(output, source.version, sanitizer)
    return read_build(output)


def build_limit_plugin(headers: Path, slurm: SlurmVersion, output: Path, *, cache: Path | None = None) -> Path:
    """Build only what holds tasks to limits, with public headers (`headers` has slurm/slurm.h); the file's path.

    It is compiled again into the folder `output` each time, which takes a moment. Raises SluiceError.
    """
    check_supported(slurm)
    name, cache = "spank_sluice_limit.so", cache or default_cache()
    work = cache / f"limit-plugin-{format_slurm_version(slurm)}"
    with locked(cache / f".{work.name}.lock"):
        _cmake(work, [f"-DSLURM_HEADERS={headers}"], ["--target", Path(name).stem])
        shutil.copyfile(work / name, output / name)
    (output / name).chmod(0o755)
    return output / name


def packaged_build(slurm: SlurmVersion) -> PluginBuild | None:
    """What a package brought for a Slurm, or None. Raises UsageError when it is damaged."""
    folder = PACKAGED / format_slurm_version(slurm)
    if is_checkout() or not (folder / MANIFEST).is_file():  # a checkout has plugins of its own
        return None
    return read_build(folder)


def fresh_output(given: Path | None, slurm: SlurmVersion, sanitize: bool, cache: Path | None = None) -> Path:
    """The folder for a build: the one named, empty or new, else one of the cache, emptied. Raises UsageError."""
    if given is not None:
        if given.exists() and (not given.is_dir() or any(given.iterdir())):
            raise UsageError(f"--output {given}: not empty", remedy="name an empty or a new folder")
        return given
    name = f"built-{format_slurm_version(slurm)}{'-address' if sanitize else ''}"
    folder = (cache or default_cache()) / name
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def _compile(source: SlurmSource, work: Path, plugin_dir: Path, root: Path | None, sanitizer: str) -> None:
    _cmake(
        work,
        [
            f"-DSLURM_SOURCE={source.folder if source.whole else ''}",
            f"-DSLURM_HEADERS={'' if source.whole else source.folder}",
            f"-DSLURM_PLUGIN_DIR={plugin_dir}",
            f"-DSLURM_ROOT={'' if root is None else root.resolve()}",
            f"-DSLUICE_SANITIZE={sanitizer}",
        ],
    )


def _cmake(work: Path, options: list[str], build: Sequence[str] = ()) -> None:
    """Configure and build into `work`, which is kept. Raises SluiceError with the compiler's message."""
    for name in ("cmake", "gcc"):
        if shutil.which(name) is None:
            raise SluiceError(f"{name}: not installed", remedy="install cmake, gcc and make (or ninja-build)")
    place = sources_folder() / "slurm_plugin"
    cached = work / "CMakeCache.txt"
    if cached.is_file() and f"CMAKE_HOME_DIRECTORY:INTERNAL={place}\n" not in cached.read_text():
        shutil.rmtree(work)  # of another checkout
    generator = ["-G", "Ninja"] if shutil.which("ninja") else ["-G", "Unix Makefiles"]
    configure: list[str | Path] = ["cmake", "-S", place, "-B", work, *([] if cached.is_file() else generator)]
    environment = {key: value for key, value in os.environ.items() if key not in ("CFLAGS", "LDFLAGS")}
    try:
        run_command([*configure, *options], timeout=120, env=environment)
        run_command(["cmake", "--build", work, "--parallel", *build], timeout=_BUILD_TIMEOUT, env=environment)
    except CommandError as error:
        raise SluiceError(
            f"the plugins cannot be built: {_compiler_words(error)}",
            remedy="check that the sources are those of the installed Slurm: docs/plugins.md",
        ) from error


def _compiler_words(error: CommandError) -> str:
    lines = [line for line in error.what.splitlines() if "error" in line.lower()]
    return "\n".join(lines[:10]) or error.what[-1000:]


def write_manifest(folder: Path, slurm: SlurmVersion, sanitizer: str = "") -> None:
    """Write the manifest of a folder of plugins."""
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.so"))}
    programs = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob(SUPERVISOR)}
    document = {
        "schema_version": SCHEMA_VERSION,
        "slurm_version": format_slurm_version(slurm),
        "sluice_version": version(),
        "sanitizer": sanitizer,
        "files": files,
        "programs": programs,
    }
    (folder / MANIFEST).write_text(json.dumps(document, indent=1) + "\n")


def read_build(folder: Path) -> PluginBuild:
    """What is in a folder of built plugins. Raises UsageError for another folder."""
    remedy = "make one with: sluice plugin build"
    try:
        document: Any = json.loads((folder / MANIFEST).read_text())
        files = {str(name): str(value) for name, value in document["files"].items()}
        programs = {str(name): str(value) for name, value in document.get("programs", {}).items()}
        slurm = parse_slurm_version(document["slurm_version"])
        if document["schema_version"] != SCHEMA_VERSION:
            raise UsageError(f"{folder}: made by another version of Sluice", remedy=remedy)
        return PluginBuild(folder, slurm, str(document["sluice_version"]), str(document["sanitizer"]), files, programs)
    except OSError as error:
        raise UsageError(f"{folder / MANIFEST}: {error.strerror}", remedy=remedy) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{folder / MANIFEST}: damaged ({error})", remedy=remedy) from error
