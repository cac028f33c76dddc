"""Real verbs without hardware: soft RoCE (rdma_rxe) of Debian's kernel in a virtual machine with Sluice's packages.

The probe, interfaces of jobs, the preflight's own command, and a cable that is pulled. With SLUICE_TEST_SCALE=full, or
`make test-machines`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from policy.monitoring import NodeMetrics
from policy.node import NodePolicy
from policy.node_limits import NodeLimits
from tests.integration.booted import CannotBootError
from tests.integration.machine_site import cancel_all, is_in_service, sbatch, set_up, srun
from tests.integration.virtual import VirtualMachine, virtual_machine

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(7200)]

_SUITE = "bookworm"
_UNITS = ("munge", "slurmctld", "sluice-agent", "slurmd")
_PORT = 9400  # of metrics
# Two interfaces, each with a cable to one switch. Both have addresses of this machine, so that what one sends to the
# other would not leave it: these two routes come before the kernel's own of local addresses.
_INTERFACES = """
modprobe -a crc32_generic rdma_rxe
sysctl -q -w net.ipv4.conf.all.accept_local=1 net.ipv4.conf.all.arp_ignore=1
ip link add switch type bridge
ip link set switch up
ip rule add pref 100 lookup local
ip rule del pref 0
for n in 0 1; do
    ip link add port$n type veth peer name cable$n
    ip link set cable$n master switch up
    ip address add 10.7.0.$((n + 1))/24 dev port$n
    ip link set port$n up
    ip route add 10.7.0.$((2 - n))/32 dev port$n table 1$n
    ip rule add pref 1$n oif port$n lookup 1$n
    rdma link add rxe$n type rxe netdev port$n
done
"""
# What the node agent does with the orders of a preflight, for two nodes, and for one of them alone.
_MEASURE = """
import json, sys, threading, time
from pathlib import Path
from prolog_epilog.preflight import Measuring
def order(one, role, nic, port):
    peer = {"address": "127.0.0.1", "port": port, "token": "secret"}
    return {"id": one, "role": role, "tool": sys.argv[1], "nic": nic, **peer}
with Measuring() as asks, Measuring() as serves:
    ports = [one.start()["port"] for one in (asks, serves)]
    end = time.monotonic() + 600
    served = [[order("pair", "serve", "rxe1", ports[0])]]
    threading.Thread(target=serves.measure, args=(served, end), daemon=True).start()
    rounds = [[order("pair", "ask", "rxe0", ports[1])], [order("alone", "alone", "rxe0", ports[0])]]
    limits = Path(f"/proc/{asks._program.pid}/limits").read_text()
    print(json.dumps({"limits": limits, **asks.measure(rounds, end)}))
"""
# An emulated processor takes longer than any node that the preflight waits for.
_SLOWLY = r"""
cd /opt/sluice/lib/python3*/site-packages/prolog_epilog
sed -Ei 's/^(RUN_S|TURN_S|_START_S) = .*/\1 = 300.0/' preflight.py programs/fabric_test.py
"""
# Of each interface, how often this program can open it at once, of three tries.
_OPEN = """
import ctypes as c
verbs = c.CDLL("libibverbs.so.1")
for name in ("ibv_get_device_list", "ibv_open_device"):
    getattr(verbs, name).restype = c.c_void_p
verbs.ibv_get_device_name.restype = c.c_char_p
count = c.c_int()
devices = (c.c_void_p * 8).from_address(verbs.ibv_get_device_list(c.byref(count)))[: count.value]
for device in map(c.c_void_p, devices):
    opened = [bool(verbs.ibv_open_device(device)) for _ in range(3)]
    print(verbs.ibv_get_device_name(device).decode(), sum(opened))
"""


@pytest.fixture(scope="module")
def machine(full_scale: bool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VirtualMachine]:
    """With two interfaces of soft RoCE, which jobs are given."""
    if not full_scale:
        pytest.skip("a virtual machine: SLUICE_TEST_SCALE=full")
    try:
        with virtual_machine(tmp_path_factory.mktemp("machine") / "sluice", _SUITE, group="rdma") as made:
            made.shell(_INTERFACES)
            set_up(made, _SUITE, nics=True)
            made.shell(_SLOWLY)
            made.write("/usr/local/lib/measure.py", _MEASURE)
            made.write("/usr/local/lib/open.py", _OPEN)
            made.shell(f"systemctl start {' '.join(_UNITS)}")
            is_in_service(made, _UNITS)
            yield made
    except CannotBootError as error:
        pytest.skip(str(error))


def interfaces(machine: VirtualMachine) -> dict[str, dict[str, Any]]:
    """What the probe finds, by name."""
    return {nic["name"]: nic for nic in json.loads(machine.run("sluice", "probe", "--json"))["nics"]}


def shown(machine: VirtualMachine, name: str) -> dict[str, str]:
    """What libibverbs itself says of an interface."""
    said = machine.run("ibv_devinfo", "--verbose", "--ib-dev", name)
    return dict(re.findall(r"^\s*(\w+):\s+(.*?)$", said, re.MULTILINE))


def health(machine: VirtualMachine) -> str:
    """What a round of checks finds now."""
    return machine.run("sluice", "health", "check", check=False)


def counted(machine: VirtualMachine, name: str) -> int:
    """One of rxe0's counters in the kernel."""
    return int(machine.run("cat", f"/sys/class/infiniband/rxe0/ports/1/hw_counters/{name}"))


# ---- the probe ----


