"""Versions, controllers and the state that they keep."""

from __future__ import annotations

import os
import pwd
import re
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from gres_probe.doctor.model import CannotLookError, Outcome, Patient, check, fail, ok, skip, warn
from sluice_base.errors import SluiceError
from sluice_base.slurm_version import OLDEST, format_slurm_version, parse_slurm_version

_NETWORK_FILE_SYSTEMS = re.compile(
    r"nfs\d?|lustre|gpfs|mmfs|ceph|fuse\.ceph.*|beegfs\w*|glusterfs|fuse\.glusterfs|gfs2|ocfs2|wekafs|panfs|cifs|smb3|9p"
)
_OLD_STATE_S = 3600  # slurmctld writes its state within seconds of a change


@check("config", "slurm.conf can be read")
def config(patient: Patient) -> Iterator[Outcome]:
    """slurm.conf itself, its includes, who may change it."""
    try:
        faults = patient.slurm.config.faults
    except SluiceError as error:
        yield fail(error.what, error.remedy)
        return
    for fault in faults[:5]:
        yield fail(f"{fault.place}: {fault.what}", "correct the line; see: sluice lint")
    for file in patient.slurm.config.files:
        if file.stat().st_mode & stat.S_IWOTH:
            yield fail(f"{file} may be written by everyone", f"chmod o-w {file}")
    if not faults:
        yield ok(f"{patient.slurm_conf}: {len(patient.slurm.nodes)} nodes, {len(patient.slurm.config.files)} files")


@check("versions", "versions of commands, slurmctld and slurmd")
def versions(patient: Patient) -> Iterator[Outcome]:
    """A cluster of one version, and one that Sluice supports."""
    try:
        commands = patient.client.version()
    except SluiceError as error:
        yield fail(f"Slurm's commands: {error.what}", "install slurm-client, or name it with --slurm-prefix")
        return
    shown = format_slurm_version(commands)
    if commands < OLDEST:
        yield fail(f"Slurm {shown} is older than {format_slurm_version(OLDEST)}", "upgrade Slurm")
    controller = patient.effective.get("SLURM_VERSION", "")
    if controller and parse_slurm_version(controller) != commands:
        yield warn(f"slurmctld is {controller}, the commands are {shown}", "bring all hosts to one version")
    running = Counter(node.version for node in patient.nodes if node.version)
    others = {text: count for text, count in running.items() if parse_slurm_version(text) != commands}
    for text, count in others.items():
        yield warn(f"{count} slurmd of version {text}, the commands are {shown}", "upgrade the nodes")
    if commands >= OLDEST and not others:
        yield ok(f"Slurm {shown} everywhere ({sum(running.values())} nodes)")


@check("controllers", "controllers answer")
def controllers(patient: Patient) -> Iterator[Outcome]:
    """Every slurmctld of SlurmctldHost."""
    answering = patient.client.ping()
    for controller in answering:
        if not controller.up:
            yield fail(f"slurmctld on {controller.host} ({controller.role}) does not answer", "start it; see its log")
    up = [controller.host for controller in answering if controller.up]
    if len(up) == len(answering):
        yield ok(f"{', '.join(up)}")


@check("backup-controller", "a backup controller takes over")
def backup_controller(patient: Patient) -> Iterator[Outcome]:
    """More than one SlurmctldHost, and a time-out that is neither reckless nor endless."""
    hosts = [line for line in patient.slurm.config.lines if line.head.key.lower() == "slurmctldhost"]
    legacy = bool(patient.slurm.option("BackupController"))
    if len(hosts) < 2 and not legacy:
        yield warn("one slurmctld only", "add a second SlurmctldHost, with StateSaveLocation on a shared file system")
        return
    timeout = re.match(r"\d+", patient.option("SlurmctldTimeout", "120"))
    seconds = int(timeout[0]) if timeout else 120
    if seconds < 4:
        yield fail(f"SlurmctldTimeout={seconds}: the heartbeat interval becomes 0", "set it to 10 or more")
    elif seconds >= 120:
        yield warn(f"SlurmctldTimeout={seconds}: {seconds} s without a scheduler", "set it to 10 to 30")
    else:
        yield ok(f"{max(len(hosts), 2)} controllers, take-over after {seconds} s")


