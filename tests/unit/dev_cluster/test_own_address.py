"""The library by which machines of a cluster connect from their own addresses."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

LIBRARY = Path(__file__).parents[3] / "dev_cluster/own_address/libown_address.so"
CONNECTS = """
import socket, sys
for bound in ("", "127.9.9.9"):
    with socket.socket() as one:
        if bound:
            one.bind((bound, 0))
        one.connect(("127.0.0.1", int(sys.argv[1])))
        print(one.getsockname()[0])
"""


@pytest.mark.parametrize(("own", "seen"), [("127.1.0.7", "127.1.0.7"), ("nonsense", "127.0.0.1")])
def test_a_machine_connects_from_its_own_address_unless_it_has_chosen_one(own: str, seen: str) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=2) as server:
        done = subprocess.run(
            [sys.executable, "-c", CONNECTS, str(server.getsockname()[1])],
            env={"LD_PRELOAD": str(LIBRARY), "SLUICE_OWN_ADDRESS": own},
            capture_output=True, text=True, check=True, timeout=30,
        )  # fmt: skip
    assert done.stdout.split() == [seen, "127.9.9.9"]
