"""The programs that slurmd and slurmstepd run, against a socket with prepared answers."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Answering = Callable[[list[bytes]], tuple[str, list[dict[str, object]]]]
PROGRAM = Path(__file__).parents[3] / "prolog_epilog/programs/node_program.py"


@pytest.fixture
def answering(tmp_path: Path) -> Iterator[Answering]:
    """A socket that gives prepared answers; where it lies, and what it was asked."""
    listeners: list[socket.socket] = []

    def make(answers: list[bytes]) -> tuple[str, list[dict[str, object]]]:
        path, asked = str(tmp_path / "agent.sock"), []
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listeners.append(listener)
        listener.bind(path)
        listener.listen()

        def serve() -> None:
            for answer in answers:
                connection, _ = listener.accept()
                with connection:
                    asked.append(json.loads(connection.makefile("rb").readline()))
                    connection.sendall(answer)
            listener.close()  # a further request is refused, and does not wait for an answer

        threading.Thread(target=serve, daemon=True).start()
        return path, asked

    yield make
    for listener in listeners:
        listener.close()


def program(
    name: str, path: str, folder: Path, before: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run one of the programs with another socket and a short time-out; `before` is done before anything else."""
    text = PROGRAM.read_text().replace("import os\n", f"import os\n{before}", 1)
    text = text.replace("/run/sluice/agent.sock", path).replace("PATIENCE = 25.0", "PATIENCE = 0.3")
    text = text.replace("/run/sluice/agent/jobs", str(folder / "jobs"))
    (folder / name).write_text(text)
    command = ["/usr/bin/python3", "-IS", str(folder / name)]
    return subprocess.run(
        command,
        env=environment,
        capture_output=True,
        encoding="utf-8",
        errors="surrogateescape",
        timeout=60,
        check=False,
    )


JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_UID": "1000", "SLURM_JOB_USER": 'a"\u00e9\n', "SLURM_JOB_GPUS": "0,1"}


def test_the_prolog_tells_the_job(answering: Answering, tmp_path: Path) -> None:
    path, asked = answering([b'{"ok": {}}\n'])
    done = program("sluice-prolog", path, tmp_path, **JOB, LC_ALL="C.UTF-8")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert asked == [
        {
            "do": "prolog",
            "job": 7,
            "uid": 1000,
            "user": 'a"\u00e9\n',
            "account": "",
            "partition": "",
            "gpus": [0, 1],
            "split": [],
        }
    ]


SEVERAL = {**JOB, "SLURM_JOB_NUM_NODES": "2"}


@pytest.mark.parametrize(
    ("answer", "job", "times"), [({}, SEVERAL, 1), ({"preflight": 9}, JOB, 1), ({"preflight": 9}, SEVERAL, 2)]
)
def test_a_preflight_is_asked_for_where_there_is_one(
    answering: Answering, tmp_path: Path, answer: dict[str, int], job: dict[str, str], times: int
) -> None:
    path, asked = answering([json.dumps({"ok": answer}).encode() + b"\n", b'{"ok": {}}\n'])
    done = program("sluice-prolog", path, tmp_path, **job)
    assert (done.returncode, done.stderr, len(asked)) == (0, "", times)


@pytest.mark.parametrize("answer", [b"", b"x\n", b'{"ok"', b'{"error": "unexpected"}\n', b'{"ok": 1}\n', None])
def test_a_preflight_that_fails_to_run_does_not_fail_the_prolog(
    answering: Answering, tmp_path: Path, answer: bytes | None
) -> None:
    """None: the agent is gone by then. slurmd would drain the node."""
    path, _ = answering([b'{"ok": {"preflight": 1}}\n', *([] if answer is None else [answer])])
    done = program("sluice-prolog", path, tmp_path, **SEVERAL)
    assert done.returncode == 0 and done.stderr.startswith("no preflight: ") and "Traceback" not in done.stderr


