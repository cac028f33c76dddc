"""Which plugins are installed, asked for, and in force; and checks of the installation."""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from policy import compiled
from sluice.base.errors import SluiceError
from sluice.base.slurm_version import SlurmVersion, format_slurm_version
from sluice.plugin.builder import PluginBuild, packaged_build
from sluice.plugin.install import HELPER, SPANK, Places, holds_tasks, installed_build, is_disabled, links, read_level
from sluice.plugin.site import INCLUDE, SiteOptions, stock_parameters
from sluice.plugin.symbols import missing, overridden

SCHEMA_VERSION = 1
_AGAIN = "install the plugins again: sluice plugin install"
_MOST_BYTES = 1 << 20
# Besides slurmctld, users' commands and slurmd load these where they are installed.
_LOADED_ELSEWHERE = {"libsluice_controller.so", "select_cons_tres.so", "prep_script.so"}
# What plugins define on purpose: Slurm asks each for these by name, in the plugin alone.
_OF_EVERY_PLUGIN = {"init", "fini", "plugin_name", "plugin_type", "plugin_version"}


@dataclass(frozen=True, slots=True)
class Controller:
    """The status of the plugins in one controller's slurmctld."""

    host: str
    written: float
    """When (Unix time)."""
    report: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check; a `problem` keeps the plugins from working, a `remark` does not."""

    kind: Literal["ok", "remark", "problem"]
    what: str
    remedy: str = ""


def read_controllers(state_folder: Path) -> list[Controller]:
    """The reports in the StateSaveLocation; damaged ones are left out. Raises SluiceError for a folder that is shut."""
    found = []
    try:
        for path in sorted(state_folder.glob("sluice.status.*")):
            host = path.name.removeprefix("sluice.status.")
            if host.endswith(".new") or path.stat().st_size > _MOST_BYTES:
                continue
            try:
                report: Any = json.loads(path.read_text())
            except ValueError:
                continue
            if isinstance(report, dict) and report.get("schema_version") == SCHEMA_VERSION:
                found.append(Controller(host, path.stat().st_mtime, report))
    except PermissionError as error:
        raise SluiceError(f"{error.filename}: {error.strerror}", remedy="ask as root or as SlurmUser") from error
    return found


def origin(build: PluginBuild) -> Literal["package", "other", "built"]:
    """Whether an installed build is the package's, another one than the package's, or there is no package."""
    packaged = packaged_build(build.slurm)
    if packaged is None:
        return "built"
    return "package" if packaged.digest == build.digest else "other"


def include_state(places: Places) -> str:
    """What the include file does: ``on``, ``stock``, ``changed`` (by hand) or ``missing``."""
    path = places.real(places.conf / INCLUDE)
    try:
        lines = _parameters(path)
    except FileNotFoundError:
        return "missing"
    for name in ("on", "stock"):
        file = places.real(places.current / f"{name}.conf")
        if file.is_file() and _parameters(file) == lines:
            return name
    return "changed" if lines else "stock"


def _parameters(path: Path) -> list[str]:
    return [line for line in path.read_text(errors="replace").splitlines() if line and not line.startswith("#")]


def check(
    places: Places, options: SiteOptions, *, slurm: SlurmVersion, slurmctld: Path, stock: Path
) -> Iterator[Finding]:
    """Check an installation from its files to its policy. Raises SluiceError only where nothing can be read."""
    build = installed_build(places)
    if build is None:
        yield Finding("problem", f"{places.current}: nothing is installed", "sluice plugin install")
        return
    if build.slurm == slurm:
        yield Finding("ok", f"plugins and slurmctld are both {format_slurm_version(slurm)}")
        if origin(build) == "other":
            yield Finding("remark", f"{places.current}: not what the installed package has", "sluice plugin install")
    else:
        yield Finding(
            "problem",
            f"plugins for Slurm {format_slurm_version(build.slurm)}, but slurmctld is {format_slurm_version(slurm)}",
            "build and install them again: sluice plugin install",
        )
    yield from _check_files(places, build, options)
    if build.slurm == slurm and "libsluice_controller.so" in build.files:
        yield from _check_symbols(places, build, slurmctld, stock)
    yield from _check_configuration(places, options)
    yield from _check_burst_buffer(places, options, stock)
    yield from _check_limits(places, build)
    yield from _check_policy(places)


def _check_files(places: Places, build: PluginBuild, options: SiteOptions) -> Iterator[Finding]:
    bad = 0
    for name, digest in (build.files | build.programs).items():
        path = build.folder / name
        try:
            same = hashlib.sha256(path.read_bytes()).hexdigest() == digest
        except OSError as error:
            bad += 1
            yield Finding("problem", f"{path}: {error.strerror}", _AGAIN)
            continue
        if not same:
            bad += 1
            yield Finding("problem", f"{path}: not what was installed", _AGAIN)
    resolved = build.folder.resolve()
    for path in (*resolved.glob("*"), resolved, *resolved.parents):
        facts = path.stat()
        sticky = bool(facts.st_mode & stat.S_ISVTX)
        if facts.st_uid != 0 or (facts.st_mode & 0o022 and not sticky):
            bad += 1
            yield Finding(
                "problem",
                f"{path}: users other than root can change what slurmctld loads",
                f"chown root {path}; chmod go-w {path}",
            )
    for name, file in sorted(links(build, options).items()):
        link = places.real(places.search / name)
        if not (places.current / "guard").exists():
            break
        if not link.exists():
            bad += 1
            yield Finding("problem", f"{link}: missing", _AGAIN)
        elif link.resolve().name != file:
            bad += 1
            yield Finding("problem", f"{link}: another file is where Sluice's must be", _AGAIN)
    if not bad:
        yield Finding("ok", f"{len(build.files)} files in {places.current} are as installed, and root's")


def _check_symbols(places: Places, build: PluginBuild, slurmctld: Path, stock: Path) -> Iterator[Finding]:
    program = [slurmctld, places.real(stock / "libslurmfull.so")]
    shared = build.folder / "libsluice_controller.so"
    bad = 0
    for name in build.files:
        if name in SPANK:
            continue
        plugin = build.folder / name
        standing_before = places.real(stock / name)
        providers = [*program, *([shared] if plugin != shared else [])]
        providers += [standing_before] if standing_before.exists() else []
        lacking = missing(plugin, providers)
        if lacking:
            bad += 1
            yield Finding(
                "problem", f"{name}: slurmctld has no {', '.join(lacking[:5])}", "build again: sluice plugin build"
            )
        needed = missing(plugin, [program[1], *providers[len(program) :]], at_once=True)
        if needed and name in _LOADED_ELSEWHERE:
            bad += 1
            yield Finding("problem", f"{name}: users' commands have no {', '.join(needed[:5])}, and could not load it")
        taken = overridden(plugin, program, meant=_OF_EVERY_PLUGIN)
        if taken:
            bad += 1
            yield Finding("problem", f"{name}: slurmctld has a {taken[0]} of its own, which would be called instead")
    if not bad:
        yield Finding("ok", "slurmctld has every function that the plugins call")


def _check_configuration(places: Places, options: SiteOptions) -> Iterator[Finding]:
    conf = places.conf / "slurm.conf"
    if not options.includes_us:
        yield Finding("problem", f"{conf}: does not include {INCLUDE}", f"add to it: Include {INCLUDE}")
    for key, value in stock_parameters(options):
        yield Finding(
            "problem",
            f"{conf}: {key}={value} is set in addition to the one in {INCLUDE}, and only one counts",
            "remove it",
        )
    state = include_state(places)
    if state == "on":
        yield Finding("ok", f"{places.conf / INCLUDE} loads the plugins")
    elif is_disabled(places):
        yield Finding("remark", "switched off by sluice plugin disable", "back with: sluice plugin install")
    elif state == "stock":
        yield Finding("problem", f"{places.conf / INCLUDE}: stock Slurm, by the guard", "sluice plugin install")
    else:
        yield Finding("problem", f"{places.conf / INCLUDE}: {state}", "sluice plugin install")
    if options.select_type and options.select_type.lower() != "select/cons_tres":
        yield Finding("problem", f"{conf}: SelectType={options.select_type}", "placement needs select/cons_tres")
    if options.site_factor not in ("", "site_factor/sluice", "site_factor/none"):
        yield Finding("remark", f"{conf}: order is left to {options.site_factor}")


def _check_burst_buffer(places: Places, options: SiteOptions, stock: Path) -> Iterator[Finding]:
    """The failover journal's plugin: before the site's own, or named where the site has none."""
    conf = places.conf / "slurm.conf"
    name = options.burst_buffer_name
    if name:
        others = [one for one in options.plugin_dir.split(":") if one and one != str(places.search)] or [str(stock)]
        if any(places.real(Path(folder) / f"burst_buffer_{name}.so").exists() for folder in others):
            yield Finding("ok", f"the failover journal comes before the site's own burst_buffer/{name}")
        else:
            yield Finding(
                "problem",
                f"{conf}: BurstBufferType={options.burst_buffer}, but no burst_buffer_{name}.so in {':'.join(others)}",
                "install that plugin, or remove the line",
            )
    elif options.burst_buffer:
        yield Finding(
            "problem",
            f"{conf}: BurstBufferType={options.burst_buffer} keeps slurmctld from starting without Sluice's plugins",
            "remove it, then: sluice plugin install",
        )


def _check_limits(places: Places, build: PluginBuild) -> Iterator[Finding]:
    """Where tasks are held to limits: what slurmstepd starts as root must be there and belong to root."""
    if not holds_tasks(places):
        yield Finding("ok", "tasks start without limits on GPU memory, as install --limits was not used")
        return
    helper = places.real(HELPER)
    if not build.has("spank_sluice_limit"):
        yield Finding("problem", "plugstack.conf requires spank_sluice_limit.so, which is not installed", _AGAIN)
    elif not helper.exists():
        yield Finding("remark", f"{HELPER}: not on this host; no job with GPUs could start a task here")
    else:
        for path in (helper.resolve(), *helper.resolve().parents):
            facts = path.stat()
            if facts.st_uid != 0 or (facts.st_mode & 0o022 and not facts.st_mode & stat.S_ISVTX):
                yield Finding(
                    "problem",
                    f"{path}: users other than root can change what slurmstepd starts",
                    f"chown root {path}; chmod go-w {path}",
                )
                return
        yield Finding("ok", "tasks of jobs with GPUs start with limits")


def _check_policy(places: Places) -> Iterator[Finding]:
    try:
        level = read_level(places)
    except SluiceError as error:
        level = "off"
        yield Finding("problem", error.what, error.remedy)
    path = places.real(places.conf / compiled.FILE_NAME)
    if not path.exists() or path.stat().st_size == 0:
        kind: Literal["ok", "problem"] = "ok" if level == "off" else "problem"
        yield Finding(kind, f"{path}: no policy, so Slurm behaves as stock Slurm", "write one: sluice apply")
        return
    try:
        policy, warnings = compiled.load(path)
    except SluiceError as error:
        yield Finding("problem", error.what, error.remedy)
        return
    for warning in warnings:
        yield Finding("remark", f"{path}: {warning}", "install plugins of the same version of Sluice")
    yield Finding("ok", f"{path}: {len(policy.tenants)} tenants, {len(policy.classes)} classes; level {level}")
