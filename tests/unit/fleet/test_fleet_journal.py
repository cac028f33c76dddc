"""fleetd's files: the journal, and the pools that may have machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from policy.pool_nodes import PoolPolicy, PoolsPolicy, ShapePolicy
from sluice.base.errors import SluiceError
from sluice.exchange.pool_costs import COSTS, PoolCosts, render_costs
from sluice.fleet.journal import KNOWN_POOLS, Journal, Launch, Memory, render_journal

KNOWN = PoolsPolicy(
    cluster="c",
    pools={"p": PoolPolicy(driver="d", nodes="n[1-2]", shapes=(ShapePolicy(name="big"),), partition="p")},
)  # fmt: skip


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "journal.json")


def test_what_was_saved_is_loaded(journal: Journal) -> None:
    memory = Memory(launches={"t": Launch("t", "n1", "p", "big", "", "asked", 1.0, 1.0)})
    journal.save(memory)
    journal.save_pools(KNOWN)
    assert journal.load() == memory and journal.load_pools() == KNOWN


def test_without_any_file_there_was_no_fleet_and_with_pools_its_journal_is_lost(journal: Journal) -> None:
    assert (journal.load().origin, journal.load_pools()) == ("new", PoolsPolicy())
    journal.save_pools(KNOWN)
    assert journal.load().origin == "lost"


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"{}", b"null", b'{"version": 1, "launches": 7}', b"[" * 100_000])
def test_a_damaged_journal_is_moved_away_and_costs_are_kept(journal: Journal, text: bytes) -> None:
    journal.path.write_bytes(text)
    costs = {"p": PoolCosts(partition="p")}
    journal.path.with_name(COSTS.name).write_bytes(render_costs(costs))
    memory = journal.load()
    assert (memory.origin, memory.costs) == ("lost", costs)
    assert journal.path.with_name("journal.json.damaged").read_bytes() == text and not journal.path.exists()


def test_a_journal_of_another_version_is_left_alone(journal: Journal) -> None:
    text = render_journal(Memory(version=9))
    journal.path.write_bytes(text)
    with pytest.raises(SluiceError, match="of version 9, and this one reads 1"):
        journal.load()
    assert journal.path.read_bytes() == text


def test_damaged_pools_are_moved_away(journal: Journal) -> None:
    file = journal.path.with_name(KNOWN_POOLS)
    file.write_text('{"pools": 7}')
    assert journal.load_pools() == PoolsPolicy()
    assert file.with_name(f"{KNOWN_POOLS}.damaged").exists() and not file.exists()
