"""Slurm's own sources, of exactly the installed version: from the distribution, or a folder that the admin names.

Plugins other than job_submit and SPANK need Slurm's private headers, which no package has. The distribution's source
package does; it is fetched by apt from a private list that is made from the system's own, so that nothing of the system
is changed, and configured with the options that decide what is in the headers.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from sluice.base.errors import SluiceError, UsageError
from sluice.base.run import CommandError, run_command
from sluice.base.slurm_version import SlurmVersion, format_slurm_version, parse_slurm_version

# What of Slurm's ./configure changes the structures that plugins see, as Debian builds it; and less work.
CONFIGURE = (
    "--prefix=/usr",
    "--sysconfdir=/etc/slurm",
    "--enable-multiple-slurmd",
    "--disable-debug",
    "--without-rpath",
    "--without-munge",
    "--with-pmix=no",
    "--without-hdf5",
    "--enable-slurmrestd=no",
    "--disable-dependency-tracking",
)
_ROOT = Path(__file__).resolve().parents[2]
_MARK = ".sluice-configured"
_TIMEOUT = 600.0  # seconds, of one step
_NO_SOURCE = "name a configured source tree of that version with --slurm-source"


class SourcesUnavailableError(SluiceError):
    """The distribution's sources cannot be had from here: no network, or no such version."""


@dataclass(frozen=True, slots=True)
class SlurmSource:
    """A configured source tree; or, if it is not `whole`, only a folder with the public headers slurm/*.h."""

    folder: Path
    version: SlurmVersion
    whole: bool = True


def is_checkout() -> bool:
    """Whether this is a developer's checkout, and not an installed Sluice."""
    return (_ROOT / "tools").is_dir()


def default_cache() -> Path:
    """Where sources and builds are kept: a checkout's own build folder, else the system's cache."""
    return _ROOT / "build" if is_checkout() else Path("/var/cache/sluice")


def named_source(folder: Path, wanted: SlurmVersion) -> SlurmSource:
    """A source tree that the admin names. Raises UsageError for one that is not configured or of another version."""
    header = folder / "slurm/slurm_version.h"
    if not (folder / "config.h").is_file() or not header.is_file():
        raise UsageError(
            f"--slurm-source {folder}: not a configured source tree of Slurm (no config.h and slurm/slurm_version.h)",
            remedy=f"run there: ./configure {' '.join(CONFIGURE[2:6])}, or as your Slurm was configured",
        )
    found = source_version(folder)
    if found != wanted:
        raise UsageError(
            f"--slurm-source {folder}: Slurm {format_slurm_version(found)}, but slurmctld is "
            f"{format_slurm_version(wanted)}",
            remedy="plugins fit one version only, to the last digit: name its own source tree",
        )
    return SlurmSource(folder.resolve(), found)


def source_version(folder: Path) -> SlurmVersion:
    """The version of a source tree. Raises UsageError."""
    try:
        meta = (folder / "META").read_text()
    except OSError as error:
        raise UsageError(f"{folder}/META: {error.strerror}", remedy=_NO_SOURCE) from error
    match = re.search(r"^\s*Version:\s*(\S+)", meta, re.MULTILINE)
    if match is None:
        raise UsageError(f"{folder}/META: names no version", remedy=_NO_SOURCE)
    return parse_slurm_version(match[1])


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """A lock over processes for what is next to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def distribution_source(version: SlurmVersion, *, suite: str | None = None, cache: Path | None = None) -> SlurmSource:
    """The distribution's source of a version, fetched, patched and configured on first use and then kept in `cache`.

    `suite` is Debian's name of the release, default this system's. Raises SluiceError, leaving nothing half-made.
    """
    cache = cache or default_cache()
    text = format_slurm_version(version)
    folder = cache / f"slurm-{text}"
    with locked(cache / f".slurm-{text}.lock"):
        if not (folder / _MARK).is_file():
            for name in ("apt-get", "gcc", "make", "patch"):
                if shutil.which(name) is None:
                    raise SluiceError(f"{name}: not installed", remedy=f"install it, or {_NO_SOURCE}")
            with tempfile.TemporaryDirectory(prefix=".slurm-", dir=cache) as work:
                made = fetch_source(version, suite or release_name(), Path(work))
                _configure(made)
                shutil.rmtree(folder, ignore_errors=True)
                made.rename(folder)
    return SlurmSource(folder, version)


def release_name(root: Path = Path("/")) -> str:
    """The distribution's name of a system's release, e.g. ``bookworm``. Raises SluiceError."""
    path = root / "etc/os-release"
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise SluiceError(f"{path}: {error.strerror}", remedy=_NO_SOURCE) from error
    for line in lines:
        key, _, value = line.partition("=")
        if key == "VERSION_CODENAME":
            return value.strip().strip('"')
    raise SluiceError(f"{path}: names no release (VERSION_CODENAME)", remedy=_NO_SOURCE)


def _mirrors() -> dict[str, str]:
    """The mirrors that this system's apt uses: "main" and, where there is one, "security"."""
    form = "$(CREATED_BY) $(COMPONENT) $(RELEASE) $(REPO_URI)"
    found: dict[str, str] = {}
    for line in run_command(["apt-get", "indextargets", "--format", form], timeout=60).stdout.splitlines():
        kind, component, release, uri = (*line.split(" ", 3), "", "", "", "")[:4]
        if kind == "Packages" and component == "main":
            found.setdefault("security" if release.endswith("-security") else "main", uri)
    if "main" not in found:
        raise SourcesUnavailableError(
            "apt: no mirror of the distribution in /etc/apt", remedy=f"add one, or {_NO_SOURCE}"
        )
    return found


