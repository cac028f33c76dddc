"""What a user's program gets, and what hostile fields and scripts come to."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import pytest

from sluice.actd import jobs
from sluice.actd.arguments import refuse_script
from sluice.actd.become import Account, account, run_as
from sluice.base.run import Finished
from sluice.client.models import JobRequest
from sluice.exchange.acts import ActError
from tests.unit.actd.world import World

NOBODY = Account("nobody", 65534, 65534, (65534,), "/nonexistent", "/bin/sh")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="becomes other users")


# ---- becoming ----


@as_root
def test_a_program_has_the_users_ids_alone_and_gains_nothing() -> None:
    code = "import os\nfrom sluice.actd.become import *\ngain_nothing()\n" + (
        "w = Account('nobody', 65534, 65534, (65534, 12345), '/', '/bin/sh')\n"
        "print(run_as(w, ['/bin/cat', '/proc/self/status'], env={}, timeout=20).out)\n"
        "print(run_as(w, ['/usr/bin/env'], env={'A': 'b'}, timeout=20).out)\n"
        "print(run_as(w, ['/bin/ls', '/proc/self/fd'], env={}, timeout=20).out)\n"
        "print('root file:', run_as(w, ['/bin/cat', '/etc/shadow'], env={}, timeout=20).status)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "SECRET": "s"},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = dict(line.split(":", 1) for line in done.stdout.splitlines() if ":" in line)
    assert lines["Uid"].split() == lines["Gid"].split() == ["65534"] * 4
    assert lines["Groups"].split() == ["12345", "65534"] or lines["Groups"].split() == ["65534", "12345"]
    assert {lines[name].strip() for name in ("CapPrm", "CapEff", "CapAmb", "CapInh")} == {"0" * 16}
    assert lines["NoNewPrivs"].strip() == "1" and lines["root file"].strip() == "1"
    assert "A=b" in done.stdout and "SECRET" not in done.stdout
    assert [line for line in done.stdout.splitlines() if line.isdecimal()] == ["0", "1", "2", "3"]


def test_root_and_users_of_the_system_are_nobody_here() -> None:
    for name, least in (("root", 0), ("daemon", 1000), ("nobody", 65535), ("no such user", 0), ("0", 0), ("a\0b", 0)):
        with pytest.raises(ActError) as caught:
            account(name, least)
        assert caught.value.status == 403
    with pytest.raises(ActError):
        account("nobody", 1000, never={65534})
    assert account("nobody", 1000).uid == 65534


def test_a_program_is_bounded() -> None:
    def run(script: str, **words: Any) -> Finished:
        given = {"env": {"PATH": "/usr/bin:/bin"}, "timeout": 10.0, **words}
        return run_as(NOBODY, ["/bin/sh", "-c", script], **given)

    began = time.monotonic()
    assert run("sleep 30", timeout=0.3).status is None
    assert run("exec yes", most=1 << 20).status is None
    assert run("exec tail /dev/zero", timeout=20).status not in (0, None), "memory is bounded"
    assert run("exec >&- 2>&-; sleep 30", timeout=0.3).status is None
    assert run("sleep 30 & echo there").out == "there\n", "what it leaves is not waited for"
    assert run("trap '' TERM HUP INT; sleep 30", timeout=0.3).status is None
    assert run("exit 7", given=b"x" * (1 << 20)).status == 7
    assert run("cat", given=b"x" * (1 << 20), most=2 << 20).out == "x" * (1 << 20)
    assert "memfd" in run("readlink /proc/self/fd/0").out, "of a pipe whose giver is killed, a part would be all"
    assert time.monotonic() - began < 8
    marked = "sleep 4711"
    run(f"{marked} & sleep 30", timeout=0.3)
    left = subprocess.run(["pgrep", "-f", marked], capture_output=True, text=True, check=False).stdout.split()
    assert not left, "all that it started is ended"
    assert run_as(NOBODY, ["/nonexistent"], env={}, timeout=5).status == 127


# ---- what sbatch gets ----


def test_the_job_has_its_environment_and_sbatch_none_of_it(world: World) -> None:
    world.ask("submit", script="#!/bin/sh\n", environment={"LD_PRELOAD": "/evil.so", "PATH": "/x", "N": "a\nB=c"})
    exported = dict(one.split("=", 1) for one in world.read("exported").split("\0") if one)
    assert exported["LD_PRELOAD"] == "/evil.so" and exported["PATH"] == "/x" and exported["N"] == "a\nB=c"
    assert exported["HOME"] == str(world.folder) and exported["USER"] == "alice"
    mine = world.read("environment")
    assert "LD_PRELOAD" not in mine and "/evil.so" not in mine and "B=c" not in mine
    names = {line.partition("=")[0] for line in mine.splitlines()}
    assert names <= {"PATH", "LC_ALL", "HOME", "SLURM_TIME_FORMAT", "SLURM_CONF", "PWD", "OLDPWD", "SHLVL", "_"}
    for name in ("SLURM_CONF", "SBATCH_UID", "SPANK_X", "_SLURM_SPANK_OPTION_x", "SLUICE_X"):
        assert world.refusal("submit", script="#!/bin/sh\n", environment={name: "x"}).status == 422


def test_each_value_is_in_its_options_word(world: World) -> None:
    hostile = "--uid=0 --wrap=id; $(id) `id` 'x"
    world.ask("submit", script="#!/bin/sh\n", name=hostile, comment="-", output=hostile, work_dir="/tmp/--uid=0 x")
    seen: list[list[str]] = []
    world.actd.jobs._run = lambda who, name, words, **_: seen.append(words) or Finished(0, "5\n", "")  # type: ignore[method-assign, func-returns-value, return-value]
    world.ask("submit", script="#!/bin/sh\n", name=hostile, comment="-", output=hostile, work_dir="/tmp/--uid=0 x")
    (words,) = seen
    assert all(word.startswith("--") for word in words) and "--job-name=" + hostile in words
    assert {word.partition("=")[0] for word in words} == {
        "--parsable", "--job-name", "--comment", "--output", "--chdir", "--propagate", "--export-file",
    }  # fmt: skip
    world.ask("submit", script="#!/bin/sh\n", nodes="8", fabric="block@30:00", segment=4)
    assert {"--nodes=8", "--fabric=block@30:00", "--segment=4"} <= set(seen.pop())
    world.ask("update", job="17", name=hostile, comment="JobId=1")
    assert seen[1] == ["update", "JobId=17", "Comment=JobId=1", f"JobName={hostile}"]


@pytest.mark.parametrize(
    "name", sorted({*JobRequest.model_fields} - {"environment", "hold", "exclusive", "requeue", "gpu_spread"})
)
@pytest.mark.parametrize("value", ["a\nb", "a\0b", "\x1b[2J", "\ud800", ["a"], {"a": 1}])
def test_no_field_takes_control_characters_or_other_things(world: World, name: str, value: Any) -> None:
    if name == "script" and value in ("a\nb", "\x1b[2J"):
        return
    try:
        world.ask("submit", **{"script": "#!/bin/sh\n", name: value})
    except ActError as error:
        assert error.status in (400, 422)
    else:
        pytest.fail("it was taken")
    assert not world.calls()


@pytest.mark.parametrize("job", ["", "-1", "1 2", "1;2", "--all", "1_[1-3]", "1\n", "17a", 5, None, "٣", "1" * 11])
def test_no_other_job_than_one(world: World, job: Any) -> None:
    for do in ("cancel", "hold", "release", "requeue"):
        assert world.refusal(do, job=job).status == 400
    assert world.refusal("update", job=job, comment="x").status == 400
    assert not world.calls()


@pytest.mark.parametrize(
    "line",
    [
        "#SBATCH --uid=0", "#SBATCH --gid 0", "#SBATCH --export-file=/etc/shadow", "#SBATCH --export-f=/x",
        "#SBATCH --bbf=/etc/shadow", "#SBATCH --wrap=id", "#SBATCH -W", "#SBATCH -HW", "#SBATCH --wait",
        "#SBATCH --get-user-env", "#SBATCH -J x --uid=0", '#SBATCH "--uid=0"', "#SBATCH --u''id=0", "#SBATCH \\--uid=0",
        "#PBS -x --uid=0", "#SBATCH\t--uid=0", "#SBATCH -F /dev/zero", "#SBATCH -F/dev/zero", "#SBATCH --nodefile=x",
        "#SBATCH -w /dev/zero", "#SBATCH -x/dev/zero", "#SBATCH --nodelist=/dev/zero", "#SBATCH --exclude /dev/zero",
        "#SBATCH -Hw ./x",
    ],
)  # fmt: skip
def test_options_in_scripts_that_are_about_this_host(line: str) -> None:
    for before in ("# about\n", "", "\n \t\n", "  # more\n", "#\x0bid\n", "#\u2028id\n", "#\rid\n"):
        with pytest.raises(ActError) as caught:
            refuse_script(f"#!/bin/sh\n{before}{line}\nid\n")
        assert caught.value.status == 422
    refuse_script(f"#!/bin/sh\nid\n{line}\n")  # Slurm does not read it there


def test_other_options_in_scripts_stay() -> None:
    for word in (
        "--export=ALL",
        "--exclusive",
        "--time=5",
        "--gres=gpu:1",
        "--wait-all-nodes=1",
        "--bb=x",
        "-t 5",
        "-w n1",
        "-x n2 -o /a/b",
        "--nodelist=n1",
        "-N 2",
        "--chdir=/x",
    ):
        refuse_script(f"#!/bin/sh\n#SBATCH {word}\nid\n")
    for script in ("echo", "", "#!/bin/sh\n\0"):
        with pytest.raises(ActError):
            refuse_script(script)


# ---- what Slurm says ----


@pytest.mark.parametrize(
    ("name", "said", "status"),
    [
        ("scancel", "scancel: error: Kill job error on job id 2: Access/permission denied", 403),
        ("scontrol", "Invalid user id for job 2", 403),
        ("scontrol", "slurm_suspend error: Invalid job id specified", 404),
        ("scancel", "scancel: error: Kill job error on job id 7: Job/step already completing or completed", 409),
        ("scontrol", "slurm_update error: Unable to contact slurm controller (connect failure)", 503),
        ("sbatch", "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation", 503),
        ("sbatch", "sbatch: error: Batch job submission failed: Access denied: permission denied", 422),
        ("sbatch", "", 422),
    ],
)
def test_failures_have_their_status(name: str, said: str, status: int) -> None:
    error = jobs.refusal(name, Finished(1, "", said))
    assert error.status == status and error.remedy and "\n" not in error.what


def test_what_it_says_is_bounded_and_one_line_each() -> None:
    error = jobs.refusal("sbatch", Finished(1, "", "\x1b[2Jx\n" + "y" * 100_000 + "\n" + "z\n" * 1000 + "a\n" * 2))
    assert "\x1b" not in error.what and len(error.what) < 3000


# ---- what if ----


def test_a_smaller_request_that_starts_earlier(world: World) -> None:
    now, asked = int(time.time()), []

    def sbatch(who: Any, name: str, words: list[str], **_: Any) -> Finished:
        asked.append(words)
        fits = "--gpus=h100:2" in words
        start = now if fits else now + 3600
        said = f"sbatch: Job 5 to start at {start} using 8 processors on nodes n[1-2] in partition main\n"
        return Finished(0, "", said)

    world.actd.jobs._run = sbatch  # type: ignore[method-assign, assignment]
    found = world.ask("what-if", script="#!/bin/sh\n", gpus="h100:8", time_limit="2:00:00", gpu_mem="10G")
    assert found["accepted"] and not found["starts_now"] and found["start_time"] == now + 3600
    assert found["becomes"] == {"gres": "shard:10240", "partition": "main"}
    assert found["smaller"]["changed"] == {"gpus": "h100:2"} and len(asked) <= 6
    assert all("--test-only" in words for words in asked)


def test_what_would_be_refused_is_said_in_slurms_words(world: World) -> None:
    (world.seen / "refuse").write_text("sbatch: error: sluice: 9 GPUs\nallocation failure: Invalid qos\n")
    found = world.ask("what-if", script="#!/bin/sh\n")
    assert not found["accepted"] and found["refused"] == ["sluice: 9 GPUs", "allocation failure: Invalid qos"]
    assert not (world.seen / "jobs").exists() and not world.audited()
