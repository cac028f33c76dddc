"""Users of model services: who has to read what."""

from __future__ import annotations

import grp
import pwd
from collections.abc import Iterator

from gres_probe.doctor.check import CannotCheckError, Outcome, SiteView, check, fail, ok
from policy.service_jobs import FILE_NAME
from sluice.exchange.serving import GATEWAY_USER, REPLICAD_USER


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
