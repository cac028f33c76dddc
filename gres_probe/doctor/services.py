"""Users of model services: who has to read what."""

from __future__ import annotations

import grp
import pwd
from collections.abc import Iterator

from gres_probe.doctor.check import CannotCheckError, Outcome, SiteView, check, fail, ok, warn
from policy.service_jobs import FILE_NAME, parse
from sluice.base.errors import SluiceError
from sluice.exchange.serving import GATEWAY_USER, REPLICAD_USER

_LOCKS_ALONE = frozenset(("nolock", "local_lock=all", "local_lock=flock", "localflock", "noflock"))
"""Options of NFS and Lustre with which flock() keeps nobody out on other hosts."""
_WITHOUT_LINKS = frozenset(("vfat", "exfat"))


@check("services", "users of model services")
def services(site: SiteView) -> Iterator[Outcome]:
    """replicad and slurmctld's user read the records of requests, which are the gateway's."""
    if not (site.folder / FILE_NAME).exists():
        raise CannotCheckError("no model services were applied")
    try:
        records = grp.getgrnam(GATEWAY_USER)
    except KeyError:
        raise CannotCheckError(f"no gateway is on this host: it has no group {GATEWAY_USER}") from None
    slurm_user = site.option("SlurmUser", "root").partition("(")[0]
    daemons = {REPLICAD_USER: "sluice-replicad", slurm_user: "sluice-controllerd"}
    readers = {user: daemon for user, daemon in daemons.items() if _is_there(user)}
    if not readers:
        raise CannotCheckError(f"nobody on this host would read the records: no user {' or '.join(daemons)}")
    missing = [user for user in readers if not _may_read(user, records)]
    for user in missing:
        what = f"user {user} is not in group {GATEWAY_USER}: {readers[user]} cannot read the records of requests"
        yield fail(what, f"usermod -aG {GATEWAY_USER} {user}; systemctl restart {readers[user]}")
    if not missing:
        yield ok(f"{' and '.join(readers)} may read the records of requests")


@check("batches", "the folder of gateways' files and batches")
def batches(site: SiteView) -> Iterator[Outcome]:
    """All gateways share it, with locks that hold over hosts, and with hard links."""
    file = site.folder / FILE_NAME
    if not file.exists():
        raise CannotCheckError("no model services were applied")
    try:
        policy = parse(file.read_bytes(), source=str(file)).batches
    except (SluiceError, OSError) as error:
        raise CannotCheckError(f"{file}: cannot be read: {error}") from error
    if policy is None:
        raise CannotCheckError("the policy has no serving.batches")
    folder = site.host(policy.folder)
    if not folder.exists():
        raise CannotCheckError(f"{policy.folder}: not on this host; gateways make it")
    if folder.stat().st_mode & 0o077:
        yield fail(f"{policy.folder}: others may read it", f"chmod 700 {policy.folder}")
    mount = site.mount(folder)
    alone = mount.options & _LOCKS_ALONE
    if alone:
        what = f"{policy.folder}: {mount.kind} with {', '.join(sorted(alone))}: locks do not hold over hosts"
        yield fail(what, "mount it without these options, or with NFS 4, on all hosts with gateways")
    elif mount.kind in _WITHOUT_LINKS:
        yield fail(f"{policy.folder}: {mount.kind} has no hard links", "put it on another file system")
    elif "soft" in mount.options:
        what = f"{policy.folder}: {mount.kind} with soft: writes may be lost while its server is away"
        yield warn(what, "mount it with hard, which is usual")
    else:
        yield ok(f"{policy.folder} on {mount.kind or 'an unknown file system'}")


def _is_there(user: str) -> bool:
    """Else it runs nothing here."""
    try:
        pwd.getpwnam(user)
    except KeyError:
        return False
    return True


def _may_read(user: str, records: grp.struct_group) -> bool:
    known = pwd.getpwnam(user)
    return known.pw_uid == 0 or known.pw_gid == records.gr_gid or user in records.gr_mem
