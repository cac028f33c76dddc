"""The driver for machines of one's own, against a Redfish service over TLS that can be slow, refuse, or be wrong."""

from __future__ import annotations

import base64
import json
import logging
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from sluice.base.errors import SluiceError
from sluice.fleet.driver import DriverSite, Order, ProviderError, load_driver

pytest.importorskip("sushy", reason="needs sushy (pip install -e '.[dev]')")
SECRET = "do-not-show-this-secret"
FIRST, SECOND = Order("a" * 32, "n1", "own", ""), Order("b" * 32, "n1", "own", "")
SYSTEM = "/redfish/v1/Systems/1"
RESET = f"{SYSTEM}/Actions/ComputerSystem.Reset"


class Bmc(ThreadingHTTPServer):
    """A BMC of one system."""

    daemon_threads = True

    def __init__(self, certificate: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        self.socket = context.wrap_socket(self.socket, server_side=True)
        self.power: str | None = "Off"
        self.follows = True  # the power what it is told
        self.allowed = ["On", "ForceOff", "GracefulShutdown"]
        self.resets: list[str] = []
        self.status = {"GET": 200, "POST": 204}
        self.slow_s = 0.0  # before each answer

    def handle_error(self, *_: Any) -> None:
        pass  # clients that do not trust it

    def documents(self) -> dict[str, dict[str, Any]]:
        reset = {"target": RESET, "ResetType@Redfish.AllowableValues": self.allowed}
        return {
            "/redfish/v1/": {"Id": "root", "RedfishVersion": "1.6.0", "Systems": {"@odata.id": "/redfish/v1/Systems"}},
            "/redfish/v1/Systems": {"Name": "all", "Members": [{"@odata.id": SYSTEM}]},
            SYSTEM: {"Id": "1", "PowerState": self.power, "Actions": {"#ComputerSystem.Reset": reset}},
        }


class _Handler(BaseHTTPRequestHandler):
    server: Bmc

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        time.sleep(self.server.slow_s)
        self._send(self.server.status["GET"], self.server.documents().get(self.path, {}))

    def do_POST(self) -> None:
        given = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.status["POST"] in (204, 504):
            self.server.resets.append(given["ResetType"])
            if self.server.follows:
                self.server.power = "On" if given["ResetType"] == "On" else "Off"
        self._send(self.server.status["POST"], {})

    def _send(self, status: int, document: dict[str, Any]) -> None:
        known = "Basic " + base64.b64encode(f"sluice:{SECRET}".encode()).decode()
        if self.headers["Authorization"] != known and self.path != "/redfish/v1/":
            status = 401
        if status >= 300:
            document = {"error": {"code": "Base.1.0.GeneralError", "message": "try\nlater"}}
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bmc") / "bmc.pem"
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj",
             "/CN=bmc", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", path, "-out", f"{path}.crt"]  # fmt: skip
    subprocess.run(words, check=True, capture_output=True)
    path.write_text(path.read_text() + Path(f"{path}.crt").read_text())
    return path


@pytest.fixture
def bmc(certificate: Path) -> Iterator[Bmc]:
    bmc = Bmc(certificate)
    threading.Thread(target=bmc.serve_forever, args=(0.05,), daemon=True).start()
    yield bmc
    bmc.shutdown()
    bmc.server_close()


@pytest.fixture
def site(bmc: Bmc, certificate: Path, tmp_path: Path) -> DriverSite:
    keys = tmp_path / "own.json"
    keys.write_text(json.dumps({"user": "sluice", "password": SECRET}))
    keys.chmod(0o600)
    address = {"n1": f"https://127.0.0.1:{bmc.server_port}", "n2": f"https://127.0.0.1:{_nobody()}"}
    return DriverSite("main", "own", {"bmc": address, "ca": str(certificate)}, tmp_path, tmp_path)


def _nobody() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def driver(site: DriverSite, **settings: Any) -> Any:
    return load_driver("redfish", DriverSite("main", "own", {**site.settings, **settings}, site.state, site.state))


def fails(words: str, ask: Any, *given: Any) -> None:
    with pytest.raises(ProviderError, match=words) as error:
        ask(*given)
    assert error.value.kind == "broken" and SECRET not in repr(error.value) and error.value.__cause__ is None


def test_a_machine_is_switched_on_once_for_a_token_and_off_again(bmc: Bmc, site: DriverSite) -> None:
    one = driver(site)
    machine = one.launch(FIRST)
    assert driver(site).launch(FIRST) == machine and bmc.resets == ["On"]
    assert driver(site).machines() == [machine] and (machine.node, machine.token, machine.shape) == (
        "n1", FIRST.token, "own",
    )  # fmt: skip
    one.terminate(machine.id)
    one.terminate(machine.id)
    assert bmc.resets == ["On", "GracefulShutdown"] and one.machines() == []
    assert one.launch(SECOND).token == SECOND.token
    one.terminate(machine.id)  # of the launch before: late
    assert bmc.power == "On"


def test_a_launch_whose_process_was_killed_before_the_power_is_asked_for_again(bmc: Bmc, site: DriverSite) -> None:
    bmc.status["POST"] = 503
    fails("its BMC answers 503: try", driver(site).launch, FIRST)
    assert driver(site).machines() == [] and bmc.power == "Off"
    bmc.status["POST"] = 204
    assert driver(site).launch(FIRST).token == FIRST.token and bmc.power == "On"


def test_a_launch_whose_answer_is_lost_is_in_the_list(bmc: Bmc, site: DriverSite) -> None:
    bmc.status["POST"] = 504  # and it switches on
    fails("answers 504", driver(site).launch, FIRST)
    (machine,) = driver(site).machines()
    fails("is On, and its last launch is not over", driver(site).launch, SECOND)
    bmc.status["POST"] = 204
    driver(site).terminate(machine.id)
    assert bmc.power == "Off"


def test_a_machine_that_somebody_switched_on_is_left_alone(bmc: Bmc, site: DriverSite) -> None:
    bmc.power = "On"
    fails("n1: is On, and nobody launched it", driver(site).launch, FIRST)
    assert driver(site).machines() == [] and not bmc.resets


def test_a_machine_that_does_not_stop_loses_its_power(bmc: Bmc, site: DriverSite) -> None:
    machine = driver(site).launch(FIRST)
    bmc.follows = False
    one = driver(site, stop_within=1)
    one.terminate(machine.id)
    one.terminate(machine.id)
    assert bmc.resets == ["On", "GracefulShutdown"] and one.machines() == [machine]
    time.sleep(1.1)
    one.terminate(machine.id)
    assert bmc.resets[-1] == "ForceOff"


def test_a_machine_without_a_graceful_stop_loses_its_power_at_once(bmc: Bmc, site: DriverSite) -> None:
    bmc.allowed = ["On", "ForceOff"]
    driver(site).terminate(driver(site).launch(FIRST).id)
    assert bmc.resets == ["On", "ForceOff"]


@pytest.mark.parametrize("state", ["PoweringOff", "Paused", None])
def test_what_is_neither_on_nor_off_is_not_launched_and_not_gone(bmc: Bmc, site: DriverSite, state: str) -> None:
    machine = driver(site).launch(FIRST)
    bmc.power = state
    assert driver(site).machines() == [machine]
    fails("its last launch is not over", driver(site).launch, SECOND)


def test_a_bmc_that_does_not_answer_fails_alone_and_its_machine_counts_as_there(bmc: Bmc, site: DriverSite) -> None:
    machine = driver(site).launch(FIRST)
    fails("n2: its BMC: .*Errno 111", driver(site).launch, Order("c" * 32, "n2", "own", ""))
    bmc.status["GET"] = 503
    assert driver(site).machines() == [machine]
    fails("answers 503", driver(site).terminate, machine.id)


def test_no_machine_is_gone_because_its_record_cannot_be_read(bmc: Bmc, site: DriverSite) -> None:
    driver(site).launch(FIRST)
    path = site.state / "redfish-own" / "n1.json"
    path.write_text("{")
    with pytest.raises(ProviderError, match="switch n1 off and remove it") as error:
        driver(site).machines()
    assert error.value.kind == "unknown"
    path.unlink()
    assert driver(site).machines() == []


def test_a_slow_bmc_is_not_waited_for(bmc: Bmc, site: DriverSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice.fleet.drivers.redfish._READ_S", 0.3)
    bmc.slow_s = 30.0
    fails("n1: its BMC: .*timed out", driver(site).launch, FIRST)
    assert not bmc.resets and driver(site).machines() == []


def test_refused_credentials_are_said_and_not_shown(
    bmc: Bmc, site: DriverSite, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    (site.credentials / "own.json").write_text(json.dumps({"user": "sluice", "password": SECRET + "x"}))
    fails("n1: its BMC refuses the credentials", driver(site).launch, FIRST)
    assert SECRET not in caplog.text and base64.b64encode(f"sluice:{SECRET}".encode())[:20].decode() not in caplog.text


def test_a_bmc_that_is_not_trusted_gets_no_password(bmc: Bmc, site: DriverSite) -> None:
    (site.state / "other.pem").write_text(Path(ssl.get_default_verify_paths().openssl_cafile).read_text())
    fails("certificate verify failed", driver(site, ca=str(site.state / "other.pem")).launch, FIRST)


def test_a_node_without_a_bmc_is_named(site: DriverSite) -> None:
    fails("n9: settings.bmc does not name it", driver(site).launch, Order("c" * 32, "n9", "own", ""))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"bmc": "http://{node}-bmc"}, "not an address that begins with https"),
        ({"bmc": {"n1": "n1-bmc"}}, "'n1-bmc': not an address"),
        ({"stop_within": "2m"}, "'2m'"),
        ({"ca": False}, "settings.ca False: not text"),
        ({"insecure": True}, "insecure: the driver does not know it"),
    ],
)
def test_settings_that_are_refused(site: DriverSite, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(SluiceError, match=words):
        driver(site, **settings)


def test_credentials_that_others_read_are_refused(site: DriverSite) -> None:
    (site.credentials / "own.json").chmod(0o640)
    with pytest.raises(SluiceError, match="others than its owner can read it"):
        driver(site)
