#!/usr/bin/python3 -IS
"""Measures bandwidth and latency to other nodes of a job. The node agent starts it as a user without rights.

It prints ``{"port": N, "tools": [...]}``: where it listens for its peers, and what it can measure with. Each line that
it reads is a list of rounds of tests, and each line that it prints is one result. A test has `id`, `round`, `role`
("serve", "ask" or "alone"), `tool`, `nic`, the peer's `address` and `port`, and a `token`, which only the two nodes
know: peers prove to each other that they have it, and nobody else is measured with. A result has `id`, `gbs` (None
where the peer did not answer) and `us`. Standard library only: it runs outside of the agent's environment.

perftest (ib_write_bw, ib_write_lat) measures RDMA, UCX (ucx_perftest) RDMA or TCP, by the interface `nic` alone, and to
itself for a test that is "alone". libfabric (fi_pingpong) measures EFA, which the others cannot, or TCP. Where none of
them is installed, TCP is measured, in both directions, the slower of which counts; of that, a test "alone" is of this
host's own stack.
"""

from __future__ import annotations

import ctypes
import hashlib
import hmac
import json
import os
import secrets
import select
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from typing import Any

BLOCK = 256 << 10
STREAM_S = 0.2  # in each direction
PINGS = 64
CONNECT_S = 1.0
PROVE_S = 5.0
WAIT_S = 12.0  # for a peer that is there, and still busy with earlier tests
TURN_S = 30.0  # the agent ends this program before
RUN_S = 10.0  # of a tool
TOOLS = {"perftest": ("ib_write_bw", "ib_write_lat"), "ucx": ("ucx_bw", "ucx_lat"), "libfabric": ("fi_bw", "fi_lat")}
"""Programs of bandwidth and latency, the best tool first; UCX and libfabric have one each, with tests of its own."""
UCX = "ucx_perftest"
UCX_TESTS = {"ucx_bw": ("tag_bw", 1 << 20, 512), "ucx_lat": ("tag_lat", 8, 1000)}
"""Test, bytes of a message, and how many of them."""
UCX_MBYTE = 1 << 20  # of its results
FI = "fi_pingpong"
FI_TESTS = {"fi_bw": (1 << 20, 64), "fi_lat": (8, 200)}
"""Bytes of a message, and how many of them, of which one is under way at a time."""
FI_PATH = "/opt/amazon/efa/bin"
"""Where the installer of EFA's driver has it."""
RDMA = "/sys/class/infiniband"
MOST_SILENT = 2  # then this node's own interface is down, and no more is waited for
MOST_STRANGERS = 64  # connections of one address that have proved nothing; more than a node has interfaces
TRIES = 3  # of a connection that ends before both have proved themselves
MOST_LINE = 512
MOST_DIGITS = 32
PR_SET_DUMPABLE = 4


class SilentError(Exception):
    """The peer does not answer."""


class Turn:
    """One test on this node: when it is due, and what came of it."""

    def __init__(self, test: dict[str, Any]) -> None:
        self.test = test
        self.due = threading.Event()
        self.over = threading.Event()
        self.began = False  # the peer has come, or is there
        self.gbs: float | None = None
        self.us = 0.0

    def proof(self, nonce: str, role: str) -> str:
        """That one has the token."""
        return hmac.new(self.test["token"].encode(), f"{role}:{nonce}".encode(), hashlib.sha256).hexdigest()