def test_an_agent_that_hangs_in_a_preflight_is_not_waited_for(tmp_path: Path) -> None:
    """It is stopped, say: the kernel takes the request, and nobody answers."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(tmp_path / "agent.sock"))
    listener.listen()

    def answer_once() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.makefile("rb").readline()
            connection.sendall(b'{"ok": {"preflight": 1}}\n')

    threading.Thread(target=answer_once, daemon=True).start()
    with listener:
        done = program("sluice-prolog", str(tmp_path / "agent.sock"), tmp_path, **SEVERAL)
    assert (done.returncode, done.stderr) == (0, "no preflight: timed out\n")


def test_a_node_at_fault_fails_the_prolog(answering: Answering, tmp_path: Path) -> None:
    path, _ = answering([b'{"ok": {"preflight": 9}}\n', b'{"ok": {"fault": "link slow"}}\n'])
    done = program("sluice-prolog", path, tmp_path, **SEVERAL)
    assert (done.returncode, done.stderr) == (1, "sluice-prolog: link slow\n")


def test_the_prolog_tells_which_run_of_the_job_it_is(answering: Answering, tmp_path: Path) -> None:
    path, asked = answering([b'{"ok": {}}\n'] * 2)
    assert program("sluice-prolog", path, tmp_path, **JOB, SLURM_JOB_RESTART_COUNT="0").returncode == 0
    newer = {"SLURM_JOB_RESTART_COUNT": "3", "SLURM_JOB_START_TIME": "1790000000"}  # the latter since 23.02
    assert program("sluice-prolog", path, tmp_path, **JOB, **newer).returncode == 0
    assert [(one["restarts"], one.get("begun")) for one in asked] == [(0, None), (3, 1790000000)]


@pytest.mark.parametrize(
    ("roles", "told"), [("a,b n1=0/1", True), ("a" * (32 << 10), True), ("\x01" * (16 << 10), False)]
)
def test_the_prolog_tells_the_layout_of_the_jobs_roles(
    answering: Answering, tmp_path: Path, roles: str, told: bool
) -> None:
    """A user's own text does not make the request longer than the agent reads: slurmd would drain the node."""
    path, asked = answering([b'{"ok": {}}\n'])
    assert program("sluice-prolog", path, tmp_path, **JOB, SPANK_SLUICE_GPU_ROLES=roles).returncode == 0
    assert asked[0].get("roles") == (roles if told else None)


@pytest.mark.parametrize("answer", [b"", b"\n", b"x\n", b"[]\n", b"{}\n", b'{"ok"', b'{"error": "no room"}\n', b"1\n"])
def test_a_bad_answer_is_a_failure(answering: Answering, tmp_path: Path, answer: bytes) -> None:
    path, _ = answering([answer])
    done = program("sluice-prolog", path, tmp_path, **JOB)
    assert done.returncode == 1 and done.stderr.startswith("sluice-prolog: ") and "Traceback" not in done.stderr


def test_an_answer_that_a_restart_cut_off_is_asked_for_again(answering: Answering, tmp_path: Path) -> None:
    path, asked = answering([b"", b'{"ok": {"unclean": []}}\n'])
    assert program("sluice-epilog", path, tmp_path, **JOB).returncode == 0
    assert len(asked) == 2


def test_an_unclean_gpu_fails_the_epilog(answering: Answering, tmp_path: Path) -> None:
    path, _ = answering([b'{"ok": {"unclean": ["GPU x: process 5 cannot be ended"]}}\n'])
    done = program("sluice-epilog", path, tmp_path, **JOB)
    assert (done.returncode, done.stderr) == (1, "sluice-epilog: GPU x: process 5 cannot be ended\n")


def test_the_epilog_asks_for_a_job_that_the_agent_knows_where_slurm_names_no_gpus(
    answering: Answering, tmp_path: Path
) -> None:
    """As slurmctld does until the first node has registered with it."""
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs/7.json").touch()
    path, asked = answering([b'{"ok": {"unclean": []}}\n'])
    assert program("sluice-epilog", path, tmp_path, SLURM_JOB_ID="7").returncode == 0
    assert asked == [{"do": "epilog", "job": 7}]
    assert program("sluice-epilog", path, tmp_path, SLURM_JOB_ID="8").returncode == 0  # the agent is not there any more


