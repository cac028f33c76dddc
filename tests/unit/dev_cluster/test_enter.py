"""The program by which commands enter a cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from dev_cluster.processes import start_time

PROGRAM = Path(__file__).parents[3] / "dev_cluster/enter/enter"
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="changes its user")


def line(
    *words: str, user: str = "65534", groups: str = "7,9", cwd: str = "/usr", env: tuple[str, ...] = ()
) -> list[str]:
    return [str(PROGRAM), "/proc/self/ns/uts", "--", user, "65533", groups, cwd, *env, "--", *words]


def entered(*words: str, **options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(line(*words, **options), capture_output=True, text=True, timeout=60)  # type: ignore[arg-type]


def test_a_command_has_its_user_folder_and_environment_alone() -> None:
    shows = "id -u; id -ru; id -g; id -G; pwd; tr '\\0' ' ' </proc/$$/environ"
    done = subprocess.run(
        line("sh", "-c", shows, env=("PATH=/usr/bin:/bin", "WORDS=a b=c")), capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines() == [
        "65534",
        "65534",
        "65533",
        "65533 7 9",
        "/usr",
        "PATH=/usr/bin:/bin WORDS=a b=c ",
    ]
    assert not done.stderr


def test_a_program_is_looked_for_in_the_path_that_it_gets(tmp_path: Path) -> None:
    tmp_path.joinpath("only-here").symlink_to("/bin/echo")
    words = [str(PROGRAM), "--", "0", "0", "0", "/", f"PATH={tmp_path}", "--", "only-here", "found"]
    assert subprocess.run(words, capture_output=True, text=True, timeout=60).stdout == "found\n"


def test_it_enters_the_namespaces_in_the_order_given() -> None:
    holder = subprocess.Popen(
        ["unshare", "--uts", "--pid", "--fork", "sh", "-c", "hostname inside; echo $$; exec sleep 60"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "1\n"
        pid = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()[0]
        words = [
            str(PROGRAM),
            f"/proc/{pid}/ns/pid",
            f"/proc/{pid}/ns/uts",
            "--",
            "0",
            "0",
            "0",
            "/",
            "PATH=/bin:/usr/bin",
        ]
        done = subprocess.run(
            [*words, "--", "sh", "-c", "hostname; echo $PPID"], capture_output=True, text=True, timeout=60
        )
        assert done.stdout == "inside\n0\n"  # a parent that the PID namespace does not have
    finally:
        subprocess.run(["pkill", "-KILL", "-P", str(holder.pid)], check=True)
        holder.wait()


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["/bin/sh", "-c", "exit 37"], 37),
        (["/bin/sh", "-c", "kill -TERM $$"], -signal.SIGTERM),
        (["/nowhere/to/be/found"], 127),
        (["/etc"], 126),
    ],
)
def test_it_ends_as_the_program_does(words: list[str], code: int) -> None:
    done = entered(*words)
    assert done.returncode == code
    assert (words[0] in done.stderr) == (code in (126, 127))


@pytest.mark.parametrize(
    "wrong", [{"user": "alice"}, {"groups": "1,x"}, {"groups": "1;2"}, {"cwd": "/nowhere"}, {"user": "-1"}]
)
def test_what_it_cannot_do_is_said_and_nothing_started(wrong: dict[str, str]) -> None:
    done = entered("/bin/echo", "started", **wrong)
    assert done.returncode == 125
    assert done.stderr and not done.stdout


def test_the_command_dies_with_its_starter() -> None:
    child = subprocess.Popen(line("/bin/sh", "-c", "echo $$; exec sleep 60"), stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    pid = int(child.stdout.readline())
    child.kill()
    child.wait()
    deadline = time.monotonic() + 60
    while start_time(pid) is not None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
