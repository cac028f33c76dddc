"""`sluice plugin`: Sluice's plugins in Slurm: build, install, watch, switch, uninstall."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sluice.base.errors import UsageError
from sluice.cli.slurm_options import find_slurm_conf
from sluice.cli.tables import Column, TableOptions, table_options

if TYPE_CHECKING:
    from sluice.base.slurm_version import SlurmVersion
    from sluice.plugin.builder import PluginBuild
    from sluice.plugin.install import Places, Result
    from sluice.plugin.site import SiteOptions
    from sluice.plugin.status import Controller, Finding

_PATH = click.Path(path_type=Path)
_RELEASE_S = 30.0  # slurmctld looks at the level's file each second
_RELEASE = "squeue -h -t PD -o '%i|%r' | sed -n 's/|Gang .*//p' | xargs -r -n1 scontrol release"


@click.group("plugin")
def command() -> None:
    """Sluice's plugins in Slurm: build, install, watch, switch, uninstall."""


def _build_options(function: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option("--slurm-plugin-dir", type=_PATH, metavar="DIR", help="Slurm's own plugins; default: found."),
        click.option("--slurm-source", type=_PATH, metavar="DIR", help="A configured source tree of the same Slurm."),
        click.option("--slurm-prefix", type=_PATH, metavar="DIR", help="Where Slurm is installed; default: found."),
    ):
        function = option(function)
    return function


def _place_options(function: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option("--systemd-dir", type=_PATH, metavar="DIR", help="Default: /etc/systemd/system."),
        click.option("--search-dir", type=_PATH, metavar="DIR", help="On every host; default: /usr/local/lib."),
        click.option("--slurm-conf", type=_PATH, metavar="PATH", help="Default: SLURM_CONF, else /etc/slurm."),
    ):
        function = option(function)
    return function


@command.command()
@_build_options
@click.option("--sanitize", is_flag=True, help="With the address sanitizer, for tests.")
@click.option("--output", type=_PATH, metavar="DIR", help="An empty or new folder; default: in the cache.")
def build(
    slurm_plugin_dir: Path | None,
    slurm_source: Path | None,
    slurm_prefix: Path | None,
    sanitize: bool,
    output: Path | None,
) -> None:
    """Build the plugins for exactly the Slurm that is installed, and print the folder that they are in."""
    made = _build(slurm_plugin_dir, slurm_source, slurm_prefix, sanitize=sanitize, output=output)
    click.echo(made.folder)


@command.command()
@_build_options
@_place_options
@click.option("--build", "folder", type=_PATH, metavar="DIR", help="A folder of built plugins; default: build them.")
@click.option("--spank-only", is_flag=True, help="Only what plugstack.conf names, for login hosts and nodes.")
@click.option("--limits", is_flag=True, help="Start tasks with GPUs only under the node agent's limits.")
@click.option("--trace", is_flag=True, help="Jobs are part of the trace of their submission (TRACEPARENT).")
def install(
    slurm_plugin_dir: Path | None,
    slurm_source: Path | None,
    slurm_prefix: Path | None,
    slurm_conf: Path | None,
    search_dir: Path | None,
    systemd_dir: Path | None,
    folder: Path | None,
    spank_only: bool,
    limits: bool,
    trace: bool,
) -> None:
    """Put the plugins into this host's Slurm. Nothing changes until slurmctld restarts, at level off.

    They come from the package sluice-plugins-RELEASE where it is installed, else they are built.

    Hosts that read one plugstack.conf need what it names in one place: with --limits install on all of them first.
    """
    from sluice.plugin.builder import packaged_build, read_build
    from sluice.plugin.install import install as install_build
    from sluice.plugin.site import find_plugin_dir, find_program

    places, options = _places(slurm_conf, search_dir, systemd_dir)
    program, version = _installed(slurm_prefix, spank_only)
    made = read_build(folder) if folder else None
    if made is None and not (
        slurm_source or slurm_prefix or slurm_plugin_dir
    ):  # else it is not the distribution's Slurm
        made = packaged_build(version)
    made = made or _build(slurm_plugin_dir, slurm_source, slurm_prefix, spank_only=spank_only)
    stock = slurm_plugin_dir or find_plugin_dir(prefix=slurm_prefix or Path("/usr"))
    _say(
        install_build(
            made,
            places,
            slurm=version,
            stock=stock,
            slurmctld=program if not spank_only else find_program("slurmctld", "srun", prefix=slurm_prefix),
            options=options,
            spank_only=spank_only,
            limits=limits,
            trace=trace,
        )
    )


