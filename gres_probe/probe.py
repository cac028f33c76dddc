"""Reading the GPUs of this node: every vendor in its own child process, then what joins them.

A vendor's driver may hang forever, even in a sleep that no signal ends, and its library may crash. Neither may affect
the other vendors' answers, so each is asked in a child that is given up after a timeout.
"""

from __future__ import annotations

import contextlib
import os
import pickle  # only between this process and children that it forked
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gres_probe import rdma
from gres_probe.children import Output, read_all
from gres_probe.inventory import Gpu, Inventory, Link, OpenClDevice, Problem, check_gpu
from gres_probe.machine import Machine, PciFunction
from gres_probe.topology import link_matrix, pci_devices, rdma_nics
from gres_probe.vendor_names import vendor_names
from gres_probe.vendors import Findings, VendorSpec, vendor
from sluice.base.errors import SluiceError
from sluice.base.text import one_line

DEFAULT_TIMEOUT = 10.0
_MOST_OUTPUT = 64 << 20
_REAP_SECONDS = 0.2  # how long a killed child may take to end; one in an uninterruptible sleep does not end
_PASSED_THROUGH = frozenset({"vfio-pci", "pciback"})  # drivers that give a GPU to a virtual machine
_CONSOLES = frozenset({"ast", "mgag200", "hibmc-drm", "bochs-drm", "cirrus"})  # of displays that compute nothing


def probe_node(
    *,
    node: str | None = None,
    vendors: Iterable[str] | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    sys_root: Path = Path("/sys"),
    proc_root: Path = Path("/proc"),
    dev_root: Path | None = Path("/dev"),
) -> Inventory:
    """The GPUs of this node and what joins them.

    `node` is the name to give it, default SLURMD_NODENAME or the short host name; `vendors` are names of
    `gres_probe.vendors`, default all; `timeout` in seconds is for all vendors together. The roots say where the
    kernel's files are; with `dev_root` None device files are not checked. A GPU, driver or library that cannot be
    read becomes an entry of `Inventory.problems`. Raises UsageError for an unknown vendor, SluiceError where no process
    can be started. Forks: call it from a process without other threads.
    """
    machine = Machine(sys_root, proc_root, dev_root)
    specs = [vendor(name) for name in sorted(set(vendors if vendors is not None else vendor_names()))]
    deadline = time.monotonic() + timeout
    # Where PCI is visible, a vendor without devices in it needs no process that loads its library.
    hardware = {spec.name: _hardware(spec, machine) for spec in specs}
    asked = [spec for spec in specs if hardware[spec.name] or not machine.sees_pci]
    children: list[_Child] = []
    try:
        for spec in asked:
            children.append(_Child.start(spec, machine))
        inventory = _describe(machine, node)
        answers = read_all([child.output for child in children], deadline=deadline, limit=_MOST_OUTPUT)
    except BaseException:  # an interrupt must not leave processes behind that wait for a driver
        for child in children:
            _end(child.pid)
        raise
    links: dict[str, dict[tuple[int, int], Link]] = {}
    for child in children:
        shown = hardware[child.spec.name]
        try:
            findings = child.finish(answers[child.output], timeout)
            findings.problems += _unlisted(child.spec, findings, machine)
        except SluiceError as error:
            findings = Findings()
            if shown:
                count = f"{len(shown)} {child.spec.title} GPU{'s' * (len(shown) > 1)}"
                what = f"{count} ({', '.join(shown)}) cannot be read: {error.what}"
                findings.problems.append(Problem(child.spec.name, what, error.remedy))
        for gpu in findings.gpus:
            _complete(gpu, machine)
        findings.gpus = [gpu for gpu in findings.gpus if _usable(gpu, machine, findings.problems)]
        inventory.gpus += sorted(findings.gpus, key=lambda gpu: gpu.index)
        inventory.problems += findings.problems
        links[child.spec.name] = findings.links
    inventory.links = link_matrix(inventory.gpus, links, machine)
    ports = _asked(rdma.SPEC, machine, deadline).ports if machine.has_rdma() else {}
    inventory.nics = rdma_nics(inventory.gpus, machine, ports)
    inventory.pci = pci_devices(inventory.gpus, inventory.nics, machine)
    inventory.opencl = _by_opencl(inventory, machine, deadline)
    return inventory


