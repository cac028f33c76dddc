"""The driver for machines under QEMU, with real ones by emulation: a boot sector that says it is up, and powers off
when its power button is pressed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sluice.base.errors import SluiceError
from sluice.fleet.driver import DriverSite, Machine, Order, ProviderError, load_driver
from sluice.fleet.drivers import qemu
from sluice.fleet.drivers.vm import Vm

pytestmark = pytest.mark.skipif(
    shutil.which("qemu-system-x86_64") is None or shutil.which("qemu-img") is None,
    reason="needs QEMU: tools/install-packages virtual",
)

UP = b"the machine is up"
_PATIENCE_S = 60.0
FIRST, SECOND = Order("a" * 32, "v-1", "small", ""), Order("b" * 32, "v-2", "small", "")


def boot_sector() -> bytes:
    """Says `UP` at the first serial port, enables the event of the power button (ACPI's PM1a, which the BIOS has put at
    600h), waits for it and goes into S5.
    """
    code = bytes.fromhex(
        "31c0 8ed8 be2b7c fc"  # ds = 0, si = the text
        "ac 84c0 7406 baf803 ee ebf5"  # each byte to 3f8h
        "ba0206 b80001 ef"  # enable the button
        "ba0006 ed f6c401 74f7"  # until it is pressed
        "ba0406 b80020 ef f4"
    )
    assert len(code) == 0x2B
    return (code + UP + b"\0").ljust(510, b"\0") + b"\x55\xaa"


def until(true: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


class Site:
    """A host's folder of machines, and drivers for it as fleetd makes them after each of its starts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.image = folder / "image.raw"
        self.image.write_bytes(boot_sector().ljust(1 << 20, b"\0"))
        self.settings: dict[str, Any] = {
            "accel": "tcg", "image": str(self.image), "shapes": {"small": "-m 16"}, "stop_within": 600,
        }  # fmt: skip

    def driver(self, **settings: Any) -> Vm:
        made = load_driver("vm", DriverSite("main", "own", {**self.settings, **settings}, state=self.folder))
        assert isinstance(made, Vm)
        return made

    def home(self, machine: Machine) -> Path:
        return self.folder / "vm-own@main" / machine.id

    def console(self, machine: Machine) -> bytes:
        said = qemu.ask(self.home(machine), "ringbuf-read", device="console", size=4096)
        return str(said).encode()

    def pid(self, machine: Machine) -> int:
        pid = qemu.running(self.home(machine))
        assert pid is not None
        return pid


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    tmp_path.chmod(0o755)
    site = Site(tmp_path)
    yield site
    for folder in (tmp_path / "vm-own@main").glob("vm-*"):
        qemu.kill(folder)


def processes(site: Site) -> list[str]:
    """Those of its machines, by where they run."""
    found = []
    for one in Path("/proc").glob("[0-9]*/cwd"):
        try:
            found += [one.parent.name] if one.readlink().is_relative_to(site.folder) else []
        except OSError:
            continue
    return found


def test_a_machine_boots_once_for_a_token_and_ends_by_its_power_button(site: Site) -> None:
    driver = site.driver()
    machine = driver.launch(FIRST)
    assert driver.launch(FIRST) == machine == Machine("vm-aaaaaaaaaaaa", FIRST.token, "v-1", "small")
    other = driver.launch(SECOND)
    assert sorted(driver.machines(), key=lambda one: one.id) == [machine, other] and len(processes(site)) == 2
    until(lambda: UP in site.console(machine), "it boots of its image")
    assert site.home(machine).parent.stat().st_mode & 0o077 == 0
    driver.terminate(machine.id)
    until(lambda: qemu.running(site.home(machine)) is None, "it powers off")
    driver.terminate(machine.id)
    assert {one.id: one.ending for one in driver.machines()} == {machine.id: True, other.id: False}
    assert site.image.read_bytes()[:512] == boot_sector()


def test_machines_outlive_the_daemon_that_launched_them(site: Site) -> None:
    program = (
        "import sys, json, time; from pathlib import Path; from sluice.fleet.driver import *\n"
        "site = DriverSite('main', 'own', json.loads(sys.argv[1]), state=Path(sys.argv[2]))\n"
        "load_driver('vm', site).launch(Order('a' * 32, 'v-1', 'small', '')); print('launched', flush=True)\n"
        "time.sleep(600)\n"
    )
    words = [sys.executable, "-c", program, json.dumps(site.settings), str(site.folder)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True) as fleetd:
        assert fleetd.stdout is not None and fleetd.stdout.readline() == b"launched\n"
        os.killpg(fleetd.pid, signal.SIGKILL)
    later = site.driver()
    (machine,) = later.machines()
    assert not machine.ending and machine.token == FIRST.token
    assert later.launch(FIRST) == machine and len(processes(site)) == 1
    until(lambda: UP in site.console(machine), "it runs on")


