"""The nodes: their state, GRES, isolation, drivers, and the programs that run around a job."""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from gres_probe.doctor import ebpf
from gres_probe.doctor.check import CannotCheckError, Outcome, SiteView, check, fail, ok, skip, warn
from gres_probe.lint import Severity, Site, lint
from gres_probe.nic_groups import NICS_FILE
from policy.node import FILE_NAME as NODE_POLICY
from policy.node import NodePolicyFile
from sluice.base.hostlist import fold
from sluice.slurm.slurm_conf import ConfigFile

_SLURM_COMMANDS = re.compile(
    r"(?<![\w/-])(?:/[\w/.-]*/)?(squeue|sinfo|scontrol|sacct|sacctmgr|sbatch|srun|scancel)(?![\w.-])"
)
_PROGRAMS = ("Prolog", "Epilog", "HealthCheckProgram", "TaskProlog", "TaskEpilog", "PrologSlurmctld", "EpilogSlurmctld")
_MOST_BYTES = 1 << 20


@check("nodes", "nodes can run jobs")
def node_states(site: SiteView) -> Iterator[Outcome]:
    """Nodes that are down, drained or refused, and why."""
    nodes = site.nodes
    groups: dict[tuple[str, str], list[str]] = {}
    for node in nodes:
        if not node.available:
            state = "+".join([node.state, *sorted(node.flags)])
            groups.setdefault((state, node.reason), []).append(node.name)
    for (state, reason), names in sorted(groups.items(), key=lambda item: -len(item[1]))[:10]:
        say = fail if "invalid_reg" in state or re.search(r"gres/\S+ count", reason) else warn
        yield say(f"{fold(names)}: {state}{f': {reason}' if reason else ''}", "see the node's slurmd log; sluice lint")
    usable = sum(node.available for node in nodes)
    if usable == len(nodes):
        yield ok(f"{usable} of {len(nodes)} nodes available")
    elif not usable:
        yield fail(f"none of {len(nodes)} nodes is available", "see the reasons above")


@check("gres", "GRES configuration")
def gres(site: SiteView) -> Iterator[Outcome]:
    """Everything that `sluice lint` finds, in short."""
    inventories = {}
    if site.inventory_dir is not None and site.inventory_dir.is_dir():
        from gres_probe.collect import load_inventories

        inventories = load_inventories(site.inventory_dir).inventories
    findings = lint(
        Site(
            site.slurm,
            gres=site.config_file("gres.conf"),
            inventories=inventories,
            version=site.version,
            nics=site.folder / NICS_FILE,
        )
    )
    for finding in findings[:8]:
        concerned = f" ({fold(finding.nodes)})" if finding.nodes else ""
        say = warn if finding.rule.severity is Severity.WARNING else fail
        title = f"{finding.rule.code}: {finding.rule.title}"
        yield say(f"{finding.place}: {title}: {finding.what}{concerned}", finding.rule.remedy)
    if len(findings) > 8:
        yield warn(f"and {len(findings) - 8} more", "sluice lint lists them all")
    types = site.slurm.words("GresTypes")
    gpus = [node for node in site.slurm.nodes.values() if "gpu" in node.text("gres")]
    if not gpus:
        yield warn("no node has GPUs in slurm.conf", "find them: sluice probe; write them: sluice gres write")
    elif not findings:
        yield ok(f"{len(gpus)} nodes with GPUs, GresTypes={','.join(types)}")


_MOST_DEVICES = 22  # tried: Linux 6.18, programs as 22.05.8 makes them


@check("cgroup", "jobs are confined to their devices, cores and memory")
def cgroup(site: SiteView) -> Iterator[Outcome]:
    """The cgroup plugins, and what cgroup.conf constrains."""
    problems = 0
    track, task = site.option("ProctrackType"), site.option("TaskPlugin")
    if "cgroup" not in track:
        problems += 1
        yield fail(
            f"ProctrackType={track or 'unset'}: processes can escape their job", "set ProctrackType=proctrack/cgroup"
        )
    if "cgroup" not in task:
        problems += 1
        yield fail(f"TaskPlugin={task or 'unset'}: jobs can open every GPU", "set TaskPlugin=task/affinity,task/cgroup")
    conf = site.config_file("cgroup.conf")
    for key, severe, meaning in (
        ("ConstrainDevices", True, "jobs can open every GPU"),
        ("ConstrainRAMSpace", False, "a job can take the node's memory"),
        ("ConstrainCores", False, "a job can use every core"),
    ):
        if _setting(conf, key).lower() not in ("yes", "true", "1"):
            problems += 1
            yield (fail if severe else warn)(f"cgroup.conf: {key} is off: {meaning}", f"set {key}=yes in cgroup.conf")
    plugin = _setting(conf, "CgroupPlugin") or "autodetect"
    unified = site.host("/sys/fs/cgroup/cgroup.controllers").exists()
    if unified and plugin != "cgroup/v1":
        found = [*_hybrid(site), *_no_ebpf(site), *_many_devices(site)]
        problems += len(found)
        yield from found
    if plugin == "cgroup/v1" and unified:
        yield warn("CgroupPlugin=cgroup/v1, this host has cgroup v2", "set CgroupPlugin=autodetect")
    elif plugin == "cgroup/v2" and not unified:
        yield fail("CgroupPlugin=cgroup/v2, this host has cgroup v1", "set CgroupPlugin=autodetect")
    elif not problems:
        yield ok(f"{track}, {task}, {plugin}")