def test_the_probe_finds_what_libibverbs_says(machine: VirtualMachine) -> None:
    found = interfaces(machine)
    assert list(found) == ["rxe0", "rxe1"]
    for number, (name, nic) in enumerate(found.items()):
        said = shown(machine, name)
        assert nic["guid"] == said["node_guid"].replace(":", "") != "0" * 16
        assert (nic["firmware"], said["fw_ver"]) == ("", "0.0.0")  # it has none
        assert nic["device_file"] == f"/dev/infiniband/uverbs{number}"
        assert (nic["pci_address"], nic["parent"]) == ("", "")
        [port] = nic["ports"]
        assert port["number"] == 1 and port["lid"] is None
        assert (port["state"], said["state"].split()[0]) == ("ACTIVE", "PORT_ACTIVE")
        assert (port["physical_state"], port["link_layer"]) == ("LinkUp", said["link_layer"])
        lanes, speed = (float(re.findall(r"[\d.]+", said[f"active_{word}"])[0]) for word in ("width", "speed"))
        assert port["rate_gbps"] == lanes * speed > 0
        assert port["network"] == f"port{number}"
        assert port["guid"]
    assert found["rxe0"]["guid"] != found["rxe1"]["guid"]
    assert found["rxe0"]["ports"][0]["guid"] != found["rxe1"]["ports"][0]["guid"]


# ---- the preflight ----


def test_the_preflights_own_command_measures_over_real_verbs(machine: VirtualMachine) -> None:
    """As a service with systemd's own limits, like the agent."""
    before = counted(machine, "sent_pkts")
    program = ["/opt/sluice/bin/python3", "/usr/local/lib/measure.py", "perftest"]

    def measured() -> tuple[float, float, float] | None:
        """None where perftest cannot tell the clock of its emulated processor."""
        said = machine.run("systemd-run", "--quiet", "--wait", "--pipe", *program)
        found = json.loads(said.splitlines()[-1])
        assert re.search(r"Max locked memory +1073741824 ", found["limits"])
        (gbs, us), (alone, _) = found["pair"], found["alone"]
        return (gbs, us, alone) if gbs and us and alone else None

    gbs, us, alone = machine.wait(measured, 1800)
    assert 0.0001 < gbs < 100 and 1 < us < 10_000_000 and 0.0001 < alone < 100
    assert counted(machine, "sent_pkts") - before > 1000  # the data went by the interface


# ---- interfaces of jobs ----


def opened(text: str) -> dict[str, int]:
    """What the program says."""
    return {name: int(count) for name, count in (line.split() for line in text.splitlines())}


def test_a_job_opens_its_own_interface_and_no_other(machine: VirtualMachine) -> None:
    program = ["python3", "/usr/local/lib/open.py"]
    assert set(opened(srun(machine, "--gpus=1", *program)).values()) == {0}
    machine.write("/tmp/first.sh", f"#!/bin/sh\nsrun --quiet {' '.join(program)}; exec sleep 3600\n", "755")
    asked = "--gres=gpu:1,nic:1"  # with --gpus its step would ask for GPUs alone
    first = sbatch(machine, asked, "--output=/tmp/first.out", "/tmp/first.sh")
    try:
        machine.wait(lambda: machine.run("cat", "/tmp/first.out", check=False).count("rxe") == 2)
        one, other = opened(machine.run("cat", "/tmp/first.out")), opened(srun(machine, asked, *program))
    finally:
        cancel_all(machine)
    assert first and sorted(one.values()) == sorted(other.values()) == [0, 3]
    assert one != other


def test_a_jobs_handles_are_bounded_by_the_kernel(machine: VirtualMachine) -> None:
    machine.write("/etc/slurm/sluice.node.json", NodePolicy(limits=NodeLimits(rdma_handles=2)).render())
    try:
        tries = srun(machine, "--gres=gpu:1,nic:1", "python3", "/usr/local/lib/open.py")
    finally:
        machine.shell("rm /etc/slurm/sluice.node.json")
    assert sorted(opened(tries).values()) == [0, 2]


# ---- links ----


def test_a_cable_that_is_pulled_is_noticed(machine: VirtualMachine) -> None:
    metrics = NodeMetrics(prometheus=f"127.0.0.1:{_PORT}", interval=1)
    machine.write("/etc/slurm/sluice.node.json", NodePolicy(metrics=metrics).render())
    fetch = f"import urllib.request as r; print(r.urlopen('http://127.0.0.1:{_PORT}/metrics').read().decode())"

    def value(nic: str, name: str) -> str:
        page = machine.run("python3", "-c", fetch, check=False)
        found = re.search(rf'^sluice_nic_{name}{{[^}}]*nic="{nic}"[^}}]*}} (\d+)', page, re.MULTILINE)
        return found[1] if found else ""

    try:
        machine.wait(lambda: value("rxe0", "up") == "1" and value("rxe0", "link_downs_total") == "0")
        assert "fabric_flaps" not in health(machine)
        for times in (1, 2, 3):
            machine.run("ip", "link", "set", "cable0", "down")
            machine.wait(lambda: value("rxe0", "up") == "0")
            if times == 1:
                [port] = interfaces(machine)["rxe0"]["ports"]
                assert (port["state"], port["network"]) == ("DOWN", "port0")
            machine.run("ip", "link", "set", "cable0", "up")
            machine.wait(lambda: value("rxe0", "up") == "1")
            assert value("rxe0", "link_downs_total") == str(times)
        assert (value("rxe1", "up"), value("rxe1", "link_downs_total")) == ("1", "0")
        said = health(machine)
        assert re.search(r"fabric_flaps.*3 link failures.*rxe0 3", said), said
    finally:
        machine.shell("rm /etc/slurm/sluice.node.json; ip link set cable0 up")
