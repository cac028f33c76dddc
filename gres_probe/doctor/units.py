"""systemd's units on a node."""

from __future__ import annotations

from collections.abc import Iterator

from gres_probe.doctor.check import CannotCheckError, Outcome, SiteView, check, fail, ok, warn
from sluice.base.run import run_command

_AGENT, _SLURMD = "sluice-agent.service", "slurmd.service"
_COPY = "copy etc/systemd/sluice-agent.service of the installed Sluice to /etc/systemd/system; systemctl daemon-reload"


@check("units", "slurmd starts after the node agent")
def units(site: SiteView) -> Iterator[Outcome]:
    """By systemd's own view, with all drop-ins."""
    systemctl = site.host("/usr/bin/systemctl")
    if not systemctl.exists() or not site.host("/run/systemd/system").is_dir():
        raise CannotCheckError("systemd does not run here")
    words = ["show", "--property=Id,LoadState,Type,After,UnitFileState", _AGENT, _SLURMD]
    said = run_command([systemctl, *words], timeout=site.command_timeout).stdout
    shown = [dict(line.split("=", 1) for line in text.splitlines() if "=" in line) for text in said.split("\n\n")]
    by_name = {unit.get("Id"): unit for unit in shown if unit.get("LoadState") == "loaded"}
    for name in (_AGENT, _SLURMD):
        if name not in by_name:
            raise CannotCheckError(f"this host has no {name}")
    agent, slurmd = by_name[_AGENT], by_name[_SLURMD]
    problems = []
    if _AGENT not in slurmd.get("After", "").split():
        problems.append(fail(f"{_SLURMD} is not After={_AGENT}: the first prologs find no agent", _COPY))
    if agent.get("Type") != "notify":
        what = f"{_AGENT} has Type={agent.get('Type')}: slurmd does not wait until the agent answers"
        problems.append(warn(what, _COPY))
    if agent.get("UnitFileState") == "disabled":
        problems.append(fail(f"{_AGENT} is not started at boot", f"systemctl enable {_AGENT}"))
    yield from problems or [ok(f"{_SLURMD} is After={_AGENT}")]