@check("rdma", "a job's part of an RDMA adapter can be bounded")
def rdma(site: SiteView) -> Iterator[Outcome]:
    """The kernel's rdma controller, which `enforcement.rdma` of the policy needs; where this host has adapters."""
    folder = site.host("/sys/class/infiniband")
    adapters = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if not adapters:
        yield skip("this host has no RDMA adapter")
        return
    controllers = site.host("/sys/fs/cgroup/cgroup.controllers")
    if not controllers.exists():
        yield warn(
            "cgroup v1: what jobs hold of RDMA adapters is not bounded",
            "boot with systemd.unified_cgroup_hierarchy=1; enforcement.rdma has no effect until then",
        )
    elif "rdma" not in controllers.read_text().split():
        yield warn(
            "no rdma controller in this kernel: what jobs hold of RDMA adapters is not bounded",
            "use a kernel with CONFIG_CGROUP_RDMA; enforcement.rdma has no effect until then",
        )
    else:
        yield ok(f"rdma controller, {len(adapters)} adapters")


def _hybrid(site: SiteView) -> Iterator[Outcome]:
    """Slurm's cgroup/v2 does not start where the kernel also lists cgroups of version 1."""
    path = site.host("/proc/self/cgroup")
    lines = path.read_text().splitlines() if path.exists() else []
    others = sorted(line.split(":")[1] for line in lines if not line.startswith("0:"))
    if others:
        yield fail(
            f"hybrid cgroups: the kernel also has {', '.join(others)} of version 1, and slurmd refuses cgroup/v2",
            "boot with cgroup_no_v1=all systemd.unified_cgroup_hierarchy=1, or set CgroupPlugin=cgroup/v1 without it",
        )


def _no_ebpf(site: SiteView) -> Iterator[Outcome]:
    """Slurm 22.05 logs that its program for a job's devices was refused, and runs the job with all devices open."""
    if site.root != Path("/") or not site.privileged:
        return
    error = ebpf.refused()
    if error:
        yield fail(
            f"no eBPF for devices ({os.strerror(error)}): Slurm 22.05 runs jobs that can open every GPU",
            "allow bpf(2) and CAP_BPF, CAP_NET_ADMIN here (systemd-nspawn: --system-call-filter=bpf --capability=all);"
            " the kernel needs CONFIG_CGROUP_BPF",
        )


def _many_devices(site: SiteView) -> Iterator[Outcome]:
    """slurmstepd before 23.02.4 gives the verifier of its program for devices a log of 8 KiB, which overflows."""
    if site.version >= (23, 2, 4):
        return
    for node in site.slurm.nodes.values():
        counts = re.findall(r"\bgpu(?::[^,:()]+)*:(\d+)", node.text("gres"))
        if (devices := sum(map(int, counts))) > _MOST_DEVICES:
            yield fail(
                f"{node.name}: {devices} GPU devices: with cgroup v2, this Slurm loads no program for more than "
                f"{_MOST_DEVICES}, and runs jobs that can open every GPU",
                "use Slurm 23.02.4 or later there, cgroup v1, or layouts with fewer instances or partitions",
            )
            return


def _setting(conf: ConfigFile | None, key: str) -> str:
    for line in reversed(conf.lines if conf else []):
        value = line.get(key.lower())
        if value is not None:
            return value.text
    return ""