class _Apt:
    """apt with lists of its own: nothing of the system's is changed, and its preferences are not used."""

    def __init__(self, work: Path, sources: Sequence[str]) -> None:
        for name in ("lists/partial", "cache/archives/partial", "got"):
            (work / name).mkdir(parents=True)
        (work / "sources.list").write_text("\n".join(sources) + "\n")
        self.got = work / "got"
        self.options = [
            *("-o", f"Dir::Etc::sourcelist={work}/sources.list", "-o", "Dir::Etc::sourceparts=/dev/null"),
            *("-o", "Dir::Etc::preferences=/dev/null", "-o", "Dir::Etc::preferencesparts=/dev/null"),
            *("-o", f"Dir::State::lists={work}/lists", "-o", f"Dir::Cache={work}/cache"),
            *("-o", "APT::Sandbox::User=root", "-o", "Acquire::Retries=2"),
        ]

    def run(self, program: str, *words: str) -> str:
        """What it prints, run in the folder `got`. Raises SourcesUnavailableError."""
        try:
            command = ["env", "-C", str(self.got), program, *self.options, "-qq", *words]
            return run_command(command, timeout=_TIMEOUT).stdout
        except CommandError as error:
            raise SourcesUnavailableError(
                f"{program} {words[0]}: {_first_line(error)}",
                remedy=f"connect this machine to its mirror, or {_NO_SOURCE}",
            ) from error


def fetch_source(version: SlurmVersion, suite: str, work: Path) -> Path:
    """The unpacked and patched source tree of a version, not configured, in an empty folder. Raises SluiceError."""
    text = format_slurm_version(version)
    mirrors = _mirrors()
    lines = [f"deb-src {mirrors['main']} {suite} main"]
    if suite == release_name():  # of other releases, older and newer ones, the main suite is what all mirrors have
        lines.append(f"deb-src {mirrors['main']} {suite}-updates main")
        if "security" in mirrors:
            lines.append(f"deb-src {mirrors['security']} {suite}-security main")
    apt = _Apt(work, lines)
    apt.run("apt-get", "update")
    offered = re.findall(r"^Version: (\S+)$", apt.run("apt-cache", "showsrc", "slurm-wlm"), re.MULTILINE)
    fitting = [one for one in offered if parse_slurm_version(one) == version]
    if not fitting:
        raise SourcesUnavailableError(
            f"{suite}: has no source of Slurm {text}, only of {', '.join(sorted(set(offered))) or 'none'}",
            remedy=_NO_SOURCE,
        )
    wanted = f"slurm-wlm={fitting[-1]}"
    apt.run("apt-get", "source", "--download-only", "--tar-only", wanted)
    # The upstream archive is what counts. Debian's patches touch few headers, and not every mirror still has them.
    with suppress(SourcesUnavailableError):
        apt.run("apt-get", "source", "--download-only", "--diff-only", wanted)
    tree = _unpack(apt.got, work)
    if source_version(tree) != version:
        raise SluiceError(f"{wanted}: is not Slurm {text}", remedy=_NO_SOURCE)
    return tree