def test_without_the_agent_a_job_with_gpus_fails_and_another_does_not(tmp_path: Path) -> None:
    gone = str(tmp_path / "gone")
    done = program("sluice-prolog", gone, tmp_path, **JOB)
    assert done.returncode == 1 and "systemctl start sluice-agent" in done.stderr
    assert program("sluice-prolog", gone, tmp_path, SLURM_JOB_ID="7").returncode == 0
    assert program("sluice-task-prolog", gone, tmp_path, SLURM_JOB_ID="7").returncode == 0


@pytest.mark.parametrize(
    "wrong", [{"SLUICE_GPU_SHARDS": "0:1,2"}, {"SLURM_JOB_ID": "x"}, {"SLURM_JOB_GPUS": "0,-1"}, {"SLURM_JOB_UID": ""}]
)
def test_variables_without_sense_are_named(tmp_path: Path, wrong: dict[str, str]) -> None:
    done = program("sluice-prolog", "/nonexistent", tmp_path, **{**JOB, **wrong})
    assert done.returncode == 1 and next(iter(wrong)) in done.stderr and "Traceback" not in done.stderr


def test_the_helper_says_where_the_limits_lie(answering: Answering, tmp_path: Path) -> None:
    files = json.dumps({"ok": {"files": ["/dev/null", "/nonexistent/device"]}}).encode() + b"\n"
    path, asked = answering([files, b'{"ok": {"region": "/run/sluice/limit/job_7"}}\n'])
    task = {"SLUICE_JOB": "7", "SLUICE_UID": "1", "SLUICE_STEP": "part", "SLUICE_GPUS": "0", "SLUICE_SHARDS": "5"}
    assert program("sluice-task-init", path, tmp_path, **task).stdout == "region /run/sluice/limit/job_7\n"
    limit = {"do": "limit", "job": 7, "uid": 1, "whole": False, "gpus": [0], "shards": 5, "open": ["/dev/null"]}
    assert asked == [{"do": "devices"}, limit]


def test_the_helper_says_which_interfaces_the_task_can_open(answering: Answering, tmp_path: Path) -> None:
    found = {"files": [], "nics": {"mlx5_0": "/dev/null", "mlx5_1": "/nonexistent/device"}, "variables": []}
    path, asked = answering([json.dumps({"ok": found}).encode() + b"\n", b'{"ok": {"region": null}}\n'])
    task = {"SLUICE_JOB": "7", "SLUICE_UID": "1", "SLUICE_STEP": "whole", "SLUICE_GPUS": "0"}
    assert program("sluice-task-init", path, tmp_path, **task).stdout == "none\n"
    assert asked[1]["nics"] == ["mlx5_0"]


def test_a_task_keeps_what_its_user_set(answering: Answering, tmp_path: Path) -> None:
    own = tmp_path / "device"
    own.touch()
    nics = {"mlx5_0": str(own), "mlx5_1": "/nonexistent/device"}
    files = json.dumps({"ok": {"files": [str(own), "/nonexistent/device"], "nics": nics}}).encode() + b"\n"
    path, asked = answering([files, b'{"ok": {"export": {"NCCL_IB_HCA": "=mlx5_0", "SLUICE_GPU_NUMA": "0"}}}\n'])
    done = program("sluice-task-prolog", path, tmp_path, SLURM_STEP_GPUS="0", NCCL_IB_HCA="mine")
    assert done.stdout == "export SLUICE_GPU_NUMA=0\n"
    assert asked[1] == {"do": "task", "open": [str(own)], "nics": ["mlx5_0"]}