@check("drivers", "drivers on this host")
def drivers(site: SiteView) -> Iterator[Outcome]:
    """What `sluice probe` sees here."""
    from gres_probe.probe import probe_node

    if site.root != Path("/"):
        raise CannotCheckError("the root folder is not this host's")
    inventory = probe_node(timeout=8.0)
    for problem in inventory.problems:
        which = "" if problem.index is None else f" {problem.index}"
        yield fail(f"{problem.vendor} GPU{which}: {problem.what}", problem.remedy or "see: sluice probe")
    for gpu in inventory.gpus:
        if gpu.health not in ("ok", "unknown"):
            reasons = "; ".join(gpu.health_reasons)
            yield warn(f"{gpu.vendor} GPU {gpu.index} is {gpu.health}: {reasons}", "see: sluice probe")
    seen = Counter(f"{gpu.vendor} {gpu.driver_version}" for gpu in inventory.gpus)
    if seen:
        yield ok(", ".join(f"{count} GPUs on driver {name}" for name, count in seen.items()))
    elif not inventory.problems:
        yield skip("no GPU on this host", "run sluice doctor on a GPU node as well")


@check("prolog", "prolog, epilog and health check")
def prolog(site: SiteView) -> Iterator[Outcome]:
    """The programs are there, safe to run as root, and do not call Slurm; a hanging one ends."""
    found = 0
    for option in _PROGRAMS:
        for pattern in filter(None, re.split(r"[:,]", site.option(option) or site.option(f"{option}[0]"))):
            found += 1
            yield from _check_program(site, option, pattern)
    if not site.option("Prolog") and not site.option("Prolog[0]"):
        yield warn("no Prolog: GPUs are not checked before jobs get them", "see docs/doctor.md, prolog")
    flags = site.option("PrologFlags").lower()
    if "contain" not in flags and "alloc" not in flags:
        yield warn("PrologFlags lacks Alloc: Prolog runs only at the first step", "set PrologFlags=Alloc,Contain")
    yield from _prolog_time(site)
    interval = re.match(r"\d+", site.option("HealthCheckInterval", "0"))
    if not site.option("HealthCheckProgram") or not interval or int(interval[0]) == 0:
        yield warn("no HealthCheckProgram: broken GPUs keep getting jobs", "set it, and HealthCheckInterval=300")
    if found:
        yield ok(f"{found} programs")


_UNLIMITED = ("", "0", "65534")


def _prolog_time(site: SiteView) -> Iterator[Outcome]:
    """slurmd ends a prolog that takes longer than it may, and drains the node."""
    options = ("PrologTimeout", "PrologEpilogTimeout")  # the former since Slurm 25.05; else the latter holds
    option = next((one for one in options if site.option(one) not in _UNLIMITED), "")
    if not option:
        yield warn("PrologEpilogTimeout is not set: a hanging Prolog blocks its node", "set PrologEpilogTimeout=120")
        return
    seconds, policy = re.match(r"\d+", site.option(option)), NodePolicyFile(site.folder / NODE_POLICY)
    preflight = policy.current().preflight
    if policy.problem is not None:
        yield warn(f"preflight: {policy.problem.what}", policy.problem.remedy)
    elif seconds is not None and int(seconds[0]) < preflight.longest_s:
        bound = f"preflight.bound of the policy is {preflight.bound_s} s"
        yield fail(
            f"{option}={seconds[0]} is shorter than a job's preflight may take, {preflight.longest_s} s ({bound}): "
            "slurmd drains nodes whose prolog takes longer",
            f"set {option}=120, or a shorter bound",
        )


def _check_program(site: SiteView, option: str, pattern: str) -> Iterator[Outcome]:
    base = Path(pattern if pattern.startswith("/") else site.folder / pattern)
    paths = sorted(site.root.glob(str(base).lstrip("/"))) if "*" in pattern else [site.host(base)]
    for path in paths or [site.host(base)]:
        if not path.exists():
            yield warn(f"{option}={pattern} is not on this host", "install it on every node")
            continue
        mode = path.stat().st_mode
        if path.is_file() and not mode & stat.S_IXUSR:
            yield fail(f"{option}: {path} cannot be executed", f"chmod +x {path}")
        if mode & (stat.S_IWOTH | stat.S_IWGRP) and not option.startswith("Task"):
            yield fail(f"{option}: {path} can be written by others, and root runs it", f"chmod go-w {path}")
        if path.is_file() and os.access(path, os.R_OK) and not option.startswith("Task"):
            with path.open("rb") as file:
                text = file.read(_MOST_BYTES).decode(errors="replace")
            code = "\n".join(line.split("#")[0] for line in text.splitlines()) if text.startswith("#!") else ""
            called = _SLURM_COMMANDS.search(code)
            if called and option in ("Prolog", "Epilog"):
                yield warn(
                    f"{option}: {path} calls {called[1]}: with many nodes this stalls slurmctld",
                    "use the SLURM_* variables that Slurm sets",
                )
