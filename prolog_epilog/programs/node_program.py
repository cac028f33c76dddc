#!/usr/bin/python3 -IS
"""What slurmd and slurmstepd start on a node: one program with six names, each of which asks the node agent.

sluice-prolog, sluice-epilog   Prolog and Epilog of slurm.conf, as root
sluice-task-init               the SPANK plugin's helper, as root, before a task becomes its user
sluice-task-prolog             TaskProlog, as the job's user in the task's cgroup
sluice-checkpoint              started by sluice-launch, as root, for a job that is to be saved, or may be resumed
sluice-health                  HealthCheckProgram, as root: a round of checks now; exit 0 to 3 as Nagios has it

No site packages, and of the standard library what is written in C: this starts with every job and task, and to import
json and socket takes longer than all the rest. No answer, a bad answer and a slow one are failures: a job with GPUs is
not run without its limits. A job without GPUs does not need the agent.
"""

from __future__ import annotations

import _json
import _socket
import errno
import os
import stat
import sys
import time

SOCKET = "/run/sluice/agent.sock"
OWN = f"/run/sluice/ask/{os.geteuid()}"  # where no other user waits in the same queue
ENDED = "/run/sluice/ended"
EARLIER = "/run/sluice/agent/earlier.json"
RECORDS = "/run/sluice/agent/jobs"  # root's; of jobs with GPUs, until all is taken back
# As slurmd gives a job's options to prologs; where job_submit/sluice is not loaded, a user can write either.
SHARES = ("SPANK__SLURM_SPANK_OPTION_sluice_gpu_share", "SPANK__SLURM_SPANK_OPTION_sluice_gpu-share")
POWERS = ("SPANK__SLURM_SPANK_OPTION_sluice_gpu_power", "SPANK__SLURM_SPANK_OPTION_sluice_gpu-power")
PLANNED_POWER = "SPANK_SLUICE_GPU_POWER"  # set by slurmctld, to start within a budget
ROLES = "SPANK_SLUICE_GPU_ROLES"  # likewise: which GPUs its roles have
SAVE_KEY = "SPANK_SLUICE_SAVE_KEY"  # of a job with --checkpoint=system, made by slurmctld
MOST_ROLES = 32 << 10
MOST_TEXT = 64
SET = "SLUICE_SET"  # what the agent set for libraries in the task whose environment this is, NAME=VALUE
OF_GPUS = ("SLUICE_GPU_NUMA", "SLUICE_GPU_CORES", "SLUICE_GPU_NICS")
OF_ROLES = "SLUICE_GPU_ROLE"  # as SLUICE_GPU_ROLE_RANK
STEP_ROLE = "SLUICE_STEP_ROLE"  # that srun's --gpu-role names; set by the SPANK plugin
VISIBLE = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK")
MOST_VISIBLE = 1024  # characters of a list: 16 names of MIG instances and more
MOST_TASKS = 2048
VIRTUAL_TOPOLOGY = "/var/run/nvidia-topologyd/virtualTopology.xml"  # that NCCL reads without NCCL_TOPO_FILE
CHECKPOINT_FILE = "SLUICE_CHECKPOINT_FILE"
PROFILE_FOLDER = "SLUICE_PROFILE_FOLDER"
LOADERS = ("CUDA_INJECTION64_PATH", "ROCP_TOOL_LIBRARIES")
PRELOAD = "LD_PRELOAD"  # a list, which may have the user's own, too
PROFILE_ALL = 47  # SLUICE_PROFILE_WANT_ALL
AGAIN = 75  # exit status of sluice-checkpoint, for sluice-launch
JOBS_OWN_FAULT = 3  # exit status of sluice-task-init, for the SPANK plugin
MOST = 1 << 20
MOST_CONF = 1 << 16
SECONDS = 20.0
EPILOG_SECONDS = 3700.0  # longer than a policy lets the clearing of memory take
PATIENCE = 25.0  # the wait for an agent that is just restarted on a busy node


class RefusedError(Exception):
    """The reason, and whether it is the job's own fault; else it is the node's (prolog_epilog/refusals.py)."""

    def __init__(self, why: str, *, jobs_own: bool = False) -> None:
        super().__init__(why)
        self.jobs_own = jobs_own


class AgainError(Exception):
    """What failed may go well a moment later, and nothing has come of it yet."""


