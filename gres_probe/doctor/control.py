"""Versions, controllers and the state that they keep."""

from __future__ import annotations

import os
import pwd
import re
import stat
from collections import Counter
from collections.abc import Iterator

from gres_probe.doctor.check import CannotCheckError, Outcome, SiteView, check, fail, ok, skip, warn
from sluice.base.errors import SluiceError
from sluice.base.slurm_version import OLDEST, format_slurm_version, parse_slurm_version

_NETWORK_FILE_SYSTEMS = re.compile(
    r"nfs\d?|lustre|gpfs|mmfs|ceph|fuse\.ceph.*|beegfs\w*|glusterfs|fuse\.glusterfs|gfs2|ocfs2|wekafs|panfs|cifs|smb3|9p"
)
_OLD_STATE_S = 3600  # slurmctld writes its state within seconds of a change


@check("config", "slurm.conf can be read")
def config(site: SiteView) -> Iterator[Outcome]:
    """slurm.conf itself, its includes, and who may change it."""
    try:
        faults = site.slurm.config.faults
    except SluiceError as error:
        yield fail(error.what, error.remedy)
        return
    for fault in faults[:5]:
        yield fail(f"{fault.place}: {fault.what}", "correct the line; see: sluice lint")
    for file in site.slurm.config.files:
        if file.stat().st_mode & stat.S_IWOTH:
            yield fail(f"{file} can be written by every user", f"chmod o-w {file}")
    if not faults:
        yield ok(f"{site.slurm_conf}: {len(site.slurm.nodes)} nodes, {len(site.slurm.config.files)} files")


@check("versions", "versions of commands, slurmctld and slurmd")
def versions(site: SiteView) -> Iterator[Outcome]:
    """A cluster of one version, and one that Sluice supports."""
    try:
        commands = site.client.version()
    except SluiceError as error:
        yield fail(f"Slurm's commands: {error.what}", "install slurm-client, or name it with --slurm-prefix")
        return
    shown = format_slurm_version(commands)
    if commands < OLDEST:
        yield fail(f"Slurm {shown} is older than {format_slurm_version(OLDEST)}", "upgrade Slurm")
    controller = site.effective.get("SLURM_VERSION", "")
    if controller and parse_slurm_version(controller) != commands:
        yield warn(f"slurmctld is {controller}, the commands are {shown}", "bring all hosts to one version")
    running = Counter(node.version for node in site.nodes if node.version)
    others = {text: count for text, count in running.items() if parse_slurm_version(text) != commands}
    for text, count in others.items():
        yield warn(f"{count} slurmd are {text}, the commands are {shown}", "upgrade the nodes")
    if commands >= OLDEST and not others:
        yield ok(f"Slurm {shown} everywhere ({sum(running.values())} nodes)")


@check("controllers", "controllers answer")
def controllers(site: SiteView) -> Iterator[Outcome]:
    """Every slurmctld of SlurmctldHost."""
    answering = site.client.ping()
    for controller in answering:
        if not controller.up:
            yield fail(f"slurmctld on {controller.host} ({controller.role}) does not answer", "start it; see its log")
    up = [controller.host for controller in answering if controller.up]
    if len(up) == len(answering):
        yield ok(f"{', '.join(up)}")


@check("backup-controller", "a backup controller takes over")
def backup_controller(site: SiteView) -> Iterator[Outcome]:
    """More than one SlurmctldHost, and a timeout that is neither too short nor too long."""
    if site.slurm.controllers < 2:
        yield warn("one slurmctld only", "add a second SlurmctldHost, with StateSaveLocation on a shared file system")
        return
    timeout = re.match(r"\d+", site.option("SlurmctldTimeout", "120"))
    seconds = int(timeout[0]) if timeout else 120
    if seconds < 4:
        yield fail(f"SlurmctldTimeout={seconds}: the heartbeat interval becomes 0", "set it to 10 or more")
    elif seconds >= 120:
        yield warn(f"SlurmctldTimeout={seconds}: {seconds} s without a scheduler", "set it to 10 to 30")
    else:
        yield ok(f"{site.slurm.controllers} controllers, takeover after {seconds} s")


