"""Accounting: without it there is no usage, no fair share and no limit."""

from __future__ import annotations

import stat
from collections.abc import Iterator

from gres_probe.doctor.check import Outcome, SiteView, check, fail, ok, warn
from sluice.base.errors import SluiceError


@check("accounting", "accounting storage")
def accounting(site: SiteView) -> Iterator[Outcome]:
    """slurmdbd answers, counts GPUs, and limits are enforced."""
    storage = site.option("AccountingStorageType", "accounting_storage/none")
    if not storage.endswith("slurmdbd"):
        yield fail(f"AccountingStorageType={storage}: no usage, no limits", "set up slurmdbd; see docs/doctor.md")
        return
    tracked = site.option("AccountingStorageTRES").lower().split(",")
    types = [name for name in site.option("GresTypes").split(",") if name in ("gpu", "shard")]
    for name in types:
        if f"gres/{name}" not in tracked:
            yield warn(
                f"gres/{name} is not accounted", f"add gres/{name} to AccountingStorageTRES and restart slurmctld"
            )
    enforced = {word.strip() for word in site.option("AccountingStorageEnforce", "none").lower().split(",")}
    wanted = {"limits", "qos"}
    if "all" not in enforced and not wanted <= enforced:
        yield warn(
            f"AccountingStorageEnforce={','.join(sorted(enforced))}: limits are not enforced",
            "set AccountingStorageEnforce=associations,limits,qos,safe",
        )
    try:
        site.client.accounting_jobs(ids=[1], start=int(site.clock()) - 60)
    except SluiceError as error:
        yield fail(f"slurmdbd does not answer: {error.what}", "start it; see slurmdbd.log")
        return
    yield ok(f"slurmdbd at {site.option('AccountingStorageHost', 'localhost')}")


@check("slurmdbd-conf", "slurmdbd.conf keeps its password")
def slurmdbd_conf(site: SiteView) -> Iterator[Outcome]:
    """Only its owner can read it, as it holds the database's password."""
    path = site.folder / "slurmdbd.conf"
    if not path.exists():
        return
    if path.stat().st_mode & (stat.S_IRWXO | stat.S_IRGRP | stat.S_IWGRP):
        yield fail(f"{path} can be read by others", f"chmod 0600 {path}")
    else:
        yield ok(str(path))
