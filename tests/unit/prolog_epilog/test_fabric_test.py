"""The program that measures between nodes: real processes, real TCP, a link that the kernel makes slow, strangers."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from prolog_epilog.preflight import PROGRAM
from prolog_epilog.programs import fabric_test
from sluice.base.errors import SluiceError
from sluice.base.run import run_command
from sluice.fabric.preflight import Preflight
from sluice.fabric.tested import Member, Result
from sluice.fabric.tested import Test as OneTest
from sluice.fabric.usual import Rules
from tests.integration.settled import until

STAND_IN = Path(__file__).parents[2] / "integration/stand_in_perftest.py"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="makes network namespaces")


class Node:
    """A host on which the program runs; `address` is that of its peers' way to it."""

    def __init__(self, address: str, before: tuple[str, ...] = (), path: str = "/usr/bin:/bin") -> None:
        self.address = address
        self.program = subprocess.Popen(
            [*before, "/usr/bin/python3", "-IS", str(PROGRAM)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={"PATH": path}, text=True,
        )  # fmt: skip
        self.hello = self.read()

    def read(self) -> dict[str, Any]:
        assert self.program.stdout is not None
        return dict(json.loads(self.program.stdout.readline()))

    def order(self, *rounds: list[dict[str, Any]]) -> None:
        assert self.program.stdin is not None
        self.program.stdin.write(json.dumps(rounds) + "\n")
        self.program.stdin.flush()

    def close(self) -> None:
        self.program.kill()
        self.program.communicate()


@contextmanager
def nodes(*made: Node) -> Iterator[tuple[Node, ...]]:
    try:
        yield made
    finally:
        for node in made:
            node.close()


def order(one: str, role: str, peer: Node, tool: str = "tcp", token: str = "secret", nic: str = "x") -> dict[str, Any]:
    port = peer.hello["port"]
    return {"id": one, "role": role, "tool": tool, "nic": nic, "address": peer.address, "port": port, "token": token}


def pair(one: Node, other: Node, **more: str) -> dict[str, Any]:
    """What the first of two measures."""
    one.order([order("1", "ask", other, **more)])
    other.order([order("1", "serve", one, **more)])
    other.read()
    return one.read()


def test_two_hosts_measure_each_other() -> None:
    with nodes(Node("127.0.0.1"), Node("127.0.0.1")) as (one, other):
        result = pair(one, other)
    assert result["id"] == "1"
    assert result["gbs"] > 0.05
    assert 0 < result["us"] < 100_000


def test_a_peer_that_hears_of_the_test_later_is_waited_for() -> None:
    with nodes(Node("127.0.0.1"), Node("127.0.0.1")) as (one, other):
        one.order([order("1", "ask", other)])
        time.sleep(0.5)
        other.order([order("1", "serve", one)])
        assert one.read()["gbs"] > 0.05


@pytest.mark.parametrize("role", ["ask", "serve"])
def test_a_peer_that_is_gone_is_soon_given_up(role: str) -> None:
    with nodes(Node("127.0.0.1"), Node("127.0.0.1")) as (one, other):
        other.close()
        began = time.monotonic()
        one.order([order("1", role, other)], [order("2", "alone", one)])
        assert one.read()["gbs"] is None
        assert one.read()["gbs"] > 0.05
        assert time.monotonic() - began < 10


def test_who_has_another_token_is_not_measured_with() -> None:
    with nodes(Node("127.0.0.1"), Node("127.0.0.1")) as (one, other):
        one.order([order("1", "ask", other, token="guessed")])
        other.order([order("1", "serve", one)])
        assert one.read()["gbs"] is None


@pytest.mark.parametrize("address", ["127.0.0.9", "127.0.0.1"])
def test_strangers_neither_inject_a_result_nor_keep_peers_out(address: str) -> None:
    """From an address of their own, or from the peer's own host, where another tenant's job runs."""
    with nodes(Node("127.0.0.1"), Node("127.0.0.1")) as (one, other):
        port = other.hello["port"]
        # Silent, or with something to say.
        crowd = [socket.create_connection(("127.0.0.1", port), 5, (address, 0)) for _ in range(128)]
        for number, stranger in enumerate(crowd):
            try:
                if number % 2:
                    stranger.sendall(b'{"id": "1", "nonce": "0", "proof": "00"}\n{"gbs": 0.001}\n')
            except OSError:  # it was turned away
                continue
        result = pair(one, other)
        for stranger in crowd:
            stranger.close()
    assert result["gbs"] > 0.05


def perftest_of(folder: Path) -> str:
    """A PATH of the stand-in alone, without other tools of this machine."""
    folder.mkdir(exist_ok=True)
    for name in fabric_test.TOOLS["perftest"]:
        (folder / name).write_bytes(STAND_IN.read_bytes())
        (folder / name).chmod(0o755)
    (folder / "speeds.json").write_text("{}")
    return str(folder)


def test_perftest_is_used_where_it_is_installed(tmp_path: Path) -> None:
    path = perftest_of(tmp_path)
    with nodes(Node("127.0.0.1", path=path), Node("127.0.0.1", path=path)) as (one, other):
        assert one.hello["tools"] == ["perftest", "tcp"]
        assert pair(one, other, tool="perftest") == {"id": "1", "gbs": 48.0, "us": 2.4}


@pytest.mark.parametrize(("zero", "gbs"), [("ib_write_bw", None), ("ib_write_lat", 48.0)])
def test_a_tool_that_says_0_does_not_keep_the_peer(tmp_path: Path, zero: str, gbs: float | None) -> None:
    """The serving host goes on at once, and not when the time of its tool is over."""
    asks, serves = perftest_of(tmp_path / "asks"), perftest_of(tmp_path / "serves")
    program = tmp_path / "asks" / zero
    program.write_text(program.read_text().replace("{8 * slower:.2f}", "0.00").replace("2.40", "0.00"))
    with nodes(Node("127.0.0.1", path=asks), Node("127.0.0.1", path=serves)) as (one, other):
        began = time.monotonic()
        assert pair(one, other, tool="perftest") == {"id": "1", "gbs": gbs, "us": 0.0}
        assert time.monotonic() - began < fabric_test.RUN_S


@pytest.mark.parametrize(
    "out",
    [
        "", "Couldn't connect\n", " #bytes #iterations\n", " 65536 x 0.00 1.0 2.0\n",
        " 65536      28           0.000000            0.000000            0.000000\n",  # it cannot tell the clock
        f" 65536 28 0.0 {'9' * 400} 0.0\n",  # which is infinite
    ],
)  # fmt: skip
def test_output_of_perftest_without_figures_is_no_answer(out: str) -> None:
    with pytest.raises(fabric_test.SilentError):
        fabric_test.figure("ib_write_bw", out)


def test_output_of_perftest_is_parsed_whatever_it_is() -> None:
    chance = random.Random(1)
    words = ["65536", "0.00", "48.1", "nan", "-1", "1e9", ".", "", "\u0663", "9" * 400, "#", "\n", "\x00", "x"]
    for _ in range(3000):
        out = " ".join(chance.choices(words, k=chance.randint(0, 30)))
        with suppress(fabric_test.SilentError):
            assert fabric_test.figure(chance.choice(["ib_write_bw", "ib_write_lat"]), out) >= 0


def network_of(pid: str) -> Path:
    return Path(f"/proc/{pid}/ns/net").readlink()


@contextmanager
def switched(count: int, slow: int | None = None) -> Iterator[list[int]]:
    """Network namespaces on one switch, 10.9.0.1 and so on; the cable of `slow` passes 40 Mbit/s: the others
    give several times as much also where this machine has no time for them."""
    holders = [subprocess.Popen(["unshare", "--net", "sleep", "600"]) for _ in range(count + 1)]
    try:
        own = network_of("self")  # a holder that has no network of its own yet is still in this one
        until(lambda: own in [network_of(str(holder.pid)) for holder in holders], lambda waits: not waits)
        switch, *hosts = [holder.pid for holder in holders]

        def there(pid: int, *words: str) -> None:
            run_command(["nsenter", "-t", str(pid), "-n", *words], timeout=30)

        there(switch, "ip", "link", "add", "br0", "type", "bridge")
        there(switch, "ip", "link", "set", "br0", "up")
        for number, pid in enumerate(hosts):
            there(switch, "ip", "link", "add", f"p{number}", "type", "veth", "peer", "name", "eth0", "netns", str(pid))
            there(switch, "ip", "link", "set", f"p{number}", "master", "br0", "up")
            there(pid, "ip", "address", "add", f"10.9.0.{number + 1}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                there(pid, "ip", "link", "set", device, "up")
        shape = ["root", "tbf", "rate", "40mbit", "burst", "64k", "latency", "50ms"]
        if slow is not None:
            there(hosts[slow], "tc", "qdisc", "add", "dev", "eth0", *shape)
        yield hosts
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()


@needs_root
def test_a_link_that_the_kernel_makes_slow_is_named() -> None:
    try:
        with switched(4, slow=2) as hosts:
            made = [Node(f"10.9.0.{n + 1}", ("nsenter", "-t", str(pid), "-n")) for n, pid in enumerate(hosts)]
            with nodes(*made):
                verdict = judged({f"n{n}": node for n, node in enumerate(made)})
    except SluiceError as error:
        pytest.skip(f"no such network on this kernel: {error}")
    [finding] = verdict.findings
    assert finding.node == "n2"
    assert finding.text.startswith("node n2's link eth0 slow: 0.00")


# Of hosts with little time for their network: what one measures of itself is good, and none is called congested.
_EARLIER = {("tcp", kind, False): [(0.02, 10_000.0, f"n{n % 4}") for n in range(8)] for kind in ("loopback", "pair")}


def judged(by_name: dict[str, Node]) -> Any:
    """A whole preflight, with the core's own tests."""
    members = [Member(name, ("eth0",), ("",), (), "tcp") for name in by_name]
    preflight = Preflight(members, Rules(least=0.02), _EARLIER)
    for turn in range(40):
        tests = preflight.next_round()
        if not tests:
            return preflight.verdict()
        preflight.take(measured(by_name, tests, turn))
    raise AssertionError


def measured(by_name: dict[str, Node], tests: list[OneTest], turn: int) -> list[Result]:
    orders: dict[str, list[dict[str, Any]]] = {name: [] for name in by_name}
    for number, test in enumerate(tests):
        one = f"{turn}.{number}"
        if test.kind == "loopback":
            orders[test.node].append(order(one, "alone", by_name[test.node]))
        else:
            orders[test.node].append(order(one, "ask", by_name[test.other]))
            orders[test.other].append(order(one, "serve", by_name[test.node]))
    for name, some in orders.items():
        by_name[name].order(some)
    said = {(name, (result := by_name[name].read())["id"]): result for name, some in orders.items() for _ in some}
    found = [(test, said[test.node, f"{turn}.{number}"]) for number, test in enumerate(tests)]
    return [Result(test, one["gbs"], one["us"]) for test, one in found]


needs_ucx = pytest.mark.skipif(shutil.which("ucx_perftest") is None, reason="needs ucx_perftest (ucx-utils)")


@needs_ucx
def test_ucx_measures_between_hosts_and_to_itself() -> None:
    """The real one, over TCP by the loopback interface."""
    with nodes(Node("127.0.0.1"), Node("127.0.0.1")) as (one, other):
        assert "ucx" in one.hello["tools"]
        result = pair(one, other, tool="ucx", nic="lo")
        one.order([order("2", "alone", one, tool="ucx", nic="lo")])
        alone = one.read()
    assert result["gbs"] > 0.01
    assert 0 < result["us"] < 1_000_000
    assert alone["gbs"] > 0.01


@needs_ucx
def test_ucx_is_parsed_by_shared_memory_too(tmp_path: Path) -> None:
    """Another transport of the same program, whose figures are of another size; preflights never use it."""
    program = tmp_path / "ucx_perftest"
    program.write_text('#!/bin/sh\nunset UCX_NET_DEVICES\nUCX_TLS=shm exec /usr/bin/ucx_perftest "$@"\n')
    program.chmod(0o755)
    path = f"{tmp_path}:/usr/bin:/bin"
    with nodes(Node("127.0.0.1", path=path), Node("127.0.0.1", path=path)) as (one, other):
        result = pair(one, other, tool="ucx", nic="nosuch0")
    assert result["gbs"] > 0.01
    assert 0 < result["us"] < 1_000_000


@needs_ucx
def test_ucx_by_an_interface_that_is_not_there_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fabric_test, "RUN_S", 3.0)
    turn = fabric_test.Turn({"nic": "nosuch0", "tool": "ucx", "token": "x"})
    port = fabric_test.free_port()
    server = fabric_test.start_tool("ucx_bw", turn, port)
    try:
        with pytest.raises(fabric_test.SilentError):
            fabric_test.run_tool("ucx_bw", turn, "127.0.0.1", port)
    finally:
        server.kill()
        server.communicate()


UCX_SAYS = """[1699.1] [n1:1:0] sock.c:325 UCX  WARN  a, b
iterations,50.0_percentile_lat,avg_lat,overall_lat,avg_bw,overall_bw,avg_mr,overall_mr
1000,4.687,5.979,7.614,45776.37,46000.00,1739,1139
"""


def test_output_of_ucx_is_parsed_whatever_it_is() -> None:
    assert fabric_test.figure("ucx_bw", UCX_SAYS) == pytest.approx(48.23, abs=0.01)
    assert fabric_test.figure("ucx_lat", UCX_SAYS) == 4.687
    chance = random.Random(1)
    words = [*UCX_SAYS.split("\n"), *UCX_SAYS.split(","), "iterations,", "nan", "-1", "9" * 400, "\u0663", ",", "\x00"]
    for _ in range(3000):
        out = "\n".join(chance.choices(words, k=chance.randint(0, 12)))
        with suppress(fabric_test.SilentError):
            assert fabric_test.figure(chance.choice(["ucx_bw", "ucx_lat"]), out) >= 0


needs_libfabric = pytest.mark.skipif(shutil.which("fi_pingpong") is None, reason="needs fi_pingpong (libfabric-bin)")


@needs_libfabric
def test_libfabric_measures_between_hosts_and_to_itself() -> None:
    """The real one, over TCP by the loopback interface."""
    with nodes(Node("127.0.0.1"), Node("127.0.0.1")) as (one, other):
        result = pair(one, other, tool="libfabric", nic="lo")
        one.order([order("2", "alone", one, tool="libfabric", nic="lo")])
        alone = one.read()
    assert result["gbs"] > 0.001
    assert 0 < result["us"] < 1_000_000
    assert alone["gbs"] > 0.001


@needs_root
@needs_libfabric
def test_libfabric_measures_by_the_interface_that_is_named() -> None:
    """Of two that reach the peer: that of its address, and another one."""
    try:
        with switched(2) as pids:
            inside = [("nsenter", "-t", str(pid), "-n") for pid in pids]
            run_command(
                [*inside[0], "ip", "link", "add", "eth1", "type", "veth", "peer", "eth1", "netns", str(pids[1])]
            )
            for number, words in enumerate(inside):
                run_command([*words, "ip", "address", "add", f"10.8.0.{number + 1}/24", "dev", "eth1"])
                run_command([*words, "ip", "link", "set", "eth1", "up"])

            def sent(nic: str) -> int:
                said = run_command([*inside[0], "ip", "-json", "-stats", "link", "show", "dev", nic]).stdout
                return int(json.loads(said)[0]["stats64"]["tx"]["bytes"])

            with nodes(*(Node(f"10.9.0.{n + 1}", words) for n, words in enumerate(inside))) as (one, other):
                for nic, idle in (("eth0", "eth1"), ("eth1", "eth0")):
                    before = sent(nic), sent(idle)
                    assert pair(one, other, tool="libfabric", nic=nic)["gbs"] > 0.001
                    assert sent(nic) - before[0] > 64 << 20
                    assert sent(idle) - before[1] < 1 << 20
    except SluiceError as error:
        pytest.skip(f"no such network on this kernel: {error}")


@pytest.fixture
def interfaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes this node's only RDMA interface, x, one of a driver."""
    monkeypatch.setattr(fabric_test, "RDMA", str(tmp_path / "infiniband"))

    def make(driver: str) -> None:
        (tmp_path / "drivers" / driver).mkdir(parents=True)
        (tmp_path / "infiniband/x/device").mkdir(parents=True)
        (tmp_path / "infiniband/x/device/driver").symlink_to(tmp_path / "drivers" / driver)

    return make


@pytest.mark.parametrize(
    ("driver", "tools"),
    [
        ("", ["perftest", "ucx", "libfabric", "tcp"]),
        ("mlx5_core", ["perftest", "ucx", "tcp"]),
        ("efa", ["libfabric", "tcp"]),
    ],
)
def test_a_node_offers_what_can_measure_by_its_interfaces(
    interfaces: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, driver: str, tools: list[str]
) -> None:
    monkeypatch.setattr(fabric_test, "find", lambda program: program)
    if driver:
        interfaces(driver)
    assert fabric_test.installed() == tools


@needs_libfabric
def test_efa_is_measured_by_its_own_provider(
    interfaces: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command line for EFA, which real fi_pingpong then follows by shared memory."""
    interfaces("efa")
    said = tmp_path / "said"
    (tmp_path / "fi_pingpong").write_text(
        f'#!/bin/sh\necho "shm $FI_EFA_ENABLE_SHM_TRANSFER $@" >>{said}\n'
        "exec /usr/bin/fi_pingpong $(echo \"$@\" | sed 's/-p efa/-p shm/; s/x-rdm/shm/')\n"
    )
    (tmp_path / "fi_pingpong").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    tester, turn = fabric_test.Tester(), fabric_test.Turn({"nic": "x", "tool": "libfabric", "token": "x"})
    tester.alone(turn)
    assert turn.gbs is not None and turn.gbs > 0.001
    assert {line.split(" -S ")[0] for line in said.read_text().splitlines()} == {"shm 0 -p efa -e rdm -d x-rdm"}


FI_SAYS = """bytes   #sent   #ack     total       time     MB/sec    usec/xfer   Mxfers/sec
1m      64      =64      128m        0.01s  12301.52       85.24       0.01
"""


def test_output_of_libfabric_is_parsed_whatever_it_is() -> None:
    assert fabric_test.figure("fi_bw", FI_SAYS) == pytest.approx(12.30, abs=0.01)
    assert fabric_test.figure("fi_lat", FI_SAYS) == 85.24
    chance = random.Random(1)
    words = [*FI_SAYS.split("\n"), *FI_SAYS.split(), "usec/xfer MB/sec", "nan", "-1", "9" * 400, "\u0663", "\n", "\x00"]
    for _ in range(3000):
        out = " ".join(chance.choices(words, k=chance.randint(0, 30)))
        with suppress(fabric_test.SilentError):
            assert fabric_test.figure(chance.choice(["fi_bw", "fi_lat"]), out) >= 0