def _asked(spec: VendorSpec, machine: Machine, deadline: float) -> Findings:
    """What is found beyond GPUs of vendors: nothing where no answer comes until the deadline, or within a second."""
    timeout = max(1.0, deadline - time.monotonic())
    child = _Child.start(spec, machine)
    try:
        answers = read_all([child.output], deadline=time.monotonic() + timeout, limit=_MOST_OUTPUT)
    except BaseException:
        _end(child.pid)
        raise
    try:
        return child.finish(answers[child.output], timeout)
    except SluiceError:
        return Findings()


def _by_opencl(inventory: Inventory, machine: Machine, deadline: float) -> list[OpenClDevice]:
    """GPUs that the kernel shows and no vendor's library has described, as far as OpenCL knows them."""
    described = {gpu.pci_address for gpu in inventory.gpus}
    others = _PASSED_THROUGH | _CONSOLES
    hidden = {function.address for function in machine.gpu_functions if function.driver not in others}
    if not hidden - described:
        return []
    from gres_probe import opencl  # rarely needed

    found = _asked(opencl.SPEC, machine, deadline).opencl
    return [device for device in found if device.pci_address not in described]


def _describe(machine: Machine, node: str | None) -> Inventory:
    """The node itself, still without GPUs."""
    layout = machine.cpu_layout()
    return Inventory(
        node=node or os.environ.get("SLURMD_NODENAME") or os.uname().nodename.partition(".")[0],
        sockets=layout.sockets,
        cores_per_socket=layout.cores_per_socket,
        threads_per_core=layout.threads_per_core,
        cpu_cores=layout.cpu_cores,
        memory_mib=machine.memory_mib(),
        processors=machine.processors(),
        probed_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    )


@dataclass(slots=True)
class _Child:
    """A process that asks one vendor's library and writes what it found to a pipe."""

    spec: VendorSpec
    pid: int
    output: int

    @classmethod
    def start(cls, spec: VendorSpec, machine: Machine) -> _Child:
        try:
            output, inlet = os.pipe()
            pid = os.fork()
        except OSError as error:
            what = f"no process to ask {spec.title}'s library: {error.strerror}"
            raise SluiceError(what, remedy="see the limits of processes and memory: ulimit -a") from error
        if pid == 0:
            try:
                _ask_vendor(spec, machine, inlet)
            finally:
                os._exit(1)
        os.close(inlet)
        return cls(spec, pid, output)

    def finish(self, output: Output, timeout: float) -> Findings:
        """What the child found, or that it hung or crashed. Raises SluiceError as `VendorSpec.probe` does."""
        os.close(self.output)
        if not output.ended:
            _end(self.pid)
            what = f"no answer from the {self.spec.title} driver within {timeout:g} s"
            remedy = "see dmesg; the driver may hang until a reboot, or be slow to start: raise --timeout"
            return Findings(problems=[Problem(self.spec.name, what, remedy)])
        _, status = os.waitpid(self.pid, 0)
        answer: Any = None
        with contextlib.suppress(Exception):  # an answer cut off by a crash
            answer = pickle.loads(output.data)  # noqa: S301 - see import
        if isinstance(answer, Findings):
            return answer
        if isinstance(answer, tuple):
            what, remedy = answer
            raise SluiceError(what, remedy=remedy)
        what = f"{self.spec.library} ended the process that asked it ({_how(status)})"
        return Findings(problems=[Problem(self.spec.name, what, "update the driver and its library; see dmesg")])


def _how(status: int) -> str:
    """How a process ended, from what waitpid says."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exit status {code}"
    with contextlib.suppress(ValueError):  # a real-time signal has no name
        return signal.Signals(-code).name
    return f"signal {-code}"


def _ask_vendor(spec: VendorSpec, machine: Machine, inlet: int) -> None:
    """In the child: ask the library, answer with findings or why there are none, and end."""
    os.setsid()
    for ending in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ending, signal.SIG_DFL)
    # Libraries print, and a child that stays must not hold a caller's pipes open.
    null = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(null, standard)
    for number in _open_descriptors():
        if number > 2 and number != inlet:
            with contextlib.suppress(OSError):
                os.close(number)
    answer: Findings | tuple[str, str]
    try:
        answer = spec.probe(machine)
    except SluiceError as error:
        answer = error.what, error.remedy
    except Exception as error:  # no error of a library's wrapper may affect the other vendors' answers
        what = f"{type(error).__name__}: {one_line(str(error))}"
        answer = Findings(problems=[Problem(spec.name, what, f"install the Python package that fits {spec.library}")])
    data = memoryview(pickle.dumps(answer))
    while data:
        data = data[os.write(inlet, data) :]
    os._exit(0)


def _open_descriptors() -> Iterable[int]:
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:  # a container without /proc
        return range(1024)


def _end(pid: int) -> None:
    """Kill a child and what it started; leave it to init if it sleeps uninterruptibly."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + _REAP_SECONDS
    while os.waitpid(pid, os.WNOHANG)[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.005)


