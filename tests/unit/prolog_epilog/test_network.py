"""The interface towards the controllers, in a network of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from prolog_epilog.network import Network, interface_to
from sluice.base.errors import SluiceError

SCRIPT = """
ip link set lo up
ip link add sluice0 type veth peer name sluice1
ip address add 192.0.2.1/24 dev sluice0
ip link set sluice0 up
ip link set sluice1 up
exec "$@"
"""
ASK = """
from prolog_epilog.network import interface_to
print([interface_to(host) for host in ("192.0.2.7", "192.0.2.1", "127.0.0.1")])
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a network namespace: needs root")
def test_the_interface_towards_a_host() -> None:
    """A host that is the controller has its own address; no other node reaches it by loopback."""
    command = ["unshare", "--net", "sh", "-ec", SCRIPT, "sh", sys.executable, "-c", ASK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "['sluice0', 'sluice0', '']\n"


def test_without_a_way_what_was_known_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone() -> None:
        raise SluiceError("no slurm.conf on this node")

    with pytest.raises(OSError):
        interface_to("host.invalid")
    network = Network()
    network.interface = "eth0"
    monkeypatch.setattr("prolog_epilog.network.controllers", gone)
    network.run()
    assert network.interface == "eth0"