@check("state", "StateSaveLocation is safe")
def state(site: SiteView) -> Iterator[Outcome]:
    """It exists, only SlurmUser can write it, it is not temporary, it is shared with a backup controller, and fresh."""
    setting = site.option("StateSaveLocation", "/var/spool")
    path = site.host(setting)
    if re.match(r"/(tmp|var/tmp|dev/shm|run)(/|$)", setting):
        yield fail(f"{setting} does not survive a reboot", "move it to a persistent file system")
    if not path.exists():
        yield skip(f"{setting} is not on this host", "run sluice doctor on the controller")
        return
    status = path.stat()
    user = site.option("SlurmUser", "root").partition("(")[0]
    try:
        uid = pwd.getpwnam(user).pw_uid
    except KeyError:
        yield fail(f"SlurmUser {user!r} does not exist on this host", "create it, with the same number everywhere")
        return
    if status.st_uid != uid:
        yield fail(f"{setting} belongs to user {status.st_uid}, not to {user}", f"chown {user} {setting}")
    if status.st_mode & (stat.S_IWOTH | stat.S_IWGRP):
        yield fail(f"{setting} can be written by others than {user}", f"chmod go-w {setting}")
    kind = site.mount(path).kind
    if site.slurm.controllers > 1 and kind and not _NETWORK_FILE_SYSTEMS.fullmatch(kind):
        yield warn(f"{setting} is on {kind}: the backup controller may not see it", "put it on a shared file system")
    jobs = path / "job_state"
    if site.privileged and jobs.exists() and site.controller_answers:
        age = site.clock() - jobs.stat().st_mtime
        if age > _OLD_STATE_S:
            yield warn(f"{setting}/job_state is {age / 3600:.0f} h old", "check that slurmctld can write it")
    free = os.statvfs(path)
    if free.f_bavail * free.f_frsize < 1 << 30:
        yield fail(f"{setting}: less than 1 GiB free", "free space; a full state folder loses jobs")
    yield ok(f"{setting} on {kind or 'an unknown file system'}")


@check("scheduling", "scheduler and priorities")
def scheduling(site: SiteView) -> Iterator[Outcome]:
    """The scheduler's settings that GPUs, shards and ordering need."""
    version = site.version
    select = site.option("SelectType", "select/cons_tres" if version >= (23, 11, 0) else "select/linear")
    if not select.endswith("cons_tres"):
        yield fail(f"SelectType={select}: GPUs are not allocated one by one", "set SelectType=select/cons_tres")
    parameters = site.option("SelectTypeParameters").upper()
    if "MEMORY" not in parameters:
        yield warn("main memory is not allocated to jobs", "set SelectTypeParameters=CR_Core_Memory")
    priority = site.option("PriorityType", "priority/multifactor" if version >= (23, 11, 0) else "priority/basic")
    if not priority.endswith("multifactor"):
        yield warn(f"PriorityType={priority}: first come, first served", "set PriorityType=priority/multifactor")
    scheduler = site.option("SchedulerType", "sched/backfill")
    if not scheduler.endswith("backfill"):
        yield warn(f"SchedulerType={scheduler}", "set SchedulerType=sched/backfill")
    yield ok(f"{select}, {priority}, {scheduler}")


@check("authentication", "authentication between the daemons")
def authentication(site: SiteView) -> Iterator[Outcome]:
    """munge or Slurm's own keys, and who may read them."""
    kind = site.option("AuthType", "auth/munge")
    if kind == "auth/none":
        yield fail("AuthType=auth/none: any user can act as any other", "use auth/munge")
        return
    keys = {"auth/munge": "/etc/munge/munge.key", "auth/slurm": str(site.folder / "slurm.key")}
    key = keys.get(kind)
    if key is None:
        yield warn(f"AuthType={kind} is unknown", "use auth/munge")
        return
    path = site.host(key)
    try:
        status = path.stat()
    except PermissionError:
        yield ok(f"{kind}; its key cannot be read by this user, as it should be")
        return
    except FileNotFoundError:
        raise CannotCheckError(f"{key} is not on this host") from None
    if status.st_mode & (stat.S_IRWXO | stat.S_IRWXG):
        yield fail(f"{key} can be read by others", f"chmod 0400 {key}")
    else:
        yield ok(kind)