def _gpus_on_pci(spec: VendorSpec, machine: Machine) -> list[PciFunction]:
    """The vendor's GPUs that the kernel shows and that are this node's to use."""
    return [
        function
        for function in machine.gpu_functions
        if function.vendor == spec.pci_vendor
        and function.driver not in _PASSED_THROUGH
        and function.address not in spec.integrated
    ]


def _hardware(spec: VendorSpec, machine: Machine) -> list[str]:
    """The vendor's devices that the kernel shows: PCI addresses, else device files where PCI is hidden."""
    seen = [function.address for function in _gpus_on_pci(spec, machine)]
    return seen or machine.matching_device_files(spec.device_pattern)


def _unlisted(spec: VendorSpec, findings: Findings, machine: Machine) -> list[Problem]:
    """A problem where the kernel shows GPUs that the driver did not report."""
    listed = {gpu.pci_address for gpu in findings.gpus}
    missing = [function for function in _gpus_on_pci(spec, machine) if function.address not in listed]
    reported = {problem.index for problem in findings.problems} - {gpu.index for gpu in findings.gpus}
    if None in reported or len(missing) <= len(reported):
        return []  # reported already, with the driver's own message
    if not missing:
        return []
    known = len(missing) + len(listed)
    what = f"the driver lists {len(listed)} of {known} GPUs, not: {', '.join(function.address for function in missing)}"
    if "SLURM_JOB_ID" in os.environ:
        remedy = "probe outside of jobs: a job sees only its own GPUs"
    else:
        drivers = ", ".join(sorted({function.driver or "none" for function in missing}))
        remedy = f"see dmesg; they may have failed, or have another kernel driver (now: {drivers})"
    return [Problem(spec.name, what, remedy)]


def _complete(gpu: Gpu, machine: Machine) -> None:
    """Fill in from the kernel what the vendor's driver did not report; impossible values are unknown."""
    if gpu.utilisation_percent is not None and not 0 <= gpu.utilisation_percent <= 100:
        gpu.utilisation_percent = None
    if gpu.memory_used_mib is not None and not 0 <= gpu.memory_used_mib <= gpu.memory_total_mib:
        gpu.memory_used_mib = None
    function = machine.pci_function(gpu.pci_address)
    if function is not None:
        if gpu.numa_node is None:
            gpu.numa_node = function.numa_node
        gpu.cores = gpu.cores or function.cores


def _usable(gpu: Gpu, machine: Machine, problems: list[Problem]) -> bool:
    """Whether the driver's answer about the GPU is valid and its device file is there; problems are reported.

    Partitions without their device files are removed and also reported.
    """

    def missing(files: Iterable[str], of: str) -> bool:
        lacking = [file for file in files if not machine.has_device_file(file)]
        if lacking:
            what = f"{of}: no device file {', '.join(lacking)}"
            problems.append(
                Problem(gpu.vendor, what, "load the driver's kernel module or let udev make the file", gpu.index)
            )
        return bool(lacking)

    try:
        check_gpu(gpu, "the driver's answer is not valid")
    except SluiceError as error:
        problems.append(Problem(gpu.vendor, error.what, "update the driver and its library", gpu.index))
        return False
    if missing([gpu.device_file], f"GPU {gpu.index}"):
        return False
    gpu.extra_device_files = [file for file in gpu.extra_device_files if machine.has_device_file(file)]
    gpu.partitions = [
        partition
        for partition in gpu.partitions
        if not missing(partition.device_files, f"GPU {gpu.index}, partition {partition.index}")
    ]
    return True
