"""The drop folder, whose files are checked, and the fan-out over the nodes."""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
import time
from pathlib import Path

import pytest

from gres_probe import collect as collecting
from gres_probe.collect import (
    collect,
    load_inventories,
    remote_shell_command,
    srun_command,
    write_inventory,
)
from gres_probe.inventory import Gpu, Inventory, Link, LinkType
from sluice.base.errors import SluiceError


def inventory(node: str) -> Inventory:
    gpu = Gpu("nvidia", 0, f"GPU-{node}", "NVIDIA L40S", "/dev/nvidia0", 0, "0000:01:00.0", 46068, 45000)
    return Inventory(node, [gpu], [[Link(LinkType.SELF)]])


def failure(folder: Path, node: str) -> SluiceError:
    collected = load_inventories(folder, [node])
    assert not collected.inventories
    return collected.failures[node]


def test_written_files_are_read_in_natural_order(tmp_path: Path) -> None:
    for node in ("n10", "n2", "n1"):
        path = write_inventory(tmp_path / "drop", inventory(node))
        assert stat.S_IMODE(path.stat().st_mode) == 0o644
    (tmp_path / "drop/.n3.json.tmp").write_text("half")
    (tmp_path / "drop/README").write_text("not ours")
    collected = load_inventories(tmp_path / "drop")
    assert list(collected.inventories) == ["n1", "n2", "n10"] and not collected.failures
    assert collected.inventories["n2"] == inventory("n2")
    assert list(load_inventories(tmp_path / "drop", ["n10", "n1"]).inventories) == ["n10", "n1"]


def test_writing_replaces_a_planted_link_and_not_its_target(tmp_path: Path) -> None:
    secret = tmp_path / "shadow"
    secret.write_text("root:x")
    (tmp_path / "drop").mkdir()
    (tmp_path / "drop/n1.json").symlink_to(secret)
    write_inventory(tmp_path / "drop", inventory("n1"))
    assert secret.read_text() == "root:x"
    assert not (tmp_path / "drop/n1.json").is_symlink()
    assert not [path.name for path in (tmp_path / "drop").iterdir() if path.name != "n1.json"]


def test_node_name_is_no_path(tmp_path: Path) -> None:
    with pytest.raises(SluiceError, match="not a name of a node"):
        write_inventory(tmp_path, inventory("../n1"))
    assert "not a name of a node" in failure(tmp_path, "../n1").what
    assert not list(tmp_path.iterdir())


def test_links_are_not_followed(tmp_path: Path) -> None:
    write_inventory(tmp_path / "real", inventory("n1"))
    (tmp_path / "drop").mkdir()
    (tmp_path / "drop/n1.json").symlink_to(tmp_path / "real/n1.json")
    assert "n1.json" in failure(tmp_path / "drop", "n1").what


def test_special_files_do_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "n1.json")
    (tmp_path / "n2.json").mkdir()
    collected = load_inventories(tmp_path)
    assert not collected.inventories and set(collected.failures) == {"n1", "n2"}
    assert all("regular file" in str(error) for error in collected.failures.values())


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666])
def test_files_that_others_may_write_are_not_believed(tmp_path: Path, mode: int) -> None:
    write_inventory(tmp_path, inventory("n1")).chmod(mode)
    assert "others than its owner" in failure(tmp_path, "n1").what


@pytest.mark.skipif(os.geteuid() != 0, reason="giving files away needs root")
def test_files_of_other_users_are_not_believed_unless_named(tmp_path: Path) -> None:
    os.chown(write_inventory(tmp_path, inventory("n1")), 12345, 12345)
    assert "belongs to user 12345" in failure(tmp_path, "n1").what
    assert list(load_inventories(tmp_path, owners={0, 12345}).inventories) == ["n1"]


def test_size_is_bounded(tmp_path: Path) -> None:
    with (tmp_path / "n1.json").open("wb") as file:
        file.truncate(1 << 40)  # a hole: no space is taken, and no such amount may be read
    assert "more than 4 MiB" in failure(tmp_path, "n1").what


def test_one_nodes_file_under_anothers_name(tmp_path: Path) -> None:
    write_inventory(tmp_path, inventory("n1")).rename(tmp_path / "n2.json")
    assert "belongs to node 'n1'" in failure(tmp_path, "n2").what


def test_half_written_and_missing_files_name_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "n1.json").write_text(inventory("n1").to_json()[:300])
    assert "not JSON" in failure(tmp_path, "n1").what
    assert "sluice inventory collect n7" in failure(tmp_path, "n7").remedy
    with pytest.raises(SluiceError, match="nowhere"):
        load_inventories(tmp_path / "nowhere")


def test_one_bad_file_does_not_stop_the_others(tmp_path: Path) -> None:
    write_inventory(tmp_path, inventory("n1"))
    (tmp_path / "n2.json").write_text("{}")
    collected = load_inventories(tmp_path)
    assert list(collected.inventories) == ["n1"] and list(collected.failures) == ["n2"]


# ---- the fan-out: `python` replaces the remote shell ----

ANSWER = "import sys; sys.stdout.write(open(sys.argv[1]).read())"


def answers(tmp_path: Path, *nodes: str) -> Path:
    for node in nodes:
        write_inventory(tmp_path, inventory(node))
    return tmp_path


def python(code: str, *words: str) -> list[str]:
    return [sys.executable, "-c", code, *words]


def results(nodes: list[str], command, **options) -> dict[str, Inventory | SluiceError]:  # type: ignore[no-untyped-def]
    return dict(collect(nodes, command, **options))