class Plain:
    """How `_json` reads: into Python's own types."""

    strict = True
    object_hook = object_pairs_hook = None
    parse_float = float
    parse_int = int
    parse_constant = None
    memo: dict[str, str] = {}  # noqa: RUF012 - one reader a process


def encode(value: object) -> str:
    """JSON of what requests hold."""
    if isinstance(value, str):
        return str(_json.encode_basestring_ascii(value))
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return "[" + ",".join(map(encode, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{encode(key)}:{encode(one)}" for key, one in value.items()) + "}"
    return str(int(value))  # type: ignore[call-overload]


def ask(**request: object) -> dict[str, Any]:  # type: ignore[name-defined]  # noqa: F821 - typing takes long to load
    """The node agent's answer; a request that a restart of it cuts off is made again. Raises RefusedError."""
    end = time.monotonic() + PATIENCE
    seconds = EPILOG_SECONDS if request["do"] in ("epilog", "save", "resume", "restored", "resumed") else SECONDS
    while True:
        began = time.monotonic()
        try:
            line = exchange(encode(request).encode() + b"\n", seconds)
            break
        except TimeoutError:
            why = f"gave no answer within {seconds:g} s; see: journalctl -u sluice-agent"
            raise RefusedError(f"the node agent {why}") from None
        except OSError as error:
            now = time.monotonic()
            if now - began > 1.0:  # it hung until its guard killed it: the next one is waited for, too
                end = now + PATIENCE
            if now > end:
                why = f"does not answer at {SOCKET} ({error.strerror}); start it: systemctl start sluice-agent"
                raise RefusedError(f"the node agent {why}") from None
        time.sleep(0.1)
    return granted(line)


def granted(line: bytes) -> dict[str, Any]:  # type: ignore[name-defined]  # noqa: F821 - as above
    """The content of an answer. Raises RefusedError for a refusal, and for what is no answer."""
    try:
        answer, _ = _json.make_scanner(Plain)(line.decode(), 0)  # type: ignore[arg-type]
        if "error" in answer:
            raise RefusedError(str(answer["error"]), jobs_own=answer.get("blame") == "job")
        content: dict[str, Any] = answer["ok"]  # type: ignore[name-defined]  # noqa: F821
    except (ValueError, KeyError, TypeError, StopIteration):
        why = "the node agent's answer is not valid; install agent and programs of one version"
        raise RefusedError(why) from None
    return content


def exchange(line: bytes, seconds: float) -> bytes:
    """One line there, one back. Raises OSError."""
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    try:
        # Until the queue has room: with a time-out of Python's, connect fails at once where it is full.
        patience = int(SECONDS).to_bytes(8, sys.byteorder) + bytes(8)  # a timeval
        connection.setsockopt(_socket.SOL_SOCKET, _socket.SO_SNDTIMEO, patience)
        connection.connect(OWN if os.access(OWN, os.W_OK) else SOCKET)
        connection.settimeout(seconds)
        connection.sendall(line)
        answer = b""
        while not answer.endswith(b"\n"):
            part = connection.recv(1 << 16)
            if not part or len(answer) > MOST:
                raise ConnectionAbortedError(errno.ECONNABORTED, "broken off")
            answer += part
        return answer
    finally:
        connection.close()


def number(name: str) -> int:
    """A variable that Slurm sets to a number."""
    text = os.environ.get(name, "")
    if not text.isdecimal():
        raise RefusedError(f"{name}={text!r} is not a number")
    return int(text)


def numbers(name: str) -> list[int]:
    """A variable that holds a list of GPUs' numbers; empty where it is not set."""
    text = os.environ.get(name, "")
    if not all(part.isdecimal() for part in text.split(",") if text):
        raise RefusedError(f"{name}={text!r} is not a list of numbers")
    return [int(part) for part in text.split(",") if text]


def pairs(name: str) -> list[list[int]]:
    """A variable of ours that holds GPU:SHARDS,...; empty where it is not set."""
    text = os.environ.get(name, "")
    found = [part.split(":") for part in text.split(",") if text]
    if not all(len(pair) == 2 and pair[0].isdecimal() and pair[1].isdecimal() for pair in found):
        raise RefusedError(f"{name}={text!r} is not a list of GPU:SHARDS")
    return [[int(gpu), int(shards)] for gpu, shards in found]


def announce() -> None:
    """Tell an agent that knows of no prolog yet that prologs run; without an agent there is nothing to do."""
    if not os.access(EARLIER, os.F_OK):
        try:  # noqa: SIM105 - as in epilog
            exchange(encode({"do": "announce"}).encode() + b"\n", 1.0)
        except OSError:
            pass


def bring_key() -> None:
    """The agent gets the job's key; without it what is saved of the job stays on this node."""
    key = os.environ.get(SAVE_KEY)
    if key is None:
        return
    words = encode({"do": "key", "job": number("SLURM_JOB_ID"), "key": key[:MOST_TEXT]})
    try:
        granted(exchange(words.encode() + b"\n", SECONDS))
    except (OSError, RefusedError) as why:
        print(f"no key: {why}", file=sys.stderr)


def prolog() -> None:
    """Register a job that has GPUs."""
    bring_key()
    extra: dict[str, object] = {}
    for field, names in (("share", SHARES), ("power", POWERS), ("planned_power", (PLANNED_POWER,))):
        for name in names:
            if name in os.environ:
                extra[field] = os.environ[name][:MOST_TEXT]
    roles = os.environ.get(ROLES, "")
    if roles and len(encode(roles)) <= MOST_ROLES + 2:  # slurmctld's; a user's own could make the request too long
        extra["roles"] = roles
    if os.environ.get("SLURM_JOB_SLUID"):
        extra["sluid"] = os.environ["SLURM_JOB_SLUID"]
    for field, name in (("restarts", "SLURM_JOB_RESTART_COUNT"), ("begun", "SLURM_JOB_START_TIME")):
        if os.environ.get(name):
            extra[field] = number(name)
    if numbers("SLURM_JOB_GPUS"):
        answer = ask(
            do="prolog",
            job=number("SLURM_JOB_ID"),
            uid=number("SLURM_JOB_UID"),
            user=os.environ.get("SLURM_JOB_USER", ""),
            account=os.environ.get("SLURM_JOB_ACCOUNT", ""),
            partition=os.environ.get("SLURM_JOB_PARTITION", ""),
            gpus=numbers("SLURM_JOB_GPUS"),
            split=pairs("SLUICE_GPU_SHARDS"),
            **extra,
        )
        if "preflight" in answer and (several_nodes() or answer.get("alone")):
            preflight(answer["preflight"])
    else:
        announce()


def preflight(seconds: int) -> None:
    """Wait so long for the tests of the job's nodes. Raises RefusedError where this node is at fault and drained.

    A failure of the tests themselves is none of the node: the job starts without them.
    """
    words = {"do": "preflight", "job": number("SLURM_JOB_ID"), "alone": not several_nodes()}
    try:
        line = exchange(encode(words).encode() + b"\n", seconds)
        fault = granted(line).get("fault")
    except (OSError, RefusedError, AttributeError) as why:
        print(f"no preflight: {why}", file=sys.stderr)
        return
    if fault is not None:
        raise RefusedError(str(fault))


def epilog() -> None:
    """End what a job left, and take back its GPUs. A controller knows that it ended, so the notice is removed.

    A slurmctld with which no node has registered yet names no GPUs: it has not loaded the plugins of GRES.
    """
    job = number("SLURM_JOB_ID")
    try:  # noqa: SIM105 - contextlib and pathlib take longer to load than all of this
        os.unlink(f"{ENDED}/{job}")  # noqa: PTH108
    except OSError:  # it was no batch job, another node has its script, the agent was faster
        pass
    if numbers("SLURM_JOB_GPUS") or os.access(f"{RECORDS}/{job}.json", os.F_OK):
        unclean = ask(do="epilog", job=job)["unclean"]
        if unclean:
            raise RefusedError("; ".join(unclean))


def task_init() -> None:
    """Tell the SPANK plugin where the job's limits are, and the agent which devices the task can open.

    The task's device cgroup holds root, too; unlike the task prolog, this runs nothing of the user's.
    """
    shards = number("SLUICE_SHARDS") if os.environ.get("SLUICE_SHARDS") else 0
    devices = ask(do="devices")
    extra: dict[str, object] = {"nics": open_nics(devices)} if "variables" in devices else {}
    if os.environ.get("SLUICE_SAVED") == "1":
        extra["saved"] = True
    answer = ask(
        do="limit",
        job=number("SLUICE_JOB"),
        uid=number("SLUICE_UID"),
        whole=os.environ.get("SLUICE_STEP") == "whole",
        gpus=numbers("SLUICE_GPUS"),
        shards=shards,
        open=[path for path in devices["files"] if opens(path)],
        **extra,
    )
    if answer["region"]:
        print("region", answer["region"])
    else:
        print("none saves" if answer.get("saves") else "none")


def checkpoint() -> None:
    """Save the job, or start what was saved of it: "resumed PID". Nothing is printed where there is nothing.

    CRIU runs this, too, when all processes are there, and again when they have their user's rights.
    """
    of_job = {"job": number("SLUICE_JOB"), "uid": number("SLUICE_UID"), "restarts": number("SLUICE_RESTARTS")}
    stage = os.environ.get("CRTOOLS_SCRIPT_ACTION")
    if stage is not None:
        if stage in ("post-restore", "pre-resume"):
            look_at_restored(stage == "pre-resume", of_job)
    elif sys.argv[1:] == ["save"]:
        ask(do="save", init=number("SLUICE_INIT"), **of_job)
    else:
        resume(of_job)


def look_at_restored(rights: bool, of_job: dict[str, int]) -> None:
    """What is not known to be the job's does not run."""
    init = number("CRTOOLS_INIT_PID")
    try:
        ask(do="restored", init=init, rights=rights, **of_job)
    except BaseException:
        try:  # noqa: SIM105 - as in epilog
            os.kill(init, 9)
        except ProcessLookupError:
            pass
        if rights:  # CRIU would wait for threads of it that have ended
            os.kill(os.getppid(), 9)
        raise


def resume(of_job: dict[str, int]) -> None:
    """Start what was saved of the job, where there is anything."""
    answer = ask(do="resume", **of_job)
    if answer.get("again"):
        raise AgainError
    if not answer["words"]:
        return
    words = [*answer["words"], "--action-script", sys.argv[0]]
    variables = {name: os.environ[name] for name in ("SLUICE_JOB", "SLUICE_UID", "SLUICE_RESTARTS")}
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", **variables}
    # sluice-launch reads standard output to its end: what a killed CRIU leaves must not have it.
    no_output = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
    started = os.posix_spawn(words[0], words, environment, file_actions=no_output)
    _, status = os.waitpid(started, 0)
    init = 0
    if status == 0:
        with open(answer["pid"], "rb") as file:  # noqa: PTH123 - as above
            init = int(file.read())
    if ask(do="resumed", init=init, **of_job).get("again"):
        raise AgainError
    print("resumed", init)


def opens(path: str) -> bool:
    """Whether this process may open a device file; a device without a driver behind it counts, too."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError as error:
        return error.errno not in (errno.EPERM, errno.EACCES, errno.ENOENT)
    return True


def task_prolog() -> None:
    """Check what the task can open, and tell slurmstepd what to put into its environment."""
    if not numbers("SLURM_STEP_GPUS") and not numbers("SLURM_JOB_GPUS"):
        own = "/{}/".format(os.environ.get("SLURM_JOB_ID"))
        if own not in os.environ.get(CHECKPOINT_FILE, own):  # of the job that submitted this one
            print("unset", CHECKPOINT_FILE)
        forget(set_for_another_task(), {})
        return
    devices = ask(do="devices")
    said: dict[str, object] = {"open": [path for path in devices["files"] if opens(path)]}
    if "nics" in devices:
        said["nics"] = open_nics(devices)
    known = devices.get("variables", [])
    stale = set_for_another_task()
    configured = nccl_configured()
    set_by_user = [name for name in known if (name in os.environ or name in configured) and name not in stale]
    if set_by_user:
        said["own"] = set_by_user
    if os.environ.get("SLUICE_GPU_PROFILE"):
        said["profile"] = True
    if devices.get("roles") or ("roles" in devices and STEP_ROLE in os.environ):
        said["step"] = of_step()
    answer = ask(do="task", **said)
    export = answer["export"]
    folder = export.pop(PROFILE_FOLDER, None)
    if not several_nodes() and (interface := export.pop("GLOO_SOCKET_IFNAME", None)) is not None:
        words = export[SET].split(" ")  # else a step would take its user's own for Sluice's
        export[SET] = " ".join(word for word in words if word != f"GLOO_SOCKET_IFNAME={interface}")
    forget(stale, export)
    if PRELOAD in export:
        say_export(PRELOAD, preloaded(export[PRELOAD]))
    for name, value in export.items():
        # Sluice's own of a job that submitted this one, or of the batch script on another node, are another's.
        if name != PRELOAD and (name not in os.environ or name in stale or name.startswith("SLUICE_")):
            say_export(name, value)
    for name, value in answer.get("visible", {}).items():
        say_export(name, value)
    if folder is not None:
        try:  # noqa: SIM105 - as in epilog
            prepare_profile(folder, not_loaded(export))
        except OSError:  # a full disk ends the profile, and not the job
            pass
        if os.path.islink(folder):  # noqa: PTH114
            folder = os.readlink(folder)  # noqa: PTH115
        say_export(PROFILE_FOLDER, folder)  # a step inherits the batch script's


def of_step() -> dict[str, object]:
    """What this task knows of its step, for its role."""
    found: dict[str, object] = {"role": os.environ.get(STEP_ROLE, "")[:MOST_TEXT]}
    for field, name in (("local", "SLURM_LOCALID"), ("rank", "SLURM_PROCID"), ("node", "SLURM_NODEID")):
        found[field] = number(name) if name in os.environ else 0
    if "SLURM_STEP_TASKS_PER_NODE" in os.environ and len(os.environ["SLURM_STEP_TASKS_PER_NODE"]) < MOST_TASKS:
        found["tasks"] = os.environ["SLURM_STEP_TASKS_PER_NODE"]
    if "SLURM_STEP_NUM_TASKS" in os.environ:
        found["size"] = number("SLURM_STEP_NUM_TASKS")
    if "SLURM_STEP_TASKS_PER_NODE" in os.environ:  # SLURM_STEP_GPUS are the task's own in Slurm 22.05, numbered from 0
        found["gpus"] = number("SLURM_GPUS_ON_NODE") if "SLURM_GPUS_ON_NODE" in os.environ else 0
        found["bound"] = "gpu:" in os.environ.get("SLURMD_TRES_BIND", "")
    found["visible"] = {name: os.environ[name] for name in VISIBLE if 0 < len(os.environ.get(name, "")) <= MOST_VISIBLE}
    return found


def set_for_another_task() -> list[str]:
    """What Sluice set for libraries in a task from which this one has its environment, and nobody has changed."""
    words = os.environ.get(SET, "").split(" ")
    return [name for name, value in os.environ.items() if f"{name}={value}" in words]


def forget(names: list[str], export: dict[str, str]) -> None:
    """Remove what this task has inherited and is not set for it."""
    roles = [name for name in os.environ if name.startswith(OF_ROLES)]
    for name in (*names, *OF_GPUS, *roles, SET):
        if name in os.environ and name not in export:
            print("unset", name, flush=True)


def open_nics(devices: dict[str, Any]) -> list[str]:  # type: ignore[name-defined]  # noqa: F821 - as above
    """The RDMA interfaces that this process may open."""
    return [name for name, path in devices["nics"].items() if opens(path)]


def several_nodes() -> bool:
    """Whether the job has other nodes, which reach this one by its network."""
    return os.environ.get("SLURM_JOB_NUM_NODES", "1") != "1" or "SLURM_HET_SIZE" in os.environ


def nccl_configured() -> list[str]:
    """What is set for NCCL in files of the site's or the user's, which an environment variable would override."""
    found = ["NCCL_TOPO_FILE"] if os.access(VIRTUAL_TOPOLOGY, os.R_OK) else []
    for path in ("/etc/nccl.conf", os.environ.get("NCCL_CONF_FILE") or home() + "/.nccl.conf"):
        try:
            with open(path, "rb") as file:  # noqa: PTH123 - pathlib takes longer to load than all of this
                lines = file.read(MOST_CONF).decode(errors="replace").splitlines()
        except OSError:
            continue
        found += [line.partition("=")[0].strip() for line in lines if "=" in line and not line.startswith("#")]
    return found


def home() -> str:
    """The user's home, also where the environment does not say, as with --export=NONE."""
    if "HOME" in os.environ:
        return os.environ["HOME"]
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return ""


def say_export(name: str, value: str) -> None:
    """To slurmstepd; a path of any bytes."""
    sys.stdout.buffer.write(os.fsencode(f"export {name}={value}\n"))


def preloaded(library: str) -> str:
    """What the user preloads, and behind it this library."""
    own = os.environ.get(PRELOAD, "").replace(":", " ").split()
    return ":".join(own if library in own else [*own, library])


def not_loaded(export: dict[str, str]) -> str | None:
    """Why no program of this task loads the library of profiles: a variable of its user's own, or "", as nothing would.

    None: they load it.
    """
    loaders = [name for name in LOADERS if name in export]
    if PRELOAD in export or any(export[name] in os.environ.get(name, export[name]).split(":") for name in loaders):
        return None
    return loaders[0] if loaders else ""


def prepare_profile(folder: str, why_not: str | None) -> None:
    """The first task of a step makes its folder, and starts the profile that its user asked for. Raises OSError.

    Such a profile is next to the job's output, where it stays when the job has ended, if that is a folder of its user.
    `why_not`: as `not_loaded` says; the collector reads it.
    """
    asked = os.environ.get("SLUICE_GPU_PROFILE", "")[:MOST_TEXT]
    job, step = folder.split("/")[-2:]
    next_to_output = f"{os.getcwd()}/sluice-profile-{job}"  # noqa: PTH109
    target = f"{next_to_output}/{os.environ.get('SLURMD_NODENAME', os.uname().nodename)}.{step}"
    try:
        if asked.isdecimal() and "\n" not in target and is_own_folder(next_to_output) and is_own_folder(target):
            os.symlink(target, folder)
        else:
            os.mkdir(folder, 0o700)  # noqa: PTH102
    except FileExistsError:
        return
    if why_not is not None:
        write(f"{folder}/injected", why_not.encode())
    if asked.isdecimal():
        write(f"{folder}/control", control(int(asked), time.time_ns() // 10**8))  # as sluice/profile/collect.py


def is_own_folder(path: str) -> bool:
    """Make a folder, unless another task or node has; false: it cannot be, or another user has put something there."""
    try:
        os.mkdir(path, 0o700)  # noqa: PTH102
    except FileExistsError:
        pass
    except OSError:
        return False
    found = os.lstat(path)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def control(seconds: int, number: int) -> bytes:
    """Of native/include/sluice/profile.h: a profile of all kinds of events, so long from each process's own begin."""
    fields = ((seconds & 0xFFFFFFFF, 4), (PROFILE_ALL, 4), (0, 8), (0, 4), (number & 0xFFFFFFFF, 4), (0, 8))
    return b"SLUPCTL1" + b"".join([value.to_bytes(size, "little") for value, size in fields]) + bytes(24)


def write(path: str, content: bytes) -> None:
    """A file that is there whole, or not at all. Raises OSError."""
    fresh = f"{path}.{os.getpid()}"
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(descriptor, content)
    finally:
        os.close(descriptor)
    os.rename(fresh, path)  # noqa: PTH104


def health() -> int:
    """Check GPUs and node; the agent acts on findings, and Slurm on nothing that is printed here."""
    report = ask(do="health")["report"]
    if report is None:
        print("OK: health checks are switched off")
        return 0
    faults = report["faults"]
    unsure = [gpu["uuid"] for gpu in report["gpus"] if "gpu_lost" in gpu["unknown"]]
    for fault in faults:
        where = ",".join([str(one) for one in fault["numbers"]])
        print(f"{fault['severity'].upper()}: {fault['check']}{' GPU ' + where if where else ''}: {fault['text']}")
    ranks = [2 if fault["severity"] in ("critical", "fatal") else fault["severity"] == "warning" for fault in faults]
    code = max([int(rank) for rank in ranks], default=0) or (3 if unsure else 0)
    if unsure:
        print(f"UNKNOWN: no reading for {', '.join(unsure)}")
    elif not faults:
        print(f"OK: {len(report['gpus'])} GPUs")
    return code


def main() -> int:
    """Run what the name says."""
    name = os.path.basename(sys.argv[0])  # noqa: PTH119 - pathlib takes longer to load than all of this
    if name == "sluice-health":
        try:
            return health()
        except (RefusedError, KeyError, TypeError) as why:
            print(f"UNKNOWN: {why}")
            return 3
    try:
        {
            "sluice-prolog": prolog,
            "sluice-epilog": epilog,
            "sluice-task-init": task_init,
            "sluice-task-prolog": task_prolog,
            "sluice-checkpoint": checkpoint,
        }[name]()
    except AgainError:
        return AGAIN
    except RefusedError as why:
        # The task's helper has one pipe for both; slurmd logs standard error of the others.
        print(f"{name}: {why}", file=sys.stdout if name == "sluice-task-init" else sys.stderr)
        if why.jobs_own and name == "sluice-task-prolog":
            print(f"print {name}: {why}")  # slurmstepd writes it to the task's output
        if why.jobs_own and name == "sluice-prolog":
            return 0  # the agent starts none of its tasks and has it held for its user; Slurm would drain the node
        return JOBS_OWN_FAULT if why.jobs_own and name == "sluice-task-init" else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
