"""The driver wakeonlan, with packets over UDP and a host that answers over TCP."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from sluice.base.errors import SluiceError
from sluice.fleet.driver import DriverSite, Order, ProviderError
from sluice.fleet.drivers.wakeonlan import WakeOnLan, make

NODE, MAC = "localhost", "00:25:90:ab:cd:ef"
ORDER = Order("a" * 32, NODE, "own", "")


class Host:
    """The machine: on while something listens at its port."""

    def __init__(self, folder: Path) -> None:
        self._up = ExitStack()
        self.packets = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.packets.bind(("127.0.0.1", 0))
        self.packets.settimeout(5)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self.stopped = folder / "stopped"
        self.program = folder / "stop"
        self.program.write_text(f'#!/bin/sh\necho "$1" >> {self.stopped}\n[ "$1" = {NODE} ]\n')
        self.program.chmod(0o700)

    def settings(self) -> dict[str, Any]:
        return {
            "macs": {NODE: MAC},
            "stop": [str(self.program), "{node}"],
            "broadcast": "127.0.0.1",
            "port": self.port,
            "wake_port": self.packets.getsockname()[1],
        }

    def on(self) -> None:
        self._up.enter_context(socket.create_server(("127.0.0.1", self.port)))

    def off(self) -> None:
        self._up.close()

    def woken(self) -> bytes:
        return self.packets.recv(1024)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """A port that nobody listens at is refused, as by a host that is on: here it is one that is off."""
    real = socket.create_connection

    def connect(place: tuple[str, int], timeout: float) -> socket.socket:
        try:
            return real(place, timeout=timeout)
        except ConnectionRefusedError as error:
            raise TimeoutError from error

    monkeypatch.setattr("sluice.fleet.drivers.wakeonlan.socket.create_connection", connect)
    made = Host(tmp_path)
    yield made
    made.off()
    made.packets.close()


@pytest.fixture
def driver(host: Host, tmp_path: Path) -> WakeOnLan:
    return make(DriverSite("main", "own", host.settings(), state=tmp_path))


def test_a_machine_is_woken_once_it_is_asked_for_and_stopped_until_it_does_not_answer(
    driver: WakeOnLan, host: Host
) -> None:
    machine = driver.launch(ORDER)
    packet = host.woken()
    assert packet == b"\xff" * 6 + bytes.fromhex(MAC.replace(":", "")) * 16
    assert (machine.node, machine.token) == (NODE, ORDER.token)
    assert driver.launch(ORDER) == machine and host.woken() == packet  # the first one may have been lost
    host.on()
    assert driver.launch(ORDER) == machine and driver.machines() == [machine]
    driver.terminate(machine.id)
    assert host.stopped.read_text() == f"{NODE}\n" and driver.machines() == [machine]
    host.off()
    driver.terminate(machine.id)
    assert host.stopped.read_text() == f"{NODE}\n" and driver.machines() == []
    driver.terminate(machine.id)  # gone: no error


def test_records_outlive_the_daemon(driver: WakeOnLan, host: Host, tmp_path: Path) -> None:
    machine = driver.launch(ORDER)
    assert make(DriverSite("main", "own", host.settings(), state=tmp_path)).machines() == [machine]


def test_a_machine_that_is_on_and_was_not_launched_is_left_alone(driver: WakeOnLan, host: Host) -> None:
    host.on()
    with pytest.raises(ProviderError, match="is on, and nobody launched it; it is left as it is") as failed:
        driver.launch(ORDER)
    assert failed.value.kind == "broken" and driver.machines() == []


def test_the_next_launch_waits_for_the_end_of_the_last_one(driver: WakeOnLan, host: Host) -> None:
    machine = driver.launch(ORDER)
    host.on()
    driver.terminate(machine.id)
    following = Order("b" * 32, NODE, "own", "")
    with pytest.raises(ProviderError, match="its last launch is not over"):
        driver.launch(following)
    host.off()
    assert driver.launch(following).token == following.token
    driver.terminate(machine.id)  # a late request for the one before
    assert [one.token for one in driver.machines()] == [following.token]


def fail(monkeypatch: pytest.MonkeyPatch, failed: OSError) -> None:
    """Each connection fails with this."""

    def connect(*_: object, **__: object) -> None:
        raise failed

    monkeypatch.setattr("sluice.fleet.drivers.wakeonlan.socket.create_connection", connect)


@pytest.mark.parametrize(
    "failed",
    [
        socket.gaierror(socket.EAI_AGAIN, "no name server"),
        OSError(errno.ENETUNREACH, "no network"),
        OSError(errno.EMFILE, "no descriptor"),
    ],
)
def test_of_a_machine_that_nobody_could_ask_nothing_is_concluded(
    driver: WakeOnLan, host: Host, monkeypatch: pytest.MonkeyPatch, failed: OSError
) -> None:
    machine = driver.launch(ORDER)
    host.on()
    driver.terminate(machine.id)
    fail(monkeypatch, failed)
    assert driver.machines() == [machine]
    for ask in (lambda: driver.terminate(machine.id), lambda: driver.launch(Order("b" * 32, NODE, "own", ""))):
        with pytest.raises(ProviderError, match=f"whether it is on is not known: {failed.strerror}") as error:
            ask()
        assert error.value.kind == "broken"


@pytest.mark.parametrize(
    ("failed", "there"), [(OSError(errno.EHOSTUNREACH, "no host"), False), (ConnectionResetError(), True)]
)
def test_what_the_network_says_of_a_machine(
    driver: WakeOnLan, host: Host, monkeypatch: pytest.MonkeyPatch, failed: OSError, there: bool
) -> None:
    machine = driver.launch(ORDER)
    host.on()
    driver.terminate(machine.id)
    fail(monkeypatch, failed)
    assert driver.machines() == [machine] * there


def test_a_command_that_fails_is_the_nodes_trouble(driver: WakeOnLan, host: Host) -> None:
    machine = driver.launch(ORDER)
    host.on()
    host.program.write_text("#!/bin/sh\necho no such key >&2; exit 255\n")
    with pytest.raises(ProviderError, match=r"localhost: settings\.stop: .*no such key") as failed:
        driver.terminate(machine.id)
    assert failed.value.kind == "broken" and driver.machines() == [machine]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"macs": {NODE: "00:25:90"}}, "not hardware addresses by node"),
        ({"macs": None}, "not hardware addresses by node"),
        ({"stop": "poweroff"}, "not a program with its arguments"),
        ({"stop": ["poweroff"]}, "poweroff: not from / on"),
        ({"port": 0}, r"settings\.port 0: not a port"),
        ({"mac": {}}, "the driver does not know it"),
    ],
)
def test_settings_are_checked(host: Host, tmp_path: Path, change: dict[str, Any], said: str) -> None:
    with pytest.raises(SluiceError, match=said):
        make(DriverSite("main", "own", {**host.settings(), **change}, state=tmp_path))


def test_a_command_that_others_may_change_is_not_run(host: Host, tmp_path: Path) -> None:
    host.program.chmod(0o722)
    with pytest.raises(SluiceError, match="nobody else's to write"):
        make(DriverSite("main", "own", host.settings(), state=tmp_path))


def test_a_node_without_an_address_is_set_apart(driver: WakeOnLan) -> None:
    with pytest.raises(ProviderError, match=r"n2: settings\.macs does not name it"):
        driver.launch(Order("c" * 32, "n2", "own", ""))
