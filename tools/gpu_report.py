#!/usr/bin/env python3
"""The tests marked ``gpu`` on this machine's NVIDIA GPU, and a report of what held: ``make test-gpu``, as root.

No Slurm; ten minutes at most. build/gpu-report.json and build/gpu-report.txt are written whatever the tests say.
Exit 0: all that ran held. 1: something did not, or time ran out. 2: nothing could be tested.
``--leave-settings``: without the test that puts the GPU's modes and clocks back.
``--simulate PLATFORM``: on the simulated driver instead of a GPU, which tests this program.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 600
GRACE_SECONDS = 20  # for a test that is interrupted
TESTS = (
    "tests/unit/gres_probe/test_probe_real.py",
    "tests/unit/limit/test_limit_hardware.py",
    "tests/unit/profile/test_profile_hardware.py",
    "tests/unit/prolog_epilog/test_metrics_hardware.py",
    "tests/unit/prolog_epilog/test_preflight_hardware.py",
    "tests/unit/prolog_epilog/test_nccl_hardware.py",
    "tests/unit/prolog_epilog/test_checkpoint_hardware.py",
    "tests/unit/prolog_epilog/test_rungs_hardware.py",
)
SETTINGS = "tests/unit/prolog_epilog/test_rungs_hardware.py::test_modes_are_put_back_and_layouts_read"
HELD, NOT_HELD, SKIPPED = "held", "not held", "skipped"
ABOUT = """
import json, pynvml as n
n.nvmlInit()
text = lambda it: it.decode() if isinstance(it, bytes) else it
def about(gpu):
    return {"name": text(n.nvmlDeviceGetName(gpu)), "memory_mib": n.nvmlDeviceGetMemoryInfo(gpu).total >> 20}
