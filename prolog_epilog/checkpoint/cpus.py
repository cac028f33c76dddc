"""Which instructions a node's CPUs have: a job that has looked once uses them to its end."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

_MOST_NAMED = 5
# Flags of x86 that are about the kernel, virtual machines, power and faults of the CPU: no program's instructions, and
# not the same on equal CPUs of other microcode.
_NOT_OF_PROGRAMS = re.compile(
    r"(?:amd_|arch_|cat_|cdp_|cqm|ept|hwp|ibpb|ibrs|intel_|mba|ssbd|stibp|svm|tpr_|virt_|vmx|vnmi|vpid)\w*"
    r"|acc_power|aperfmperf|arat|art|bhi_ctrl|bts|constant_tsc|cpb|cpuid|cpuid_fault|dtes64|dtherm|ds_cpl|epb|est|"
    r"extapic|extd_apicid|flexpriority|flush_l1d|hw_pstate|hypervisor|ida|mce|mca|md_clear|monitor|nonstop_tsc|"
    r"overflow_recov|pbe|pcid|pdcm|pebs|perfctr_\w+|pge|pln|proc_feedback|pti|pts|rdt_a|rep_good|rrsba_ctrl|sev\w*|sme|"
    r"smca|smx|split_lock_detect|ss|succor|tm|tm2|topoext|tsc_\w+|vme|x2apic|xtopology|xtpr"
)


@cache
def here() -> dict[str, Any]:
    """This node's, for JSON. Raises OSError."""
    return parse(Path("/proc/cpuinfo").read_text(), os.uname().machine)


def parse(cpuinfo: str, machine: str) -> dict[str, Any]:
    """The same of a node's /proc/cpuinfo, whose first CPU is taken for all."""
    first = cpuinfo.partition("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    found = {name.strip(): value.strip() for name, _, value in pairs}
    flags = (found.get("flags") or found.get("Features") or "").split()
    return {
        "machine": machine,
        "vendor": found.get("vendor_id") or found.get("CPU implementer") or "",
        "flags": sorted({flag for flag in flags if not _NOT_OF_PROGRAMS.fullmatch(flag)}),
    }


def why_not(had: Mapping[str, Any], has: Mapping[str, Any]) -> str:
    """Why what ran on the one CPU cannot go on on the other; empty: it can."""
    for name in ("machine", "vendor"):
        if had[name] != has[name]:
            return f"its CPU's {name} was {had[name]}, and is {has[name]} here"
    missing = sorted({*had["flags"]} - {*has["flags"]})
    return f"this CPU lacks {' '.join(missing[:_MOST_NAMED])}, which its CPU had" if missing else ""