def test_one_that_is_asked_for_twice_at_once_by_two_daemons_is_one(site: Site) -> None:
    with ThreadPoolExecutor(4) as threads:
        for made in [threads.submit(site.driver().launch, FIRST) for _ in range(4)]:
            assert made.result().token == FIRST.token
    assert len(processes(site)) == 1


def test_one_that_was_killed_is_listed_as_ended_and_is_started_again_for_its_token(site: Site) -> None:
    driver = site.driver(options=["-S"])
    machine = driver.launch(FIRST)
    before = site.pid(machine)
    os.kill(before, signal.SIGKILL)
    until(lambda: qemu.running(site.home(machine)) is None, "it is killed")
    assert [one.ending for one in driver.machines()] == [True]
    assert driver.launch(FIRST) == machine and site.pid(machine) != before
    assert [one.ending for one in driver.machines()] == [False]


def test_a_pid_file_that_names_another_process_ends_nothing(site: Site) -> None:
    driver = site.driver(options=["-S"], stop_within=0)
    machine = driver.launch(FIRST)
    os.kill(site.pid(machine), signal.SIGKILL)
    until(lambda: qemu.running(site.home(machine)) is None, "it is killed")
    with subprocess.Popen(["sleep", "600"]) as innocent:
        try:
            (site.home(machine) / "pid").write_text(f"{innocent.pid}\n")
            assert [one.ending for one in driver.machines()] == [True]
            driver.terminate(machine.id)
            assert innocent.poll() is None
        finally:
            innocent.kill()


def test_a_pid_file_that_was_written_over_does_not_hide_a_machine(site: Site) -> None:
    driver = site.driver(options=["-S"], stop_within=0)
    machine = driver.launch(FIRST)
    (site.home(machine) / "pid").write_text("1\n")
    assert [one.ending for one in driver.machines()] == [False]
    driver.terminate(machine.id)
    until(lambda: qemu.running(site.home(machine)) is None, "its own process is ended")


def test_one_that_does_not_listen_is_killed_after_a_while(site: Site) -> None:
    driver = site.driver(options=["-S"], stop_within=1)
    machine = driver.launch(FIRST)
    (site.home(machine) / "qmp").unlink()
    driver.terminate(machine.id)
    driver.terminate(machine.id)
    assert [one.ending for one in driver.machines()] == [False]
    time.sleep(1.1)
    driver.terminate(machine.id)
    until(lambda: qemu.running(site.home(machine)) is None, "it is killed")


def test_what_ended_machines_used_is_removed_and_later_they_are_forgotten(site: Site) -> None:
    driver = site.driver(options=["-S"], stop_within=0)
    machine = driver.launch(FIRST)
    driver.terminate(machine.id)
    until(lambda: qemu.running(site.home(machine)) is None, "it is killed")
    home = site.home(machine)
    for age, left in ((30, {"disk.qcow2", "machine.json"}), (120, {"machine.json"}), (4000, set())):
        os.utime(home, (time.time() - age,) * 2)
        assert [one.ending for one in driver.machines()] == [True]
        assert left <= ({one.name for one in home.iterdir()} if home.exists() else set())
        assert ("disk.qcow2" in left) is (home / "disk.qcow2").exists()
    assert driver.machines() == []


@pytest.mark.parametrize(
    ("settings", "kind", "words"),
    [
        ({"options": ["-no-such-word"]}, "refused", "QEMU: .*no-such-word: invalid option"),
        ({"nodes": {"v-1": "-device vfio-pci,host=ff:1f.7"}}, "broken", "QEMU: .*vfio"),
        ({"shapes": {"small": "-m 8T"}}, "no_capacity", "QEMU: .*allocate"),
        ({"shapes": {"big": "-m 16"}}, "refused", "settings.shapes has no 'small'"),
        ({"image": "/nonexistent"}, "refused", "/nonexistent"),
        ({"user_data": "/nonexistent"}, "refused", "/nonexistent"),
        ({"user_data": "/proc/self/auxv"}, "refused", "not UTF-8: '/proc/self/auxv'"),
    ],
)
def test_why_there_is_no_machine(site: Site, settings: dict[str, Any], kind: str, words: str) -> None:
    driver = site.driver(**settings)
    with pytest.raises(ProviderError, match=words) as error:
        driver.launch(FIRST)
    assert error.value.kind == kind and not processes(site)
    assert driver.machines() == []


def test_a_machine_has_its_name_address_and_seed(site: Site, tmp_path: Path) -> None:
    script = tmp_path / "user-data"
    script.write_text("#!/bin/sh\nhostnamectl hostname {node}\n")
    driver = site.driver(
        user_data=str(script), options=["-S", "-nic", "none", "-device", "virtio-net-pci,id=net,mac={mac}"],
        nodes={"v-1": "-smbios type=1,serial={node}"},
    )  # fmt: skip
    machine = driver.launch(FIRST)
    seed = site.home(machine) / "seed"
    assert "hostname v-1" in (seed / "user-data").read_text() and "v-1" in (seed / "meta-data").read_text()
    assert qemu.ask(site.home(machine), "query-name") == {"name": "v-1"}
    drives = [one["inserted"] for one in qemu.ask(site.home(machine), "query-block")]
    assert [(one["node-name"], one["ro"]) for one in drives] == [("disk", False), ("seed", True)]
    macs = {
        qemu.ask(site.home(one), "qom-get", path="/machine/peripheral/net", property="mac")
        for one in (machine, driver.launch(SECOND))
    }
    assert len(macs) == 2 and all(str(one).startswith("52:54:00:") for one in macs)