print(json.dumps({
    "gpus": [about(n.nvmlDeviceGetHandleByIndex(i)) for i in range(n.nvmlDeviceGetCount())],
    "driver": text(n.nvmlSystemGetDriverVersion()),
    "cuda": n.nvmlSystemGetCudaDriverVersion(),
}))
"""


def machine(environment: dict[str, str]) -> dict[str, Any]:
    """What the tests ran on; no GPUs, and why, where the driver does not answer. No names of hosts or people."""
    about: dict[str, Any] = {"gpus": [], "driver": "", "cuda": 0}
    try:
        done = subprocess.run(
            [sys.executable, "-c", ABOUT], env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        if done.returncode == 0:
            about |= json.loads(done.stdout)
        else:
            about["why"] = (done.stderr.strip().splitlines() or ["no answer"])[-1][:300]
    except subprocess.TimeoutExpired:
        about["why"] = "the driver did not answer within 60 s"
    system = platform.freedesktop_os_release().get("PRETTY_NAME", "")
    return about | {"kernel": platform.release(), "system": system, "python": platform.python_version()}


def checks(report: Path) -> list[dict[str, Any]]:
    """One for each test, of what pytest wrote; nothing where it wrote nothing that can be read."""
    try:
        cases = list(ElementTree.parse(report).getroot().iter("testcase"))  # noqa: S314: pytest's own
    except (OSError, ElementTree.ParseError):
        return []
    found = []
    for case in cases:
        bad = case.find("failure") if case.find("failure") is not None else case.find("error")
        skip = case.find("skipped")
        reason = bad if bad is not None else skip
        found.append(
            {
                "module": case.get("classname", "").rpartition(".")[2].removeprefix("test_"),
                "check": case.get("name", "").removeprefix("test_"),
                "outcome": NOT_HELD if bad is not None else SKIPPED if skip is not None else HELD,
                "reason": "" if reason is None else re.sub(r"\s+", " ", reason.get("message", ""))[:500],
                "seconds": round(float(case.get("time", "0")), 1),
                "figures": {one.get("name", ""): one.get("value", "") for one in case.iter("property")},
            }
        )
    return found


def run_tests(environment: dict[str, str], report: Path, seconds: float, *without: str) -> bool:
    """Run them; True: time ran out. The test that runs then is interrupted, and what ran before it is in the report."""
    words = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "--timeout", "180", f"--junitxml={report}", *TESTS]
    words += [word for test in without for word in ("--deselect", test)]
    with subprocess.Popen(words, cwd=ROOT, env=environment) as process:
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
            return True
    return False


def table(report: dict[str, Any]) -> str:
    """The report for people."""
    about, found = report["machine"], report["checks"]
    kinds = Counter(f"{gpu['name']} ({gpu['memory_mib']} MiB)" for gpu in about["gpus"])
    gpus = ", ".join(f"{count} x {kind}" for kind, count in kinds.items()) or "none"
    driver = f"{about['driver']}, CUDA {about['cuda'] // 1000}.{about['cuda'] % 1000 // 10}"
    lines = [
        f"GPUs: {gpus}" + (" - simulated" if report["simulated"] else ""),
        f"Driver: {driver if about['driver'] else about.get('why', 'none')}",
        f"System: {about['system']}, Linux {about['kernel']}",
        f"Sluice: {report['commit']}",
        "",
    ]
    wide = max((len(one["module"]) + len(one["check"]) + 2 for one in found), default=0)
    for one in found:
        place = f"{one['module']}: {one['check']}".ljust(wide)
        figures = " ".join(f"{name}={value}" for name, value in one["figures"].items())
        lines.append(f"{place}  {one['outcome']:8}  {figures}  {one['reason'][:200]}".rstrip())
    if report["time_ran_out"]:
        lines.append(f"Time ran out after {SECONDS} s: what is missing above did not run.")
    sums = ", ".join(f"{sum(one['outcome'] == word for one in found)} {word}" for word in (HELD, NOT_HELD, SKIPPED))
    return "\n".join([*lines, "", sums, ""])


def status(report: dict[str, Any]) -> int:
    """The exit status that a report means."""
    outcomes = {one["outcome"] for one in report["checks"]}
    if NOT_HELD in outcomes or report["time_ran_out"]:
        return 1
    return 0 if HELD in outcomes else 2


def simulated(name: str, folder: Path) -> dict[str, str]:
    """What programs need to run on a simulated node."""
    sys.path.insert(0, str(ROOT))
    from gpu_sim import library_dir, load_platform, write_node_state

    write_node_state(folder, load_platform(name), "n1")
    state = {"SLUICE_SIM_STATE": str(folder / "state"), "LD_LIBRARY_PATH": str(library_dir())}
    return {**os.environ, **state, "SLUICE_TEST_GPU": "simulated"}


def main() -> int:
    """Run the tests and write the report; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--simulate", metavar="PLATFORM", help="the simulated driver instead of a GPU")
    parser.add_argument("--leave-settings", action="store_true", help="do not put modes and clocks back")
    parser.add_argument("--output", type=Path, default=ROOT / "build", help="folder for the reports (build)")
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        environment = simulated(arguments.simulate, Path(folder, "node")) if arguments.simulate else dict(os.environ)
        about = machine(environment)
        xml = Path(folder, "report.xml")
        without = [SETTINGS] if arguments.leave_settings else []
        left = SECONDS - GRACE_SECONDS - (time.monotonic() - began)
        late = bool(about["gpus"]) and run_tests(environment, xml, left, *without)
        found = checks(xml)
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True, timeout=30, check=False).stdout.strip()
    report = {
        "schema": 1,
        "day": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": commit,
        "simulated": bool(arguments.simulate),
        "machine": about,
        "time_ran_out": late,
        "checks": found,
    }
    arguments.output.mkdir(parents=True, exist_ok=True)
    text = table(report)
    (arguments.output / "gpu-report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (arguments.output / "gpu-report.txt").write_text(text, encoding="utf-8")
    print(text)
    if status(report) == 2:
        print("Nothing was tested: make test-gpu needs an NVIDIA GPU, its driver, and root.", file=sys.stderr)
    return status(report)


if __name__ == "__main__":
    sys.exit(main())