def test_a_task_tells_of_its_step_where_jobs_have_roles(answering: Answering, tmp_path: Path) -> None:
    devices = b'{"ok": {"files": [], "roles": true}}\n'
    export = {"SLUICE_GPU_ROLE": "decode"}
    answer = {"export": export, "visible": {"CUDA_VISIBLE_DEVICES": "MIG-1"}}
    path, asked = answering([devices, json.dumps({"ok": answer}).encode() + b"\n"] * 2)
    names = ",".join(f"MIG-{number:036}" for number in range(16))
    of_step = {"SLURM_LOCALID": "1", "SLURM_PROCID": "5", "SLURM_NODEID": "2", "SLURM_STEP_TASKS_PER_NODE": "2(x3)"}
    more = {"SLURM_STEP_NUM_TASKS": "6", "SLURM_GPUS_ON_NODE": "16", "SLURMD_TRES_BIND": "gpu:single:1"}
    lists = {"CUDA_VISIBLE_DEVICES": names, "ZE_AFFINITY_MASK": "0," * 600}
    inherited = {"SLUICE_GPU_ROLE": "prefill", "SLUICE_GPU_ROLE_RANK": "0"}
    done = program("sluice-task-prolog", path, tmp_path, SLURM_STEP_GPUS="0", **of_step, **more, **lists, **inherited)
    assert asked[1]["step"] == {
        "role": "", "local": 1, "rank": 5, "node": 2, "tasks": "2(x3)", "size": 6, "gpus": 16, "bound": True,
        "visible": {"CUDA_VISIBLE_DEVICES": names},
    }  # fmt: skip
    assert sorted(done.stdout.splitlines()) == [
        "export CUDA_VISIBLE_DEVICES=MIG-1", "export SLUICE_GPU_ROLE=decode", "unset SLUICE_GPU_ROLE_RANK",
    ]  # fmt: skip


def test_what_sluice_set_for_another_task_is_not_its_users(answering: Answering, tmp_path: Path) -> None:
    """A step has the environment of the batch script, which runs on another node or has other GPUs."""
    (tmp_path / ".nccl.conf").write_text("# NCCL_IB_HCA=mlx5_9\nNCCL_TOPO_FILE = /of/the/user.xml\n")
    names = ["CUDA_DEVICE_ORDER", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_TOPO_FILE"]
    devices = json.dumps({"ok": {"files": [], "nics": {}, "variables": names}}).encode() + b"\n"
    gpus = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "SLUICE_GPU_NUMA": "1"}
    export = {"GLOO_SOCKET_IFNAME": "eth1", **gpus, "SLUICE_SET": "new"}
    path, asked = answering([devices, json.dumps({"ok": {"export": export}}).encode() + b"\n"] * 2)
    inherited = {
        "SLUICE_SET": "GLOO_SOCKET_IFNAME=eth0 NCCL_IB_HCA==mlx5_0 CUDA_DEVICE_ORDER=PCI_BUS_ID",
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_IB_HCA": "=mlx5_0",
        "SLUICE_GPU_NUMA": "0",
        "CUDA_DEVICE_ORDER": "FASTEST_FIRST",  # changed by the user's script since
        "HOME": str(tmp_path),
    }
    done = program("sluice-task-prolog", path, tmp_path, SLURM_STEP_GPUS="0", SLURM_JOB_NUM_NODES="2", **inherited)
    assert asked[1]["own"] == ["CUDA_DEVICE_ORDER", "NCCL_TOPO_FILE"]
    assert done.stdout.splitlines() == [
        "unset NCCL_IB_HCA", "export GLOO_SOCKET_IFNAME=eth1", "export SLUICE_GPU_NUMA=1", "export SLUICE_SET=new",
    ]  # fmt: skip
    alone = program("sluice-task-prolog", path, tmp_path, SLURM_STEP_GPUS="0", SLURM_JOB_NUM_NODES="1")
    assert alone.stdout.splitlines() == [
        "export CUDA_DEVICE_ORDER=PCI_BUS_ID", "export SLUICE_GPU_NUMA=1", "export SLUICE_SET=new",
    ]  # fmt: skip