class Line:
    """A connection: lines of JSON, and streams of blocks."""

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self.connection = connection
        self.seconds = seconds
        connection.settimeout(seconds)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def say(self, **words: Any) -> None:
        """One line. Raises OSError."""
        self.connection.sendall(json.dumps(words).encode() + b"\n")

    def hear(self) -> dict[str, Any]:
        """One line, byte by byte: what follows is not ours to read. Raises OSError, ValueError."""
        data, end = b"", time.monotonic() + self.seconds
        while not data.endswith(b"\n"):
            self.connection.settimeout(max(0.001, end - time.monotonic()))
            part = self.connection.recv(1)
            if not part or len(data) > MOST_LINE:
                raise ConnectionResetError
            data += part
        self.connection.settimeout(self.seconds)
        words = json.loads(data)
        if not isinstance(words, dict):
            raise ValueError("no object")
        return words

    def exact(self, view: memoryview) -> None:
        """Fill it. Raises OSError."""
        while view:
            got = self.connection.recv_into(view)
            if not got:
                raise ConnectionResetError
            view = view[got:]

    def send_stream(self) -> None:
        """Blocks for a while; the first byte of the last one is 0."""
        block = bytearray(os.urandom(4096) * (BLOCK // 4096))
        end = time.monotonic() + STREAM_S
        while True:
            block[0] = time.monotonic() < end
            self.connection.sendall(block)
            if not block[0]:
                return

    def take_stream(self) -> float:
        """GB/s from the first block to the last."""
        block = memoryview(bytearray(BLOCK))
        self.exact(block)
        began, count = time.monotonic(), 0
        while block[0]:
            self.exact(block)
            count += 1
        return count * BLOCK / max(time.monotonic() - began, 1e-6) / 1e9

    def ping(self) -> float:
        """Median time of a small message one way, in microseconds."""
        times, echo = [], memoryview(bytearray(8))
        for _ in range(PINGS):
            began = time.perf_counter()
            self.connection.sendall(bytes(8))
            self.exact(echo)
            times.append((time.perf_counter() - began) / 2 * 1e6)
        return statistics.median(times)

    def pong(self) -> None:
        """The other side of `ping`."""
        echo = memoryview(bytearray(8))
        for _ in range(PINGS):
            self.exact(echo)
            self.connection.sendall(echo)


class Tester:
    """All tests of this node."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("", 0), backlog=512)
        self.turns: dict[str, Turn] = {}
        self.strangers: dict[str, list[socket.socket]] = {}  # by address, the oldest first
        self.lock = threading.Lock()
        self.known = threading.Condition()
        self.silent: Counter[str] = Counter()  # peers that did not answer, by this node's interface

    def serve(self) -> None:
        """Accept peers, for as long as the program runs."""
        while True:
            try:
                connection, (address, _) = self.listener.accept()
            except OSError:  # strangers of many addresses have all descriptors: they soon give them back
                time.sleep(0.05)
                continue
            with self.lock:
                strangers = self.strangers.setdefault(address, [])
                if len(strangers) >= MOST_STRANGERS:  # a peer proves itself at once: the oldest is none
                    with suppress(OSError):
                        strangers.pop(0).shutdown(socket.SHUT_RDWR)
                strangers.append(connection)
            threading.Thread(target=self.greet, args=(connection, address), daemon=True).start()

    def greet(self, connection: socket.socket, address: str) -> None:
        """Whoever connects proves to be the peer of a test, and waits until it is that test's turn."""
        turn = None
        try:
            with connection:
                turn = self.prove(Line(connection, PROVE_S), address)
                turn.due.wait(TURN_S)
                line = Line(connection, TURN_S)
                turn.began = True
                line.say(go=True)
                if turn.test["tool"] in TOOLS:
                    serve_tool(line, turn)
                else:
                    serve_tcp(line, turn)
        except (OSError, ValueError, KeyError, TypeError, SilentError):
            pass
        finally:
            if turn is not None:
                turn.over.set()

    def prove(self, line: Line, address: str) -> Turn:
        """The test of which it has the token. Raises ValueError for a stranger."""
        try:
            nonce = secrets.token_hex(16)
            line.say(nonce=nonce)
            said = line.hear()
            turn = self.turn(str(said["id"]))
            if turn.due.is_set() and turn.over.is_set():
                raise ValueError("was made")
            if not hmac.compare_digest(turn.proof(nonce, "ask"), str(said["proof"])):
                raise ValueError("a stranger")
            line.say(proof=turn.proof(str(said["nonce"]), "serve"))
            return turn
        finally:
            with self.lock, suppress(ValueError):
                self.strangers[address].remove(line.connection)

    def turn(self, one: str) -> Turn:
        """A test by its ID; a peer may hear of it earlier than this node. Raises KeyError."""
        with self.known:
            self.known.wait_for(lambda: one in self.turns, PROVE_S)
            return self.turns[one]

    def run(self, rounds: list[list[dict[str, Any]]]) -> None:
        """One round after the other, the tests of a round at once."""
        turns = [[Turn(test) for test in tests] for tests in rounds]
        with self.known:
            self.turns |= {turn.test["id"]: turn for some in turns for turn in some}
            self.known.notify_all()
        for some in turns:
            workers = [threading.Thread(target=self.make, args=(turn,), daemon=True) for turn in some]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            for turn in some:
                say({"id": turn.test["id"], "gbs": turn.gbs, "us": turn.us})

    def make(self, turn: Turn) -> None:
        """One test, whatever becomes of it."""
        turn.due.set()
        nic = turn.test["nic"]
        with suppress(OSError, ValueError, KeyError, SilentError):
            if turn.test["role"] != "alone" and self.silent[nic] >= MOST_SILENT:
                raise SilentError
            if turn.test["role"] == "serve":
                wait_for_peer(turn)
            elif turn.test["role"] == "alone":
                self.alone(turn)
            else:
                ask_again(turn)
        self.silent[nic] += turn.gbs is None and not turn.began
        turn.over.set()

    def alone(self, turn: Turn) -> None:
        """This host to itself."""
        if turn.test["tool"] in TOOLS:
            port, bandwidth = free_port(), TOOLS[turn.test["tool"]][0]
            server = start_tool(bandwidth, turn, port)
            try:
                turn.gbs = run_tool(bandwidth, turn, "127.0.0.1", port)
            finally:
                server.kill()
                server.wait()
            return
        here = {"address": "127.0.0.1", "port": self.listener.getsockname()[1], "role": "ask"}
        own = Turn({**turn.test, "id": turn.test["id"] + "/own"})
        self.turns[own.test["id"]] = own
        own.due.set()
        asking = Turn({**own.test, **here})
        ask(asking)
        turn.gbs, turn.us = asking.gbs, asking.us


def wait_for_peer(turn: Turn) -> None:
    """Until it has come, or does not answer any more."""
    end = time.monotonic() + WAIT_S
    while not turn.over.wait(CONNECT_S) and (turn.began or time.monotonic() < end):
        with socket.create_connection((turn.test["address"], turn.test["port"]), CONNECT_S):
            pass


def ask_again(turn: Turn) -> None:
    """As `ask`, some times where strangers from this host have pushed its connection out. Raises as `ask`."""
    for _ in range(TRIES - 1):
        with suppress(ConnectionError):
            return ask(turn)
        if turn.began:
            raise SilentError
    return ask(turn)


def ask(turn: Turn) -> None:
    """The asking side of a test. Raises OSError, ValueError, SilentError."""
    with socket.create_connection((turn.test["address"], turn.test["port"]), CONNECT_S) as connection:
        line = Line(connection, PROVE_S)
        nonce = secrets.token_hex(16)
        line.say(id=turn.test["id"], nonce=nonce, proof=turn.proof(str(line.hear()["nonce"]), "ask"))
        if not hmac.compare_digest(turn.proof(nonce, "serve"), str(line.hear()["proof"])):
            raise ValueError("a stranger")
        line = Line(connection, TURN_S)
        turn.began = True
        line.hear()  # that it is this test's turn
        if turn.test["tool"] in TOOLS:
            bandwidth, latency = TOOLS[turn.test["tool"]]
            turn.gbs = run_tool(bandwidth, turn, turn.test["address"], int(line.hear()["port"]))
            turn.us = run_tool(latency, turn, turn.test["address"], int(line.hear()["port"]))
            line.say(done=True)
            return
        turn.us = line.ping()
        line.send_stream()
        back = line.take_stream()
        turn.gbs = min(float(line.hear()["gbs"]), back)


def serve_tcp(line: Line, turn: Turn) -> None:
    """The serving side; it reports nothing, as the asking side knows both directions."""
    line.pong()
    there = line.take_stream()
    line.send_stream()
    line.say(gbs=there)


# ---- tools ----


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as one:
        one.bind(("", 0))
        return int(one.getsockname()[1])


def installed() -> list[str]:
    """The tools of this node, the best first; Sluice's own is everywhere."""
    return [tool for tool, programs in TOOLS.items() if suits(tool) and all(map(find, programs))] + ["tcp"]


def suits(tool: str) -> bool:
    """EFA has no connections of the kind that perftest and UCX use; other RDMA is measured by these two."""
    nics = os.listdir(RDMA) if os.path.isdir(RDMA) else []  # noqa: PTH112 - pathlib takes longer to load
    if any(map(is_efa, nics)):
        return tool == "libfabric"
    return tool != "libfabric" or not nics


def is_efa(nic: str) -> bool:
    """Whether its driver is that of Amazon's Elastic Fabric Adapter."""
    return os.path.realpath(f"{RDMA}/{nic}/device/driver").endswith("/efa")


def find(program: str) -> str | None:
    """The file of a program, or of a test."""
    if program in FI_TESTS:
        return shutil.which(FI) or shutil.which(FI, path=FI_PATH)
    return shutil.which(UCX if program in UCX_TESTS else program)


def start_tool(program: str, turn: Turn, port: int, *host: str) -> subprocess.Popen[str]:
    """One side of a test. Raises OSError."""
    nic, environment = turn.test["nic"], dict(os.environ)
    if program in FI_TESTS:
        size, count = FI_TESTS[program]
        by = ["-p", "efa", "-e", "rdm", "-d", f"{nic}-rdm"] if is_efa(nic) else ["-p", "tcp", "-e", "msg", "-d", nic]
        words = [find(program) or FI, *by, "-S", str(size), "-I", str(count), "-P" if host else "-B", str(port)]
        # As below; the provider tcp does not look at -d.
        environment |= {"FI_TCP_IFACE": nic, "FI_EFA_ENABLE_SHM_TRANSFER": "0"}
    elif program in UCX_TESTS:
        test, size, count = UCX_TESTS[program]
        words = [UCX, "-p", str(port), "-t", test, "-s", str(size), "-n", str(count), "-w", "16", "-f", "-v"]
        rdma = os.path.isdir(f"{RDMA}/{nic}")  # noqa: PTH112 - pathlib takes longer to load
        # By this interface and no other, nor by shared memory where both ends are on one host.
        environment |= {"UCX_NET_DEVICES": f"{nic}:1" if rdma else nic, "UCX_TLS": "ib" if rdma else "tcp"}
    else:
        words = [program, "-F", "-d", nic, "-p", str(port)]
        words += ["-D", "1", "--report_gbits"] if program == "ib_write_bw" else ["-n", "1000"]
    return subprocess.Popen(
        [*words, *host],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )


def run_tool(program: str, turn: Turn, host: str, port: int) -> float:
    """GB/s or microseconds. Raises OSError, ValueError, SilentError."""
    end = time.monotonic() + RUN_S
    while time.monotonic() < end:
        with start_tool(program, turn, port, host) as one:
            try:
                out, _ = one.communicate(timeout=RUN_S)
            except subprocess.TimeoutExpired:
                one.kill()
                raise SilentError from None
        if one.returncode == 0:
            return figure(program, out)
        time.sleep(0.05)  # its server is not there yet
    raise SilentError


def figure(program: str, out: str) -> float:
    """What a program's last row of numbers says: the average bandwidth, or the median latency (libfabric: average).

    perftest says Gb/s, UCX MB/s in a table of CSV, libfabric MB/s. Raises SilentError where there is none.
    """
    rows = [line.split() for line in out.splitlines()]
    if program in UCX_TESTS:
        value = ucx_figure(program, out)
    elif program in FI_TESTS:
        value = fi_figure(program, rows)
    else:
        value = perftest_figure(program, rows)
    if not value:  # perftest on a host that is too busy to tell the clock of its processor
        raise SilentError
    return value


def perftest_figure(program: str, rows: list[list[str]]) -> float:
    """The same of perftest. Raises SilentError."""
    numbers = [row for row in rows if len(row) >= 5 and all(word.replace(".", "", 1).isdecimal() for word in row[:5])]
    if not numbers:
        raise SilentError
    return number(numbers[-1][3]) / 8 if program == "ib_write_bw" else number(numbers[-1][4])


def ucx_figure(program: str, out: str) -> float:
    """The same of ucx_perftest: the last row of its table, among warnings. Raises SilentError."""
    rows = [[word.strip() for word in line.split(",")] for line in out.splitlines()]
    headings = next((row for row in rows if row[0] == "iterations"), [])
    numbers = [row for row in rows if len(row) == len(headings) and row[0].isdecimal()]
    if not numbers or "overall_bw" not in headings:
        raise SilentError
    value = number(numbers[-1][headings.index("overall_bw") if program == "ucx_bw" else 1])
    return value * UCX_MBYTE / 1e9 if program == "ucx_bw" else value


def fi_figure(program: str, rows: list[list[str]]) -> float:
    """The same of fi_pingpong: the row below its headings. Raises SilentError."""
    headings = next((row for row in rows if "usec/xfer" in row and "MB/sec" in row), [])
    values = rows[rows.index(headings) + 1 :] if headings else []
    if not values or len(values[0]) != len(headings):
        raise SilentError
    value = number(values[0][headings.index("MB/sec" if program == "fi_bw" else "usec/xfer")])
    return value / 1000 if program == "fi_bw" else value


def number(word: str) -> float:
    """A decimal number of no absurd length. Raises SilentError."""
    if len(word) > MOST_DIGITS or not word.isascii() or not word.replace(".", "", 1).isdecimal():
        raise SilentError
    return float(word)


def serve_tool(line: Line, turn: Turn) -> None:
    """Bandwidth, then latency, each on a port that the peer gets."""
    for program in TOOLS[turn.test["tool"]]:
        port = free_port()
        server = start_tool(program, turn, port)
        try:
            line.say(port=port)
            wait_for_tool(server, line)
        finally:
            server.kill()
            server.wait()
    line.hear()


def wait_for_tool(server: subprocess.Popen[str], line: Line) -> None:
    """Until it ends. Raises SilentError where time is over, or the peer is done or has given up: it says no more."""
    end, more = time.monotonic() + RUN_S, select.poll()
    more.register(line.connection, select.POLLIN)
    while server.poll() is None:
        if time.monotonic() > end or more.poll(10):
            raise SilentError


def say(words: dict[str, Any]) -> None:
    """One line to the agent."""
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Until the agent closes standard input."""
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # no other preflight's program reads the tokens
    tester = Tester()
    threading.Thread(target=tester.serve, daemon=True).start()
    say({"port": tester.listener.getsockname()[1], "tools": installed()})
    for line in sys.stdin:
        tester.run(json.loads(line))
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)  # a tool that waits for a peer would outlive an agent that died


if __name__ == "__main__":
    main()