def test_machines_of_another_host_are_there_and_ended_there_alone(site: Site) -> None:
    driver = site.driver(options=["-S"], stop_within=0)
    machine = driver.launch(FIRST)
    driver._host = "other"
    qemu.kill(site.home(machine))
    until(lambda: qemu.running(site.home(machine)) is None, "it is killed")
    assert driver.machines() == [machine] and driver.launch(FIRST) == machine and not processes(site)
    with pytest.raises(ProviderError, match="only fleetd there can end it") as error:
        driver.terminate(machine.id)
    assert error.value.kind == "broken"


def test_facts_that_cannot_be_read_conclude_nothing(site: Site) -> None:
    driver = site.driver(options=["-S"])
    machine = driver.launch(FIRST)
    (site.home(machine) / "machine.json").write_text("{}")
    with pytest.raises(ProviderError, match=r"machine\.json: .*end its machine's QEMU yourself") as error:
        driver.machines()
    assert error.value.kind == "unknown"


def test_a_machine_is_named_by_its_launch_and_by_nothing_else(site: Site) -> None:
    for name in ("", ".", "../vm-own@main", "vm-zzz", "vm-0123456789ab"):
        site.driver().terminate(name)


@pytest.mark.parametrize("change", ["chmod", "chown", "link"])
def test_a_folder_of_machines_that_others_can_write_is_refused(site: Site, change: str) -> None:
    """Who can write there could leave a layer above any file that SlurmUser reads, and facts of machines."""
    folder = site.folder / "vm-own@main"
    if change == "link":
        (site.folder / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(site.folder / "elsewhere")
    else:
        folder.mkdir(mode=0o700)
    if change == "chmod":
        folder.chmod(0o777)
    elif change == "chown":
        if os.geteuid() != 0:
            pytest.skip("gives a folder away")
        os.chown(folder, 65534, -1)
    with pytest.raises(SluiceError, match=r"vm-own@main: .*not a folder that is this user's alone") as error:
        site.driver()
    assert error.value.remedy is not None and "chmod 700" in error.value.remedy


def test_a_call_does_not_wait_for_long_behind_one_that_hangs(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it could begin when fleetd already counts its answer as lost."""
    monkeypatch.setattr("sluice.fleet.drivers.vm._TURN_S", 0.05)
    driver = site.driver()
    with driver._lock:
        for ask in (lambda: driver.launch(FIRST), lambda: driver.terminate("vm-aaaaaaaaaaaa"), driver.machines):
            with pytest.raises(ProviderError) as error:
                ask()
            assert error.value.kind == "throttled"
    assert driver.machines() == []


def test_one_that_is_started_again_is_not_on_its_way_out(site: Site) -> None:
    driver = site.driver(options=["-S"])
    machine = driver.launch(FIRST)
    driver.terminate(machine.id)
    qemu.kill(site.home(machine))
    until(lambda: qemu.running(site.home(machine)) is None, "it is killed")
    driver.launch(FIRST)
    assert not (site.home(machine) / "ending").exists()  # else it would be killed before its button is pressed


def test_other_clusters_have_their_own_machines_in_the_same_folder(site: Site) -> None:
    machine = site.driver(options=["-S"]).launch(FIRST)
    other = load_driver("vm", DriverSite("test", "own", site.settings, state=site.folder))
    assert other.machines() == []
    other.terminate(machine.id)
    assert not (site.home(machine) / "ending").exists()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"shapes": ["small"]}, "settings.shapes .*not words of QEMU's command line"),
        ({"shapes": {"small": "-name 'x"}}, "settings.shapes .*not words of QEMU's command line"),
        ({"options": "-S"}, "settings.options is not a list"),
        ({"qemu": "qemu"}, "not from / on"),
        ({"folder": "/nonexistent"}, r"/nonexistent/vm-own@main: No such file"),
        ({"colour": "red"}, "the driver does not know it"),
    ],
)
def test_settings_are_checked(site: Site, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(SluiceError, match=words):
        site.driver(**settings)


def test_lists_are_answered_while_a_machine_starts(site: Site) -> None:
    driver = site.driver(options=["-S"])
    stop, failed = threading.Event(), []

    def look() -> None:
        while not stop.is_set():
            failed.extend(one for one in driver.machines() if one.ending)

    with ThreadPoolExecutor(1) as threads:
        looking = threads.submit(look)
        driver.launch(FIRST)
        stop.set()
        looking.result()
    assert failed == []