def test_nothing_of_another_task_is_left_where_this_one_gets_nothing(answering: Answering, tmp_path: Path) -> None:
    """A job without GPUs, from within one that has some; a step whose GPUs are near no interface."""
    inherited = {
        "SLUICE_SET": "GLOO_SOCKET_IFNAME=eth0",
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_SOCKET_IFNAME": "eth0",
        "SLUICE_GPU_NICS": "mlx5_0",
        "SLUICE_GPU_PROFILE": "gpu",  # a user's word
    }
    lines = ["unset GLOO_SOCKET_IFNAME", "unset SLUICE_GPU_NICS", "unset SLUICE_SET"]
    without = program("sluice-task-prolog", "/nonexistent", tmp_path, SLURM_JOB_ID="8", **inherited)
    assert (without.returncode, without.stdout.splitlines()) == (0, lines)
    devices = b'{"ok": {"files": [], "nics": {}, "variables": ["GLOO_SOCKET_IFNAME"]}}\n'
    path, _ = answering([devices, b'{"ok": {"export": {"SLUICE_GPU_NUMA": "0", "SLUICE_SET": ""}}}\n'])
    step = program("sluice-task-prolog", path, tmp_path, SLURM_STEP_GPUS="0", **inherited)
    assert step.stdout.splitlines() == [*lines[:2], "export SLUICE_GPU_NUMA=0", "export SLUICE_SET="]


def test_a_network_for_gloo_that_was_not_set_is_the_users_later(answering: Answering, tmp_path: Path) -> None:
    devices = b'{"ok": {"files": [], "nics": {}, "variables": ["GLOO_SOCKET_IFNAME"]}}\n'
    export = {"GLOO_SOCKET_IFNAME": "eth0", "SLUICE_SET": "CUDA_DEVICE_ORDER=PCI_BUS_ID GLOO_SOCKET_IFNAME=eth0"}
    path, _ = answering([devices, json.dumps({"ok": {"export": export}}).encode() + b"\n"])
    done = program("sluice-task-prolog", path, tmp_path, SLURM_STEP_GPUS="0", SLURM_JOB_NUM_NODES="1")
    assert done.stdout == "export SLUICE_SET=CUDA_DEVICE_ORDER=PCI_BUS_ID\n"


@pytest.mark.parametrize("environment", [{}, {"NCCL_CONF_FILE": ""}])
def test_what_is_configured_for_nccl_is_found_where_nccl_looks(
    answering: Answering, tmp_path: Path, environment: dict[str, str]
) -> None:
    """In the user's home, also with srun --export=NONE, and where no other file is named."""
    (tmp_path / ".nccl.conf").write_text("NCCL_IB_HCA=mlx5_9\n")
    devices = b'{"ok": {"files": [], "nics": {}, "variables": ["NCCL_IB_HCA"]}}\n'
    path, asked = answering([devices, b'{"ok": {"export": {}}}\n'])
    before = f"import pwd\npwd.getpwuid = lambda _: pwd.struct_passwd(('', '', 0, 0, '', {str(tmp_path)!r}, ''))\n"
    done = program("sluice-task-prolog", path, tmp_path, before, SLURM_STEP_GPUS="0", **environment)
    assert (done.returncode, asked[1].get("own")) == (0, ["NCCL_IB_HCA"]), done.stderr


def test_a_task_says_that_it_saved_for_its_own_job(answering: Answering, tmp_path: Path) -> None:
    """sbatch in a job passes on that job's environment."""
    export = b'{"ok": {"export": {"SLUICE_CHECKPOINT_FILE": "/run/sluice/profile/8/checkpoint.saved"}}}\n'
    path, _ = answering([b'{"ok": {"files": []}}\n', export])
    inherited = "/run/sluice/profile/7/checkpoint.saved"
    done = program("sluice-task-prolog", path, tmp_path, SLURM_STEP_GPUS="0", SLUICE_CHECKPOINT_FILE=inherited)
    assert done.stdout == "export SLUICE_CHECKPOINT_FILE=/run/sluice/profile/8/checkpoint.saved\n"
    for job, said in (("8", "unset SLUICE_CHECKPOINT_FILE\n"), ("7", "")):  # without GPUs; a step of job 7 may touch it
        found = program("sluice-task-prolog", path, tmp_path, SLURM_JOB_ID=job, SLUICE_CHECKPOINT_FILE=inherited)
        assert found.stdout == said


def answers(folder: Path, loader: str | None = "CUDA_INJECTION64_PATH") -> list[bytes]:
    export = {"SLUICE_PROFILE_FOLDER": str(folder)} | ({loader: "/lib/profile.so"} if loader else {})
    return [b'{"ok": {"files": []}}\n', json.dumps({"ok": {"export": export}}).encode() + b"\n"]


