"""The driver `vm` with a real guest: Debian, set up by cloud-init, whose slurmd registers with a cluster's slurmctld.

By emulation, so that a boot takes minutes: with SLUICE_TEST_SCALE=full.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from dev_cluster.cluster import DevCluster
from dev_cluster.configuration import CLUSTER_NAME
from dev_cluster.layout import INSIDE
from sluice.base.files import write_atomic
from sluice.fleet.drivers import qemu
from tests.integration.booted import CannotBootError
from tests.integration.conftest import MakeCluster
from tests.integration.fleet_site import nodes, status
from tests.integration.jobs import state as state_of
from tests.integration.jobs import submit
from tests.integration.settled import until
from tests.integration.virtual import machine_image

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(7200)]

_PATIENCE_S = 3000.0
_NODE = "guest-1"
_SHAPE = {"name": "small", "cpus": 2, "memory": "700M", "price": 1}
_DESCRIPTION: dict[str, Any] = {
    "nodes": [{"names": "fixed-1", "platform": "none"}, {"names": _NODE, "platform": "none", "pool": True}],
    "partitions": [{"name": "main", "nodes": "fixed-1"}],
    "accounts": [{"name": "physics"}],
    "users": [{"name": "alice", "accounts": ["physics"]}],
    "controllers": 1,
    "shards": False,
    "controllerd": True,
}
# slurmctld and slurmd find each other through QEMU's user network: 10.0.2.2 is this machine's 127.0.0.1, where the
# cluster's relay listens.
_CONF = f"""ClusterName={CLUSTER_NAME}
SlurmctldHost=ctl1(10.0.2.2)
SlurmctldPort=%(slurmctld)d
SlurmdPort=%(slurmd)d
AuthType=auth/munge
SlurmUser=slurm
SlurmdSpoolDir=/var/spool/slurmd
SlurmdLogFile=/dev/console
ProctrackType=proctrack/cgroup
TaskPlugin=task/cgroup
GresTypes=gpu
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
NodeName=%(node)s CPUs=2 RealMemory=700 State=CLOUD
PartitionName=guest Nodes=%(node)s
"""
_SET_UP = """#!/bin/sh
set -eu
for pair in slurm:%(slurm)d alice:%(alice)d; do
    name=${pair%%:*} id=${pair#*:}
    if getent passwd "$name" >/dev/null; then usermod -u "$id" "$name"; else useradd -u "$id" "$name"; fi
done
echo %(key)s | base64 -d >/etc/munge/munge.key
chown munge: /etc/munge/munge.key
chmod 400 /etc/munge/munge.key
echo %(conf)s | base64 -d >/etc/slurm/slurm.conf
echo CgroupMountpoint=/sys/fs/cgroup >/etc/slurm/cgroup.conf
install -d -o slurm /var/spool/slurmd
echo "SLURMD_OPTIONS='-N {node}'" >/etc/default/slurmd
systemctl start --no-block munge slurmd
"""


def policy(image: Path, forward: str = "") -> str:
    """`forward`: of which port to the guest; it is known when the cluster is up."""
    settings = {
        "image": f"{image}/disk.raw", "kernel": f"{image}/vmlinuz", "initrd": f"{image}/initrd",
        "append": "root=/dev/vda console=ttyS0 net.ifnames=0 mitigations=off panic=-1 network-config=disabled",
        "accel": os.environ.get("SLUICE_QEMU_ACCEL", "tcg"), "shapes": {"small": "-smp 2 -m 1024"},
        "user_data": f"{INSIDE}/guest.sh",
        "stop_within": 3600,  # longer than the test waits: the guest itself has to power off
        "options": ["-nic", f"user,model=virtio-net-pci,mac={{mac}}{forward}"],
    }  # fmt: skip
    pool = {
        "driver": "vm", "settings": settings, "nodes": _NODE, "shapes": [_SHAPE], "idle": "1s", "list_every": "1s",
        "end_within": "15m", "boot_within": "45m",
    }  # fmt: skip
    fleet = {"programs": f"{INSIDE}/bin", "look_every": "1s"}
    tenants = {"physics": {"members": ["alice"]}}
    return yaml.safe_dump({"version": 1, "tenants": tenants, "fleet": fleet, "pools": {"guest": pool}})


def set_up(cluster: DevCluster) -> dict[str, Any]:
    """What the guest needs to know, in a file that is SlurmUser's alone; what is in it."""
    facts = json.loads(cluster.layout.facts.read_text())
    address = next(
        line.split()[0] for line in (cluster.layout.overlay / "hosts").read_text().splitlines() if _NODE in line
    )
    known = {
        "slurmctld": facts["ports"]["slurmctld"], "slurmd": facts["ports"]["slurmctld"] + 7, "address": address,
        "node": _NODE, "slurm": facts["unix_users"]["slurm"]["uid"], "alice": facts["unix_users"]["alice"]["uid"],
    }  # fmt: skip
    known["key"] = base64.b64encode((cluster.layout.overlay / "munge/munge.key").read_bytes()).decode()
    known["conf"] = base64.b64encode((_CONF % known).encode()).decode()
    path = cluster.folder / "guest.sh"
    write_atomic(path, _SET_UP % known, mode=0o600)
    shutil.chown(path, known["slurm"])
    return known


def console(cluster: DevCluster) -> str:
    """The end of what the machine has said."""
    folder = next((cluster.folder / "fleet").glob("vm-guest@*/vm-*"))
    return str(qemu.ask(folder, "ringbuf-read", device="console", size=65_536))[-3000:]


def test_a_guest_is_set_up_registers_runs_a_job_and_powers_off(full_scale: bool, make_cluster: MakeCluster) -> None:
    if not full_scale:
        pytest.skip("a virtual machine: SLUICE_TEST_SCALE=full")
    try:
        image = machine_image("bookworm", add="cloud-init")
    except CannotBootError as error:
        pytest.skip(str(error))
    cluster = make_cluster({**_DESCRIPTION, "policy": policy(image)})
    known = set_up(cluster)
    forward = f",hostfwd=tcp:{known['address']}:{known['slurmd']}-10.0.2.15:{known['slurmd']}"
    write_atomic(cluster.layout.sluice / "sluice.yaml", policy(image, forward))
    cluster.run(["sluice", "apply", "--yes"], node="ctl1")
    job = submit(cluster, "-p", "guest", "--mem=100", wrap=f"grep -q {_NODE} /etc/hostname && systemd-detect-virt --vm")
    until(
        lambda: state_of(cluster, job), lambda seen: seen == "COMPLETED", _PATIENCE_S,
        shows=lambda: (status(cluster).nodes, console(cluster)),
    )  # fmt: skip
    until(lambda: nodes(cluster)[_NODE].stage, lambda seen: not seen, _PATIENCE_S, shows=lambda: console(cluster))
    steps = [one.what for one in status(cluster).history if one.node == _NODE]
    assert steps == ["asked", "launched", "registered", "terminating", "gone: not_wanted"]
