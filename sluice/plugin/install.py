"""Plugins into a site's Slurm, and out of it again.

    SEARCH/                      a folder that every host has, as all of them read the same PluginDir: /usr/local/lib
      select_cons_tres.so ...    links, so that slurmctld finds the plugins
      burst_buffer_lua.so        where the site has BurstBufferType=burst_buffer/lua: the failover journal's, before it
      sluice/current             a link to the installed build: replacing it is the installation
      sluice/slurm-22.05.8-...   one build: plugins, manifest, guard, and what the include file is made of
    CONF/sluice.plugins.conf     slurm.conf includes it: loads the plugins, or leaves stock Slurm
    CONF/sluice.level            one word; see docs/plugins.md
    CONF/plugstack.conf.d/sluice.conf      the options of srun and sbatch; with `limits`, the line that holds tasks, too
    SYSTEMD/slurmctld.service.d/sluice-guard.conf

On hosts without the links Slurm finds its own plugins in the second folder of PluginDir.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from sluice.base.errors import SluiceError, UsageError
from sluice.base.files import write_atomic, write_if_changed
from sluice.base.slurm_version import SlurmVersion, format_slurm_version
from sluice.plugin.builder import MANIFEST, PluginBuild, read_build
from sluice.plugin.site import (
    ADAPTER,
    INCLUDE,
    LEVEL_FILE,
    LEVELS,
    SiteOptions,
    plugin_parameters,
    stock_parameters,
)

DEFAULT_SEARCH = Path("/usr/local/lib")
SYSTEMD = Path("/etc/systemd/system")
_DISABLED = "disabled"
SPANK = frozenset({"spank_sluice.so", "spank_sluice_limit.so"})
"""What plugstack.conf names; slurmctld does not load them."""
_OPTIONS, _LIMIT = "spank_sluice.so", "spank_sluice_limit.so"
HELPER = Path("/usr/libexec/sluice/sluice-task-init")
_CONTROLLER = "libsluice_controller.so"
_DROP_IN = "slurmctld.service.d/sluice-guard.conf"
_BY = "# Written by sluice plugin; changes are lost."


@dataclass(frozen=True, slots=True)
class Places:
    """Where everything goes; `destdir` is put before each path when files are touched, as packagers do."""

    conf: Path = Path("/etc/slurm")
    search: Path = DEFAULT_SEARCH
    systemd: Path | None = SYSTEMD
    destdir: Path = Path("/")

    def real(self, path: Path) -> Path:
        """Where a path is on this system."""
        return self.destdir / path.relative_to("/")

    @property
    def versions(self) -> Path:
        """The folder of the builds."""
        return self.search / "sluice"

    @property
    def current(self) -> Path:
        """The installed build."""
        return self.versions / "current"


@dataclass(slots=True)
class Result:
    """What was done, and what is left to the admin."""

    done: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


def installed_build(places: Places) -> PluginBuild | None:
    """What is installed, or None. Raises UsageError when it is damaged."""
    folder = places.real(places.current)
    return read_build(folder) if (folder / MANIFEST).is_file() else None


def check_version(build: PluginBuild, slurm: SlurmVersion) -> None:
    """Refuse a build for another Slurm: slurmctld would end at its start. Raises SluiceError."""
    if build.slurm != slurm:
        raise SluiceError(
            f"{build.folder}: plugins for Slurm {format_slurm_version(build.slurm)}, but the installed slurmctld is "
            f"{format_slurm_version(slurm)}",
            remedy="plugins fit one version only, to the last digit: build them again with sluice plugin build",
        )


def install(
    build: PluginBuild,
    places: Places,
    *,
    slurm: SlurmVersion,
    stock: Path,
    slurmctld: Path = Path("/usr/sbin/slurmctld"),
    options: SiteOptions | None = None,
    spank_only: bool = False,
    limits: bool = False,
    trace: bool = False,
) -> Result:
    """Install a build; what runs continues unchanged until slurmctld is restarted. Raises SluiceError.

    `limits`: tasks of jobs with GPUs then start only with the node agent's limits. `trace`: submissions pass on the
    trace that they are made in, and jobs get one of their own.
    """
    if spank_only:
        if build.slurm[:2] != slurm[:2]:
            check_version(build, slurm)
        if not build.has("spank_sluice"):
            raise UsageError(f"{build.folder}: has no {_OPTIONS}", remedy="build it with: sluice plugin build")
    else:
        check_version(build, slurm)
    limits = limits or holds_tasks(places)  # an update does not remove limits
    trace = trace or passes_traces(places)
    if limits and not build.has("spank_sluice_limit"):
        raise UsageError(f"{build.folder}: has no {_LIMIT}", remedy="build it with: sluice plugin build")
    options = options or SiteOptions()
    search = places.real(places.search)
    if not search.is_dir():
        raise UsageError(
            f"{places.search}: no such folder", remedy="name one that exists on every host with --search-dir"
        )
    result = Result()
    on = "" if spank_only else _parameters_text(build, places, stock, options)
    off = "" if spank_only else _text(stock_parameters(options))
    folder = _place_build(build, places, on, off, slurmctld, spank_only)
    _flip(places, folder.name)
    result.done.append(f"plugins for Slurm {format_slurm_version(build.slurm)} in {places.current}")
    if build.has("spank_sluice"):
        _plugstack(places, result, limits, trace)
    if spank_only and limits:
        _link_node(build, places, slurm, result)
    if not spank_only:  # the include file last: until then slurmctld knows nothing of it
        _guard_drop_in(places, result)
        _link(places, links(build, options))
        _enable(places)
        write_if_changed(places.real(places.conf / INCLUDE), on)
        _say_what_is_left(places, options, result)
    _prune(places, keep=folder.name)
    return result


def _text(parameters: list[tuple[str, str]]) -> str:
    return "\n".join([_BY, *(f"{key}={value}" for key, value in parameters)]) + "\n"


def _parameters_text(build: PluginBuild, places: Places, stock: Path, options: SiteOptions) -> str:
    others = ":".join(one for one in options.plugin_dir.split(":") if one and one != str(places.search)) or stock
    return _text(
        plugin_parameters(
            build,
            folder=places.search,
            stock=others,
            job_submit=options.job_submit,
            site_factor=options.site_factor in ("", "site_factor/sluice", "site_factor/none"),
            burst_buffer=not options.burst_buffer,
        )
    )


def _place_build(build: PluginBuild, places: Places, on: str, off: str, slurmctld: Path, spank_only: bool) -> Path:
    """Our own copy of the build, whole or not there, in a folder named after its content."""
    digest = hashlib.sha256(f"{build.digest}\n{on}\n{off}\n{slurmctld}".encode()).hexdigest()[:12]
    versions = places.real(places.versions)
    versions.mkdir(mode=0o755, exist_ok=True)
    folder = versions / f"slurm-{format_slurm_version(build.slurm)}-{digest}"
    if folder.is_dir():
        return folder
    fresh = Path(tempfile.mkdtemp(prefix=".new-", dir=versions))
    try:
        fresh.chmod(0o755)
        for name in (*build.files, *build.programs, MANIFEST):
            shutil.copyfile(build.folder / name, fresh / name)
            (fresh / name).chmod(0o755 if name in build.programs else 0o644)
        if not spank_only:
            plugins = sorted(set(build.files) - SPANK)
            facts = {
                "SLURM_VERSION": format_slurm_version(build.slurm),
                "SLURMCTLD": str(slurmctld),
                "INCLUDE": str(places.conf / INCLUDE),
                "PLUGINS": " ".join(plugins),
            }
            (fresh / "facts").write_text("".join(f"{key}={text}\n" for key, text in facts.items()))
            (fresh / "on.conf").write_text(on)
            (fresh / "stock.conf").write_text(off)
            shutil.copyfile(Path(__file__).with_name("guard.sh"), fresh / "guard")
            (fresh / "guard").chmod(0o755)
        for path in fresh.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        fresh.rename(folder)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    return folder


def _replace_link(link: Path, target: str) -> None:
    fresh = link.with_name(f".{link.name}.{os.getpid()}")
    with suppress(FileNotFoundError):
        fresh.unlink()
    fresh.symlink_to(target)
    fresh.replace(link)


def _flip(places: Places, name: str) -> None:
    link = places.real(places.current)
    if link.exists() and not link.is_symlink():
        raise SluiceError(f"{link}: not a link", remedy="move it away")
    _replace_link(link, name)


def links(build: PluginBuild, options: SiteOptions) -> dict[str, str]:
    """What slurmctld finds in the search folder: names there, and the file of the build for each."""
    found = {name: name for name in set(build.files) - SPANK}
    if build.has(ADAPTER) and options.burst_buffer_name:
        found[f"burst_buffer_{options.burst_buffer_name}.so"] = f"{ADAPTER}.so"
    return found


def _link(places: Places, wanted: dict[str, str]) -> None:
    """Links for the plugins in the search folder; those of an older build go."""
    search = places.real(places.search)
    for name, file in sorted(wanted.items()):
        link = search / name
        if (link.exists() or link.is_symlink()) and not _is_ours(link):
            raise SluiceError(f"{link}: there is a file that is not Sluice's", remedy="move it away")
        _replace_link(link, f"sluice/current/{file}")
    for link in search.glob("*.so"):
        if link.name not in wanted and _is_ours(link):
            link.unlink()


def _link_node(build: PluginBuild, places: Places, slurm: SlurmVersion, result: Result) -> None:
    """What slurmd loads: the plugin by which its prolog knows how much of each GPU a job was given."""
    if build.slurm == slurm and build.has("prep_script"):
        _link(places, {"prep_script.so": "prep_script.so"})
        result.left.append("restart slurmd on nodes")
    else:
        result.left.append(f"jobs with parts of several GPUs of a node need plugins for {format_slurm_version(slurm)}")


def _is_ours(link: Path) -> bool:
    return link.is_symlink() and link.readlink().parts[:2] == ("sluice", "current")


def _guard_drop_in(places: Places, result: Result) -> None:
    if places.systemd is None or not places.real(places.systemd).is_dir():
        result.left.append(f"before each start of slurmctld run: {places.current}/guard")
        return
    path = places.real(places.systemd / _DROP_IN)
    path.parent.mkdir(mode=0o755, exist_ok=True)
    text = (
        f"{_BY}\n# Another version of Slurm starts without them. +: as root; -: slurmctld starts in any case.\n"
        f"[Service]\nExecStartPre=+-{places.current}/guard\n"
    )
    if write_if_changed(path, text):
        result.left.append("run: systemctl daemon-reload")


def limit_line(folder: Path, helper: Path = HELPER) -> str:
    """The line of plugstack.conf that holds tasks; required, so that none starts where it cannot be loaded."""
    return f"required {folder / _LIMIT} helper={helper}"


def holds_tasks(places: Places) -> bool:
    """Whether our part of plugstack.conf has the line that holds tasks."""
    try:
        return f"required {places.current}" in places.real(_stack(places)).read_text(errors="replace")
    except FileNotFoundError:
        return False


def passes_traces(places: Places) -> bool:
    """Whether our part of plugstack.conf has submissions pass on their traces."""
    try:
        return f"{_OPTIONS} trace\n" in places.real(_stack(places)).read_text(errors="replace")
    except FileNotFoundError:
        return False


def _stack(places: Places) -> Path:
    return places.conf / "plugstack.conf.d/sluice.conf"


def _stack_text(places: Places, limits: bool, trace: bool) -> str:
    options = f"optional {places.current}/{_OPTIONS}" + (" trace" if trace else "")
    lines = [_BY, options, *([limit_line(places.current)] if limits else [])]
    return "\n".join(lines) + "\n"


def _plugstack(places: Places, result: Result, limits: bool, trace: bool) -> None:
    folder = places.real(places.conf / "plugstack.conf.d")
    folder.mkdir(mode=0o755, exist_ok=True)
    write_if_changed(places.real(_stack(places)), _stack_text(places, limits, trace))
    main = places.real(places.conf / "plugstack.conf")
    line = f"include {places.conf}/plugstack.conf.d/*.conf"
    if not main.exists():
        write_atomic(main, line + "\n")
    elif "plugstack.conf.d/" not in main.read_text(errors="replace"):
        result.left.append(f"add to {places.conf / 'plugstack.conf'}: {line}")
    result.done.append("options of srun, sbatch and salloc (SPANK)")
    if trace:
        result.done.append("jobs are part of the trace that they are submitted in (SPANK)")
    if not limits:
        return
    result.done.append("tasks of jobs with GPUs start only with the node agent's limits (SPANK)")
    if not places.real(HELPER).exists():
        result.left.append(f"on nodes: put prolog_epilog/programs into {HELPER.parent} and start sluice-agent")


def _say_what_is_left(places: Places, options: SiteOptions, result: Result) -> None:
    conf = places.conf / "slurm.conf"
    for key, value in stock_parameters(options):
        result.left.append(f"remove from {conf}: {key}={value} (it is in {INCLUDE} now, and counts only once)")
    if not options.includes_us:
        result.left.append(f"add to {conf} on all hosts: Include {INCLUDE}")
    if options.select_type and options.select_type.lower() != "select/cons_tres":
        result.left.append(f"placement needs SelectType=select/cons_tres in {conf}, which has {options.select_type}")
    if options.prep and "prep/script" not in options.prep:
        result.left.append(f"gang groups need prep/script among PrEpPlugins in {conf}, which has {options.prep}")
    if options.site_factor not in ("", "site_factor/sluice", "site_factor/none"):
        result.left.append(
            f"order needs PrioritySiteFactorPlugin=site_factor/sluice, but {conf} has {options.site_factor}"
        )
    if options.burst_buffer and not options.burst_buffer_name:
        result.left.append(
            f"remove from {conf}: BurstBufferType={options.burst_buffer}; then run this again: {INCLUDE} has it"
        )
    result.left.append("restart slurmctld on this controller")


def _prune(places: Places, keep: str) -> None:
    """Only the current build and the one before it stay."""
    folders = [path for path in places.real(places.versions).glob("slurm-*") if path.name != keep and path.is_dir()]
    for path in sorted(folders, key=lambda one: one.stat().st_mtime)[:-1]:
        shutil.rmtree(path, ignore_errors=True)
    for path in places.real(places.versions).glob(".new-*"):
        shutil.rmtree(path, ignore_errors=True)


# ---- switching ----


def read_level(places: Places) -> str:
    """The level that is asked for. Raises SluiceError when the file holds something else than a level."""
    path = places.real(places.conf / LEVEL_FILE)
    try:
        text = path.read_text(errors="replace").strip()
    except FileNotFoundError:
        return LEVELS[0]
    if text not in LEVELS:
        raise SluiceError(
            f"{path}: {text[:60]!r} is not {', '.join(LEVELS)}", remedy="set one: sluice plugin level off"
        )
    return text


def write_level(places: Places, level: str) -> None:
    """Ask for a level; slurmctld follows within a second. Raises UsageError."""
    if level not in LEVELS:
        raise UsageError(f"level {level!r}: not known", remedy=f"use one of {', '.join(LEVELS)}")
    write_atomic(places.real(places.conf / LEVEL_FILE), level + "\n")


def is_disabled(places: Places) -> bool:
    """Whether `disable` holds."""
    return places.real(places.versions / _DISABLED).exists()


def _enable(places: Places) -> None:
    places.real(places.versions / _DISABLED).unlink(missing_ok=True)


def disable(places: Places) -> Result:
    """Stock Slurm: at once by level off, and from the next start of slurmctld on without any plugin of ours loaded."""
    write_level(places, "off")
    result = Result(done=["level off: slurmctld does what stock Slurm does"])
    if holds_tasks(places):
        write_if_changed(places.real(_stack(places)), _stack_text(places, limits=False, trace=passes_traces(places)))
        result.done.append("tasks start without the node agent's limits on hosts that read this plugstack.conf")
    stock = places.real(places.current / "stock.conf")
    if stock.is_file():
        places.real(places.versions / _DISABLED).touch(mode=0o644)
        write_if_changed(places.real(places.conf / INCLUDE), stock.read_text())
        result.done.append(
            "from its next start on slurmctld loads none of the plugins; back with: sluice plugin install"
        )
    return result


def _supervisors(places: Places) -> list[Path]:
    """Drop-ins of slurmctld that name the supervisor."""
    if places.systemd is None:
        return []
    folder = places.systemd / Path(_DROP_IN).parent
    program = re.escape(f"{places.current}/sluice-supervise")
    starts = re.compile(rf"^\s*ExecStart\s*=[-@:+!|\s\"]*{program}\b", re.MULTILINE)
    return [
        folder / path.name
        for path in sorted(places.real(folder).glob("*.conf"))
        if path.is_file() and starts.search(path.read_text(errors="replace"))
    ]


def uninstall(places: Places, options: SiteOptions) -> Result:
    """Remove all that `install` added, except the include file while slurm.conf names it.

    A slurmctld that runs keeps what it has loaded, at level off, until it is restarted. Refused while systemd starts
    slurmctld by the supervisor, which goes with the plugins: it would not start again. Raises SluiceError.
    """
    for drop_in in _supervisors(places):
        raise SluiceError(
            f"{drop_in}: starts slurmctld by {places.current}/sluice-supervise, which uninstall removes",
            remedy=f"rm {drop_in}; systemctl daemon-reload; systemctl restart slurmctld; then run this again",
        )
    result = disable(places)
    places.real(places.conf / LEVEL_FILE).unlink(missing_ok=True)
    for link in places.real(places.search).glob("*.so"):
        if _is_ours(link):
            link.unlink()
    stock = places.real(places.current / "stock.conf")
    kept = stock.read_text().splitlines()[1:] if stock.is_file() else []
    shutil.rmtree(places.real(places.versions), ignore_errors=True)
    if places.systemd is not None:
        places.real(places.systemd / _DROP_IN).unlink(missing_ok=True)
        with suppress(OSError):
            places.real(places.systemd / _DROP_IN).parent.rmdir()
    places.real(places.conf / "plugstack.conf.d/sluice.conf").unlink(missing_ok=True)
    include = places.real(places.conf / INCLUDE)
    if options.includes_us:
        conf = places.conf / "slurm.conf"
        for line in kept:
            result.left.append(f"put back into {conf}: {line}")
        result.left.append(f"remove from {conf}: Include {INCLUDE}; then remove {places.conf / INCLUDE}")
    else:
        include.unlink(missing_ok=True)
    result.done.append("plugins, SPANK options and guard are removed")
    result.left.append("restart slurmctld on this controller")
    return result