def header_version(folder: Path) -> SlurmVersion | None:
    """The version of the headers slurm/*.h in a folder; None where there are none."""
    try:
        text = (folder / "slurm/slurm_version.h").read_text()
    except OSError:
        return None
    match = re.search(r"^#define SLURM_VERSION_NUMBER 0x(\w\w)(\w\w)(\w\w)$", text, re.MULTILINE)
    return None if match is None else (int(match[1], 16), int(match[2], 16), int(match[3], 16))


def header_source(
    version: SlurmVersion,
    *,
    named: Path | None = None,
    installed: Path = Path("/usr/include"),
    suite: str | None = None,
    cache: Path | None = None,
) -> SlurmSource:
    """Public headers of a version: in the folder `named`, else those installed, else the distribution's.

    Raises SluiceError where they are of another version.
    """
    folder = named or installed
    if named is None and header_version(folder) != version:
        suite = suite or release_name()
        folder = public_headers(suite, wanted=version, cache=cache)
    found = header_version(folder)
    if found != version:
        of = f"of Slurm {format_slurm_version(found)}" if found else "no headers of Slurm (slurm/slurm_version.h)"
        raise UsageError(
            f"{folder}: {of}, but the installed Slurm is {format_slurm_version(version)}",
            remedy="install libslurm-dev of that version, or name a folder with its slurm/slurm.h with --slurm-source",
        )
    return SlurmSource(folder, version, whole=False)


def public_headers(suite: str, *, wanted: SlurmVersion | None = None, cache: Path | None = None) -> Path:
    """The folder with slurm/slurm.h of a release of the distribution (package libslurm-dev), fetched on first use.

    Fetched again where they are not of the version `wanted`, as some releases move. Enough for job_submit and SPANK, of
    releases whose sources or Slurm are not at hand. Raises SluiceError.
    """
    cache = cache or default_cache()
    folder = cache / f"slurm-headers-{suite}"
    with locked(cache / f".{folder.name}.lock"):
        if not folder.is_dir() or (wanted is not None and header_version(folder) != wanted):
            with tempfile.TemporaryDirectory(prefix=".slurm-", dir=cache) as temporary:
                work = Path(temporary)
                apt = _Apt(work, [f"deb {_mirrors()['main']} {suite} main"])
                apt.run("apt-get", "update")
                apt.run("apt-get", "download", "libslurm-dev")
                for package in apt.got.glob("*.deb"):
                    run_command(["dpkg-deb", "-x", package, work / "tree"], timeout=60)
                shutil.rmtree(folder, ignore_errors=True)
                (work / "tree/usr/include").rename(folder)
    return folder


def _unpack(got: Path, work: Path) -> Path:
    """Upstream's archive with Debian's patches applied, where those were to be had."""
    for archive in got.glob("*.orig.tar.*"):
        _untar(archive, work / "tree")
    trees = [path for path in (work / "tree").iterdir() if path.is_dir()] if (work / "tree").is_dir() else []
    if len(trees) != 1:
        raise SluiceError("Slurm's source: the archive does not hold one folder", remedy=_NO_SOURCE)
    for archive in got.glob("*.debian.tar.*"):
        _untar(archive, work)
        patches = work / "debian/patches"
        series = (patches / "series").read_text() if (patches / "series").is_file() else ""
        for name in (line.split("#")[0].split() for line in series.splitlines()):
            if name:
                run_command(
                    ["patch", "-d", trees[0], "-p1", "-s", "-N", "-i", patches / name[0]],
                    timeout=60,
                )
    return trees[0]


def _untar(archive: Path, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    run_command(["tar", "-x", "--no-same-owner", "-f", archive, "-C", folder], timeout=_TIMEOUT)


def _configure(tree: Path) -> None:
    try:
        run_command(["env", "-C", tree, "CFLAGS=-O0", "./configure", "-q", *CONFIGURE], timeout=_TIMEOUT)
    except CommandError as error:
        raise SluiceError(f"Slurm's configure failed: {error.what[-500:]}", remedy="install gcc and make") from error
    # Half of 80 MB that nobody needs for plugins.
    for name in ("testsuite", "doc", "contribs"):
        shutil.rmtree(tree / name, ignore_errors=True)
    (tree / _MARK).touch()


def _first_line(error: CommandError) -> str:
    lines = [line for line in (error.stderr or error.what).splitlines() if line.startswith(("E:", "Err"))]
    return lines[0] if lines else error.what.splitlines()[-1][:300]