@command.command()
@_build_options
@_place_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def check(
    slurm_plugin_dir: Path | None,
    slurm_source: Path | None,
    slurm_prefix: Path | None,
    slurm_conf: Path | None,
    search_dir: Path | None,
    systemd_dir: Path | None,
    as_json: bool,
) -> None:
    """Whether the installed plugins fit Slurm, are loaded, and have a policy; exit 1 when something is wrong."""
    from sluice.plugin import status as plugin_status
    from sluice.plugin.site import find_plugin_dir

    places, options = _places(slurm_conf, search_dir, systemd_dir, required=True)
    program, version = _installed(slurm_prefix, False)
    stock = slurm_plugin_dir or find_plugin_dir(prefix=slurm_prefix or Path("/usr"))
    findings = list(plugin_status.check(places, options, slurm=version, slurmctld=program, stock=stock))
    if as_json:
        rows = [{"kind": one.kind, "what": one.what, "remedy": one.remedy} for one in findings]
        click.echo(json.dumps({"schema_version": 1, "findings": rows}, indent=2))
    else:
        for one in findings:
            click.echo(f"{one.kind}: {one.what}{_remedy(one)}")
    if any(one.kind == "problem" for one in findings):
        raise click.exceptions.Exit(1)


def _remedy(finding: Finding) -> str:
    return f"; {finding.remedy}" if finding.remedy and finding.kind != "ok" else ""


_ORIGINS = {
    "package": "from the package",
    "other": "not those of the package (sluice plugin install takes those)",
    "built": "built on this host or by --build",
}
_COLUMNS: list[Column[Controller]] = [
    Column("host", lambda one: one.host),
    Column("level", lambda one: one.report.get("level")),
    Column("asked", lambda one: one.report.get("level_asked")),
    Column("slurm", lambda one: one.report.get("slurm_version")),
    Column("plugins", lambda one: one.report.get("plugins"), lambda value: ",".join(value)),
    Column("policy", lambda one: (one.report.get("policy") or {}).get("checksum")),
    Column("source", lambda one: (one.report.get("policy") or {}).get("source")),
    Column("tenants", lambda one: (one.report.get("policy") or {}).get("tenants"), right=True),
    Column("loaded", lambda one: (one.report.get("policy") or {}).get("loaded"), lambda value: _time(value)),
    Column("started", lambda one: one.report.get("started"), lambda value: _time(value)),
    Column("error", lambda one: one.report.get("policy_error") or one.report.get("level_error")),
]


def _with_old_names(report: dict[str, Any]) -> dict[str, Any]:
    """The counters of the hook's time also by their names until 0.1.0."""
    new, old = "select.hook_us_", "select.own_us_"
    counters = report.get("counters", {})
    aliases = {name.replace(new, old): value for name, value in counters.items() if name.startswith(new)}
    return {**report, "counters": counters | aliases}


@command.command()
@_place_options
@table_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object, with all counters.")
def status(
    slurm_conf: Path | None,
    search_dir: Path | None,
    systemd_dir: Path | None,
    table: TableOptions,
    as_json: bool,
) -> None:
    """Level, policy and last error of the plugins in each controller's slurmctld. Exit 1 where one has an error."""
    from sluice.base.slurm_version import format_slurm_version
    from sluice.plugin.install import installed_build, read_level
    from sluice.plugin.status import include_state, origin, read_controllers

    places, options = _places(slurm_conf, search_dir, systemd_dir, required=True)
    controllers = read_controllers(Path(options.state_folder))
    made = installed_build(places)
    if as_json:
        document = {
            "schema_version": 1,
            "installed": None if made is None else format_slurm_version(made.slurm),
            "origin": None if made is None else origin(made),
            "include_file": include_state(places),
            "level": read_level(places),
            "controllers": [
                {**_with_old_names(one.report), "host": one.host, "written": int(one.written)} for one in controllers
            ],
        }
        click.echo(json.dumps(document, indent=2))
    else:
        if not table.parsable2 and not table.noheader:
            installed = "nothing"
            if made is not None:
                installed = f"for Slurm {format_slurm_version(made.slurm)}, {_ORIGINS[origin(made)]}"
            state = f"include file: {include_state(places)}; level asked for: {read_level(places)}"
            click.echo(f"installed here: {installed}; {state}", err=True)
            if not controllers:
                click.echo(f"no slurmctld with the plugins has run (nothing in {options.state_folder})", err=True)
        default = ("host", "level", "asked", "slurm", "plugins", "policy", "tenants", "loaded", "error")
        table.print(_COLUMNS, controllers, default=default)
    if any(one.report.get("policy_error") or one.report.get("level_error") for one in controllers):
        raise click.exceptions.Exit(1)


