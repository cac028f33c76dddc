"""What fleetd publishes is found in the usual folder, wherever its state folder is."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.base.files import write_atomic
from sluice.exchange.fleet import STATUS, FleetStatus, read_status, render_status
from sluice.exchange.pool_costs import COSTS, PoolCosts, read_costs, render_costs
from sluice.fleet.published import lead_to


def test_readers_find_costs_and_status_of_another_state_folder(tmp_path: Path) -> None:
    usual, shared = tmp_path / "usual", tmp_path / "shared"
    usual.mkdir()
    shared.mkdir()
    (usual / COSTS.name).write_bytes(render_costs({"old": PoolCosts()}))
    lead_to(shared, usual)
    lead_to(shared, usual)  # at each start
    assert read_costs(usual / COSTS.name) == {}  # nothing yet, and no more what an earlier fleetd left here
    for _ in range(2):
        write_atomic(shared / COSTS.name, render_costs({"p5": PoolCosts("burst")}), follow_links=False)
        write_atomic(shared / STATUS.name, render_status(FleetStatus(7.0)), follow_links=False)
        assert read_costs(usual / COSTS.name) == {"p5": PoolCosts("burst")}
        assert read_status(usual / STATUS.name).at == 7.0
    write_atomic(usual / COSTS.name, render_costs({}), follow_links=False)  # fleetd uses the usual folder again
    assert read_costs(usual / COSTS.name) == {} and read_costs(shared / COSTS.name)
    assert sorted(one.name for one in usual.iterdir()) == [COSTS.name, STATUS.name]


def test_the_usual_folder_needs_no_links_also_by_another_name(tmp_path: Path) -> None:
    usual, other = tmp_path / "usual", tmp_path / "other"
    usual.mkdir()
    other.symlink_to(usual)
    lead_to(usual, usual)
    lead_to(other, usual)
    assert list(usual.iterdir()) == []


@pytest.mark.parametrize("there", [False, True])
def test_a_usual_folder_where_no_links_can_be_is_said_and_keeps_nobody_from_launching(
    there: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    usual = tmp_path / "usual"
    if there:
        (usual / STATUS.name).mkdir(parents=True)  # as good as a full file system
    lead_to(tmp_path, usual)
    assert "reports, alerts and `sluice pool` look there" in caplog.text and "install -d" in caplog.text
    assert [one.name for one in usual.glob("*")] == ([STATUS.name] if there else [])