@check("state", "StateSaveLocation is safe")
def state(patient: Patient) -> Iterator[Outcome]:
    """There, the SlurmUser's alone, not in a temporary folder, shared when there is a backup controller, fresh."""
    setting = patient.option("StateSaveLocation", "/var/spool")
    path = patient.host(setting)
    if re.match(r"/(tmp|var/tmp|dev/shm|run)(/|$)", setting):
        yield fail(f"{setting} does not survive a reboot", "move it to a lasting file system")
    if not path.exists():
        yield skip(f"{setting} is not on this host", "run sluice doctor on the controller")
        return
    status = path.stat()
    user = patient.option("SlurmUser", "root").partition("(")[0]
    try:
        uid = pwd.getpwnam(user).pw_uid
    except KeyError:
        yield fail(f"SlurmUser {user!r} does not exist on this host", "create it, with the same number everywhere")
        return
    if status.st_uid != uid:
        yield fail(f"{setting} belongs to user {status.st_uid}, not to {user}", f"chown {user} {setting}")
    if status.st_mode & (stat.S_IWOTH | stat.S_IWGRP):
        yield fail(f"{setting} may be written by others than {user}", f"chmod go-w {setting}")
    controllers = sum(line.head.key.lower() == "slurmctldhost" for line in patient.slurm.config.lines)
    kind = file_system(patient, path)
    if controllers > 1 and kind and not _NETWORK_FILE_SYSTEMS.fullmatch(kind):
        yield warn(f"{setting} is on {kind}: does the backup controller see it?", "put it on a shared file system")
    jobs = path / "job_state"
    if patient.privileged and jobs.exists() and patient.controller_answers:
        age = patient.clock() - jobs.stat().st_mtime
        if age > _OLD_STATE_S:
            yield warn(f"{setting}/job_state is {age / 3600:.0f} h old", "see that slurmctld can write it")
    free = os.statvfs(path)
    if free.f_bavail * free.f_frsize < 1 << 30:
        yield fail(f"{setting}: less than 1 GiB free", "make room; a full state folder loses jobs")
    yield ok(f"{setting} on {kind or 'an unknown file system'}")


def file_system(patient: Patient, path: Path) -> str:
    """The type of the file system that holds a path; empty when unknown."""
    best, kind = "", ""
    try:
        lines = patient.host("/proc/mounts").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    resolved = str(path.resolve())
    for line in lines:
        words = line.split()
        if len(words) >= 3 and len(words[1]) >= len(best) and Path(resolved).is_relative_to(words[1]):
            best, kind = words[1], words[2]
    return kind


@check("scheduling", "scheduler and priorities")
def scheduling(patient: Patient) -> Iterator[Outcome]:
    """What GPUs, shards and ordering need of the scheduler."""
    version = patient.version
    select = patient.option("SelectType", "select/cons_tres" if version >= (23, 11, 0) else "select/linear")
    if not select.endswith("cons_tres"):
        yield fail(f"SelectType={select}: GPUs are not allocated one by one", "set SelectType=select/cons_tres")
    parameters = patient.option("SelectTypeParameters").upper()
    if "MEMORY" not in parameters:
        yield warn("main memory is not allocated to jobs", "set SelectTypeParameters=CR_Core_Memory")
    priority = patient.option("PriorityType", "priority/multifactor" if version >= (23, 11, 0) else "priority/basic")
    if not priority.endswith("multifactor"):
        yield warn(f"PriorityType={priority}: first come, first served", "set PriorityType=priority/multifactor")
    scheduler = patient.option("SchedulerType", "sched/backfill")
    if not scheduler.endswith("backfill"):
        yield warn(f"SchedulerType={scheduler}", "set SchedulerType=sched/backfill")
    yield ok(f"{select}, {priority}, {scheduler}")


@check("authentication", "authentication between the daemons")
def authentication(patient: Patient) -> Iterator[Outcome]:
    """munge or Slurm's own keys, and who may read them."""
    kind = patient.option("AuthType", "auth/munge")
    if kind == "auth/none":
        yield fail("AuthType=auth/none: everyone is everyone", "use auth/munge")
        return
    keys = {"auth/munge": "/etc/munge/munge.key", "auth/slurm": str(patient.folder / "slurm.key")}
    key = keys.get(kind)
    if key is None:
        yield warn(f"AuthType={kind} is unknown", "use auth/munge")
        return
    path = patient.host(key)
    try:
        status = path.stat()
    except PermissionError:
        yield ok(f"{kind}; its key is out of our sight, as it should be")
        return
    except FileNotFoundError:
        raise CannotLookError(f"{key} is not on this host") from None
    if status.st_mode & (stat.S_IRWXO | stat.S_IRWXG):
        yield fail(f"{key} may be read by others", f"chmod 0400 {key}")
    else:
        yield ok(kind)
