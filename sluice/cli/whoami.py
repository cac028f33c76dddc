"""`sluice whoami`: what may I use?"""

from __future__ import annotations

import json

import click

from sluice.cli.site_options import ClusterOptions, cluster_options


@click.command("whoami")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@cluster_options
def command(as_json: bool, cluster: ClusterOptions) -> None:
    """My tenants, what is left of their quotas, the GPUs of the cluster, and a job that I can submit."""
    from policy.access import caller
    from policy.live import Cluster, gpus_of
    from policy.names import OVER_QOS
    from policy.quota_use import example, quota_rows, read_use

    slurm = Cluster.at(cluster.conf, cluster.prefix)
    who = caller(slurm)
    tenants = {name: one for name, one in read_use(slurm, only=who.user).items() if who.user in one.members}
    types = sorted({kind for node in slurm.client.nodes() for kind in gpus_of(node)[0] if kind})
    partition = next((one.name for one in slurm.client.partitions() if one.default), "")
    level = ("user", "operator", "administrator")[who.level]
    if as_json:
        document = {
            "schema_version": 1,
            "user": who.user,
            "level": level,
            "coordinates": sorted(who.coordinates),
            "gpu_types": types,
            "tenants": [
                {**one.document(), "quota": quota_rows(one), "example": example(one, types, partition)}
                for one in tenants.values()
            ],
        }
        click.echo(json.dumps(document, indent=2))
        return
    click.echo(
        f"{who.user}: {level}" + (f", coordinator of {', '.join(sorted(who.coordinates))}" if who.coordinates else "")
    )
    click.echo(f"GPU types of the cluster: {', '.join(types) or 'none'}")
    if not tenants:
        click.echo("no tenant: jobs need one; ask an administrator (sluice tenant members NAME --add " f"{who.user})")
    for one in tenants.values():
        over = f"; over-quota work: --qos={OVER_QOS}" if one.borrows and one.default_qos != OVER_QOS else ""
        click.echo(f"tenant {one.name} (qos {one.default_qos or '-'}{over})")
        for row in quota_rows(one):
            limit = "no limit" if row["limit"] is None else f"{row['left']:g} left of {row['limit']:g}"
            sure = "" if row["guaranteed"] is None else f", {row['guaranteed']:g} guaranteed"
            click.echo(f"  {row['what']:<16} {limit}{sure}")
        alone = one.member_limits.get(who.user, {}).get("GrpTRES")
        if alone:
            click.echo(f"  {'for you alone':<16} {alone}")
        click.echo(f"  try: {example(one, types, partition)}")
