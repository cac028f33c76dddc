"""The plugins that slurm.conf names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from gres_probe.doctor.check import CannotCheckError, Outcome, SiteView, check, fail, ok, warn
from sluice.base.errors import SluiceError
from sluice.base.slurm_version import format_slurm_version, parse_slurm_version

_OPTIONS = (
    "AccountingStorageType", "AuthType", "BurstBufferType", "JobAcctGatherType", "JobCompType", "PreemptType",
    "PriorityType", "PrioritySiteFactorPlugin", "ProctrackType", "SchedulerType", "SelectType", "SwitchType",
    "TaskPlugin", "TopologyPlugin",
)  # fmt: skip
_OF_SLURMCTLD = frozenset({"burst_buffer", "job_submit", "site_factor"})
_MANIFEST = "/usr/local/lib/sluice/current/manifest.json"
_NO_PLUGIN = frozenset({"", "none", "(null)"})
_WITHOUT_FILE_SINCE_23_11 = frozenset({"accounting_storage/none", "jobcomp/none", "preempt/none", "switch/none"})


@check("plugins", "plugins are installed")
def plugins(site: SiteView) -> Iterator[Outcome]:
    """Every plugin that the configuration names, and this host loads, is in one of the folders of PluginDir."""
    setting = site.option("PluginDir")
    if not setting:
        raise CannotCheckError("PluginDir is not in slurm.conf and slurmctld does not answer")
    folders = [site.host(folder) for folder in setting.split(":")]
    for folder in folders:
        if not folder.is_dir():
            yield fail(f"PluginDir: {folder} does not exist on this host", "correct PluginDir, or install the plugins")
        elif folder.stat().st_mode & 0o002:
            yield fail(f"PluginDir: {folder} can be written by every user", f"chmod o-w {folder}")
    missing = []
    names = [one for one in _wanted(site) if site.is_controller or one[0] not in _OF_SLURMCTLD]
    for kind, name in names:
        file = f"{kind}_{name}.so"
        if not any((folder / file).exists() for folder in folders):
            missing.append(f"{kind}/{name}")
    if missing:
        yield fail(f"not installed: {', '.join(missing)}", f"install them into {setting}")
    else:
        yield ok(f"{len(names)} plugins in {setting}")
    yield from _check_version(site)
    stack = site.host(site.option("PlugStackConfig", str(site.folder / "plugstack.conf")))
    yield from _check_plugstack(stack, folders)


def _wanted(site: SiteView) -> list[tuple[str, str]]:
    wanted = []
    for option in _OPTIONS:
        for value in site.option(option).split(","):
            kind, slash, name = value.strip().partition("/")
            if slash and name not in _NO_PLUGIN and value not in _WITHOUT_FILE_SINCE_23_11:
                wanted.append((kind, name.partition("/")[0]))
    submit = site.option("JobSubmitPlugins")
    wanted += [("job_submit", name.rpartition("/")[2]) for name in submit.split(",") if name not in _NO_PLUGIN]
    types = site.option("GresTypes").split(",")
    wanted += [("gres", name) for name in types if name in ("gpu", "mps", "nic", "shard")]
    return list(dict.fromkeys(wanted))


def _check_version(site: SiteView) -> Iterator[Outcome]:
    """Sluice's own fit one Slurm to the last digit; slurmctld starts without them where they do not."""
    path = site.host(_MANIFEST)
    if not path.is_file():
        return
    try:
        built = parse_slurm_version(str(json.loads(path.read_text())["slurm_version"]))
    except (ValueError, LookupError, TypeError, SluiceError) as error:
        yield fail(f"{path}: cannot be read: {error}", "sluice plugin install")
        return
    if built != site.version:
        yield fail(
            f"Sluice's plugins are for Slurm {format_slurm_version(built)}, this host has "
            f"{format_slurm_version(site.version)}",
            "build and install them again: sluice plugin install",
        )


def _check_plugstack(stack: Path, folders: list[Path]) -> Iterator[Outcome]:
    if not stack.is_file():
        return
    for line in stack.read_text(errors="replace").splitlines():
        words = line.split("#")[0].split()
        if len(words) >= 2 and words[0] in ("required", "optional"):
            path = Path(words[1])
            if not (path.exists() if path.is_absolute() else any((folder / path).exists() for folder in folders)):
                say = fail if words[0] == "required" else warn
                yield say(f"{stack}: {words[1]} does not exist", "install it, or remove the line")