def test_a_task_is_told_where_its_profile_is(answering: Answering, tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    path, _ = answering(answers(tmp_path / "7/0"))
    done = program("sluice-task-prolog", path, tmp_path, SLURM_STEP_GPUS="0", SLUICE_PROFILE_FOLDER="/of/the/batch")
    assert done.stdout.splitlines() == [
        "export CUDA_INJECTION64_PATH=/lib/profile.so", f"export SLUICE_PROFILE_FOLDER={tmp_path}/7/0",
    ]  # fmt: skip
    assert list((tmp_path / "7/0").iterdir()) == []


@pytest.mark.parametrize("loader", ["CUDA_INJECTION64_PATH", "ROCP_TOOL_LIBRARIES"])
@pytest.mark.parametrize("own", ["/my.so", ""])
def test_a_users_own_injection_stays_and_is_noted(answering: Answering, tmp_path: Path, loader: str, own: str) -> None:
    (tmp_path / "7").mkdir()
    path, _ = answering(answers(tmp_path / "7/0", loader))
    done = program("sluice-task-prolog", path, tmp_path, SLURM_STEP_GPUS="0", **{loader: own})
    assert loader not in done.stdout
    assert (tmp_path / "7/0/injected").read_text() == loader


def test_a_library_among_a_users_own_is_loaded(answering: Answering, tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    path, _ = answering(answers(tmp_path / "7/0", "ROCP_TOOL_LIBRARIES"))
    own = "/my.so:/lib/profile.so"
    done = program("sluice-task-prolog", path, tmp_path, SLURM_STEP_GPUS="0", ROCP_TOOL_LIBRARIES=own)
    assert "ROCP_TOOL_LIBRARIES" not in done.stdout and list((tmp_path / "7/0").iterdir()) == []


@pytest.mark.parametrize(
    ("own", "all_of_it"),
    [
        (None, "/lib/profile.so"),
        ("/my.so", "/my.so:/lib/profile.so"),
        ("/lib/profile.so /my.so", "/lib/profile.so:/my.so"),
    ],
)
def test_a_library_is_preloaded_behind_a_users_own(
    answering: Answering, tmp_path: Path, own: str | None, all_of_it: str
) -> None:
    (tmp_path / "7").mkdir()
    path, _ = answering(answers(tmp_path / "7/0", "LD_PRELOAD"))
    environment = {"LD_PRELOAD": own} if own is not None else {}
    done = program("sluice-task-prolog", path, tmp_path, SLURM_STEP_GPUS="0", **environment)
    assert [line for line in done.stdout.splitlines() if "LD_PRELOAD" in line] == [f"export LD_PRELOAD={all_of_it}"]
    assert list((tmp_path / "7/0").iterdir()) == []


def test_a_task_that_loads_nothing_is_noted(answering: Answering, tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    path, _ = answering(answers(tmp_path / "7/0", None))
    program("sluice-task-prolog", path, tmp_path, SLURM_STEP_GPUS="0", CUDA_INJECTION64_PATH="/my.so")
    assert (tmp_path / "7/0/injected").read_text() == ""


def test_a_profile_that_was_asked_for_is_next_to_the_output(
    answering: Answering, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    environment = {"SLURM_STEP_GPUS": "0", "SLURMD_NODENAME": "n1", "SLUICE_GPU_PROFILE": "30"}
    for _ in range(2):  # the second task of the step finds all of it
        (tmp_path / "agent.sock").unlink(missing_ok=True)
        path, _ = answering(answers(tmp_path / "7/0"))
        done = program("sluice-task-prolog", path, tmp_path, **environment)
        place = tmp_path / "work/sluice-profile-7/n1.0"
        assert f"export SLUICE_PROFILE_FOLDER={place}\n" in done.stdout  # the library follows no link
    assert (tmp_path / "7/0").readlink() == place and place.stat().st_mode & 0o777 == 0o700
    assert len((place / "control").read_bytes()) == 64 and [one.name for one in place.iterdir()] == ["control"]


PROFILED = {"SLURM_STEP_GPUS": "0", "SLURMD_NODENAME": "n1", "SLUICE_GPU_PROFILE": "30"}


@pytest.mark.parametrize("name", [b"\xff", b"two\nlines"])
def test_a_job_in_a_folder_of_any_name_runs(
    answering: Answering, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: bytes
) -> None:
    (tmp_path / "7").mkdir()
    work = tmp_path / os.fsdecode(name)
    work.mkdir()
    monkeypatch.chdir(work)
    path, _ = answering(answers(tmp_path / "7/0"))
    own = os.fsdecode(name)
    done = program("sluice-task-prolog", path, tmp_path, **PROFILED, LC_ALL="C.UTF-8", CUDA_INJECTION64_PATH=own)
    place = f"{work}/sluice-profile-7/n1.0" if name == b"\xff" else tmp_path / "7/0"
    assert (done.returncode, done.stdout, done.stderr) == (0, f"export SLUICE_PROFILE_FOLDER={place}\n", "")
    assert (tmp_path / "7/0/injected").exists() and (tmp_path / "7/0/control").exists()


LATE = """
def late(path, mode, mkdir=os.mkdir):
    if "sluice-profile-" in path:
        mkdir(path, mode)
    mkdir(path, mode)
os.mkdir = late
"""


def test_nodes_that_begin_together_all_have_a_profile(
    answering: Answering, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each makes the job's folder, which the other may just have made."""
    (tmp_path / "7").mkdir()
    monkeypatch.chdir(tmp_path)
    path, _ = answering(answers(tmp_path / "7/0"))
    done = program("sluice-task-prolog", path, tmp_path, LATE, **PROFILED)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "sluice-profile-7/n1.0/control").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")
def test_what_another_user_has_put_next_to_the_output_is_not_used(
    answering: Answering, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job may run in /tmp."""
    (tmp_path / "7").mkdir()
    monkeypatch.chdir(tmp_path)
    for place in ("sluice-profile-7", "sluice-profile-7/n1.0"):
        (tmp_path / place).mkdir()
        (tmp_path / place).chmod(0o777)
        os.chown(tmp_path / place, 2001, 2001)
    path, _ = answering(answers(tmp_path / "7/0"))
    done = program("sluice-task-prolog", path, tmp_path, **PROFILED)
    assert done.stdout.endswith(f"export SLUICE_PROFILE_FOLDER={tmp_path}/7/0\n")
    assert (tmp_path / "7/0/control").exists() and not list((tmp_path / "sluice-profile-7/n1.0").iterdir())


def test_a_job_runs_without_its_profile_where_no_folder_can_be_made(answering: Answering, tmp_path: Path) -> None:
    path, _ = answering(answers(tmp_path / "gone/0"))
    done = program("sluice-task-prolog", path, tmp_path, SLURM_STEP_GPUS="0", SLUICE_GPU_PROFILE="1")
    assert (done.returncode, done.stderr) == (0, "")


def test_the_epilog_waits_while_memory_is_cleared(tmp_path: Path) -> None:
    """Other requests are given up after 20 s; this one may take as long as a policy allows."""
    names = dict(
        line.split(" = ")[:2] for line in PROGRAM.read_text().splitlines() if line.startswith(("SECONDS", "EPIL"))
    )
    assert float(names["SECONDS"]) == 20 and float(names["EPILOG_SECONDS"].split()[0]) > 3600
    path = tmp_path / "agent.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()

        def slowly() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.makefile("rb").readline()
                time.sleep(1.5)
                connection.sendall(b'{"ok": {"unclean": []}}\n')

        threading.Thread(target=slowly, daemon=True).start()
        text = (
            PROGRAM.read_text().replace("/run/sluice/agent.sock", str(path)).replace("SECONDS = 20.0", "SECONDS = 0.5")
        )
        (tmp_path / "sluice-epilog").write_text(text)
        command = ["/usr/bin/python3", "-IS", str(tmp_path / "sluice-epilog")]
        assert subprocess.run(command, env=JOB, check=False, timeout=30).returncode == 0