def _time(value: Any) -> str:
    return datetime.fromtimestamp(value, UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if value else ""


@command.command()
@click.option("--slurm-conf", type=_PATH, metavar="PATH", help="Default: SLURM_CONF, else /etc/slurm.")
@click.argument("level", required=False, metavar="[off|admit|shadow|place]")
def level(slurm_conf: Path | None, level: str | None) -> None:
    """Print the level that is asked for, or ask for LEVEL: it is in force within a second, without a restart.

    off: stock Slurm. admit: submissions are checked and completed. shadow: order and placement are decided and
    recorded, stock's are used. place: they are used.
    """
    from policy import compiled
    from sluice.plugin.install import read_level, write_level

    places, _ = _places(slurm_conf, None, None)
    if level is None:
        click.echo(read_level(places))
        return
    write_level(places, level)
    policy = places.conf / compiled.FILE_NAME
    if level != "off" and (not policy.exists() or policy.stat().st_size == 0):
        click.echo(f"sluice: {policy}: no policy yet; until then the level is off (sluice apply writes one)", err=True)


@command.command()
@_place_options
def disable(slurm_conf: Path | None, search_dir: Path | None, systemd_dir: Path | None) -> None:
    """Return to stock Slurm: level off at once, and no plugin of Sluice's from the next start of slurmctld."""
    from sluice.plugin import install as installation

    places, options = _places(slurm_conf, search_dir, systemd_dir)
    result = installation.disable(places)
    _await_gangs(result, options)
    _say(result)


@command.command()
@_place_options
def uninstall(slurm_conf: Path | None, search_dir: Path | None, systemd_dir: Path | None) -> None:
    """Remove the plugins from this host. Jobs continue; a running slurmctld keeps them, at level off, until it ends."""
    from sluice.plugin import install as installation

    places, options = _places(slurm_conf, search_dir, systemd_dir)
    result = installation.uninstall(places, options)
    _await_gangs(result, options)
    _say(result)


# ---- what the commands share ----


def _places(
    slurm_conf: Path | None, search_dir: Path | None, systemd_dir: Path | None, *, required: bool = False
) -> tuple[Places, SiteOptions]:
    from sluice.plugin.install import DEFAULT_SEARCH, SYSTEMD, Places
    from sluice.plugin.site import SiteOptions, read_site_options

    conf = find_slurm_conf(slurm_conf, required=required)
    folder = conf.parent if conf else Path("/etc/slurm")
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder", remedy="name slurm.conf or its folder with --slurm-conf")
    places = Places(
        conf=folder.absolute(),
        search=(search_dir or DEFAULT_SEARCH).absolute(),
        systemd=(systemd_dir or SYSTEMD).absolute(),
    )
    return places, read_site_options(conf.absolute()) if conf else SiteOptions()


def _installed(prefix: Path | None, spank_only: bool) -> tuple[Path, SlurmVersion]:
    from sluice.plugin.site import find_program, program_version

    program = find_program(*(("srun", "slurmd") if spank_only else ("slurmctld",)), prefix=prefix)
    return program, program_version(program)


def _build(
    plugin_dir: Path | None,
    source: Path | None,
    prefix: Path | None,
    *,
    sanitize: bool = False,
    output: Path | None = None,
    spank_only: bool = False,
) -> PluginBuild:
    from sluice.base.slurm_version import format_slurm_version
    from sluice.plugin.builder import build_plugins, find_source, fresh_output
    from sluice.plugin.site import find_plugin_dir

    _, version = _installed(prefix, spank_only)
    made = find_source(version, named=source, installed=(prefix or Path("/usr")) / "include")
    some = "" if made.whole else ": job_submit and SPANK only, for the levels off and admit"
    click.echo(f"Slurm {format_slurm_version(version)}{some}", err=True)
    stock = plugin_dir or find_plugin_dir(prefix=prefix or Path("/usr"))
    return build_plugins(
        made,
        fresh_output(output, version, sanitize),
        plugin_dir=stock,
        sanitizer="address" if sanitize else "",
        progress=lambda line: click.echo(line, err=True),
    )


def _await_gangs(result: Result, options: SiteOptions) -> None:
    """On a controller, wait until slurmctld, at level off now, has released the members of gangs: nothing else does."""
    from sluice.base.errors import SluiceError
    from sluice.plugin.status import read_controllers

    deadline = time.monotonic() + _RELEASE_S
    try:
        if socket.gethostname() not in {one.host for one in read_controllers(Path(options.state_folder))}:
            return
        while (held := _held_members()) and time.monotonic() < deadline:
            time.sleep(0.5)
    except SluiceError as error:
        result.left.append(f"{error}; what waits in a gang stays held until an administrator releases it: {_RELEASE}")
        return
    if held:
        result.left.append(
            "members of gangs are still held; where no other controller is at level place, release them: "
            f"scontrol release {','.join(held)}"
        )


def _held_members() -> list[str]:
    from sluice.slurm.commands import Commands

    lines = Commands().output("squeue", "-h", "-t", "PD", "-o", "%i|%r").splitlines()
    return [job for job, _, reason in (line.partition("|") for line in lines) if reason.startswith("Gang ")]


def _say(result: Result) -> None:
    for line in result.done:
        click.echo(line)
    if result.left:
        click.echo("left to do:", err=True)
    for line in result.left:
        click.echo(f"  - {line}", err=True)