def test_all_nodes_answer(tmp_path: Path) -> None:
    folder = answers(tmp_path, *(f"n{number}" for number in range(12)))
    nodes = [f"n{number}" for number in range(12)]
    found = results(nodes, lambda node: python(ANSWER, str(folder / f"{node}.json")), fanout=3)
    assert set(found) == set(nodes)
    assert all(isinstance(one, Inventory) and one.node == node for node, one in found.items())


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import sys; sys.exit('ssh: connect to host n1 port 22: No route to host')", "No route to host"),
        ("import sys; sys.exit(255)", "exit status 255"),
        ("print('Last login: yesterday')", "not JSON"),
        ("import sys; sys.stderr.write('a\\nb\\x1b[31m\\n'); sys.exit(3)", "n1: b [31m"),
        ("print('x' * (8 << 20))", "more than 4 MiB"),
        ("pass", "exit status 0"),
    ],
)
def test_failures_are_reported_in_the_nodes_own_words(code: str, words: str) -> None:
    error = results(["n1"], lambda node: python(code))["n1"]
    assert isinstance(error, SluiceError)
    assert error.what.startswith("n1: ") and words in error.what and "\x1b" not in error.what


def test_exit_code_1_with_an_inventory_is_an_answer(tmp_path: Path) -> None:
    """A node with a GPU that cannot be read still reports the others."""
    file = str(answers(tmp_path, "n1") / "n1.json")
    assert isinstance(results(["n1"], lambda node: python(ANSWER + "; sys.exit(1)", file))["n1"], Inventory)


def test_node_that_answers_as_another(tmp_path: Path) -> None:
    file = str(answers(tmp_path, "n1") / "n1.json")
    assert "answered as node 'n1'" in str(results(["n2"], lambda node: python(ANSWER, file))["n2"])


def test_silent_node_is_given_up_with_all_that_it_started(tmp_path: Path) -> None:
    marker = tmp_path / "pid"
    code = (
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])\n"
        "open(sys.argv[1] + '.new', 'w').write(str(child.pid)); os.rename(sys.argv[1] + '.new', sys.argv[1])\n"
        "time.sleep(1000)"
    )
    error = results(["n1"], lambda node: python(code, str(marker)), timeout=2)["n1"]
    assert isinstance(error, SluiceError) and "within 2 s" in error.what
    if marker.exists():  # else it had not started, which is as good
        assert _gone(int(marker.read_text()))


def test_caller_that_wants_no_more_waits_for_nothing(tmp_path: Path) -> None:
    """As after Ctrl-C: what still runs is ended at once and not after its time-out."""
    answers(tmp_path, "n1")
    marker = tmp_path / "pid"
    sleep = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(1000)"

    def command(node: str) -> list[str]:
        return python(ANSWER, str(tmp_path / "n1.json")) if node == "n1" else python(sleep, str(marker))

    found = collect(["n2", "n1"], command, timeout=900)
    assert next(found)[0] == "n1"
    while not marker.exists() or not marker.read_text():
        time.sleep(0.01)
    found.close()
    assert _gone(int(marker.read_text()))


def _gone(pid: int) -> bool:
    for _ in range(200):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    return False


def test_background_process_on_stderr_is_not_waited_for(tmp_path: Path) -> None:
    """As a shared ssh connection, which keeps standard error open after the command has ended."""
    file, marker = str(answers(tmp_path, "n1") / "n1.json"), tmp_path / "pid"
    code = (
        "import subprocess, sys\n"
        "sleep = [sys.executable, '-c', 'import time; time.sleep(1000)']\n"
        "child = subprocess.Popen(sleep, stdout=subprocess.DEVNULL, start_new_session=True)\n"
        "open(sys.argv[2], 'w').write(str(child.pid))\n" + ANSWER
    )
    try:
        found = results(["n1"], lambda node: python(code, file, str(marker)), timeout=60)["n1"]
        assert isinstance(found, Inventory)
    finally:
        os.kill(int(marker.read_text()), signal.SIGKILL)


def test_missing_program_and_hostile_node_name() -> None:
    error = results(["n1"], lambda node: ["/nonexistent/rsh", node])["n1"]
    assert "/nonexistent/rsh" in str(error)
    started: list[str] = []

    def command(node: str) -> list[str]:
        started.append(node)
        return ["true"]

    assert "not a name of a node" in str(results(["-oProxyCommand=touch x"], command)["-oProxyCommand=touch x"])
    assert not started


def test_commands_are_words_and_quoted_where_a_shell_is_at_the_far_end() -> None:
    shell = remote_shell_command(["ssh", "-o", "BatchMode=yes"], ["/opt/my tools/sluice"])("gpu-01")
    assert shell == [
        "ssh",
        "-o",
        "BatchMode=yes",
        "gpu-01",
        "'/opt/my tools/sluice'",
        "probe",
        "--json",
        "--node",
        "gpu-01",
    ]
    srun = srun_command(["/opt/my tools/sluice"], {"gpu-01": "gpu:h100:8"})("gpu-01")
    assert srun[0] == "srun" and {"--nodelist=gpu-01", "--exclusive", "--gres=gpu:h100:8"} <= set(srun)
    assert srun[-5:] == ["/opt/my tools/sluice", "probe", "--json", "--node", "gpu-01"]


def test_a_thousand_files_load_in_bounded_memory(tmp_path: Path, full_scale: bool) -> None:
    count = 1000 if full_scale else 100
    text = inventory("n0").to_json()
    for number in range(count):
        document = json.loads(text) | {"node": f"n{number}"}
        (tmp_path / f"n{number}.json").write_text(json.dumps(document))
    collected = load_inventories(tmp_path)
    assert len(collected.inventories) == count and not collected.failures
    assert collecting.MOST_BYTES == 4 << 20
