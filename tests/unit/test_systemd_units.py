"""What systemd itself reports of the units and drop-ins in etc/systemd."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from sluice.base.run import run_command

_UNITS = Path(__file__).resolve().parents[2] / "etc/systemd"
_DAEMONS = {"slurmctld": "/usr/sbin/slurmctld -D", "slurmd": "/usr/sbin/slurmd -D"}
# Root on a node, over other users' processes, cgroups and devices: what the agent is for.
_EXPOSED = {"sluice-agent.service"}
_MOST_EXPOSED = 6.0

pytestmark = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")


def _analyze(*words: str | Path) -> str:
    done = run_command(["systemd-analyze", *words], check=False, timeout=60)
    return done.stdout + done.stderr


def test_systemd_understands_every_line_of_units_and_drop_ins(tmp_path: Path) -> None:
    for path in _UNITS.rglob("*"):
        if path.is_file():
            copy = tmp_path / path.relative_to(_UNITS)
            copy.parent.mkdir(exist_ok=True)
            # our programs are not installed here: any other one will do
            copy.write_text(re.sub(r"/(?:opt/sluice|usr/local/lib/sluice|usr/sbin)/\S+", "/bin/true", path.read_text()))
    for name in _DAEMONS:
        (tmp_path / f"{name}.service").write_text("[Service]\nExecStart=/bin/true\n")
    units = sorted(path for path in tmp_path.iterdir() if path.suffix in (".service", ".timer"))
    assert len(units) >= 12
    said = _analyze("verify", "--man=no", *units)
    about_ours = [line for line in said.splitlines() if str(tmp_path) in line or "sluice" in line or "slurm" in line]
    assert about_ours == []


def test_a_broken_unit_is_found(tmp_path: Path) -> None:
    (tmp_path / "sluice-broken.service").write_text("[Service]\nExecStart=/bin/true\nProtectEverything=yes\n")
    assert "ProtectEverything" in _analyze("verify", "--man=no", tmp_path / "sluice-broken.service")


@pytest.mark.parametrize("unit", sorted(path.name for path in _UNITS.glob("*.service")))
def test_units_are_kept_from_what_they_do_not_need(unit: str) -> None:
    said = _analyze("security", "--offline=true", "--no-pager", _UNITS / unit)
    found = re.search(rf"exposure level for {re.escape(unit)}: (\d+\.\d)", said)
    if found is None and "offline" in said:
        pytest.skip("this systemd-analyze cannot look at files")
    assert found is not None, said
    assert (float(found[1]) <= _MOST_EXPOSED) is (unit not in _EXPOSED)
