"""`sluice pool` on what fleetd says: every difference of the closed list, as an operator reads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from sluice.cli.pool import command
from sluice.exchange import fleet
from sluice.exchange.fleet import DIFFERENCES, Difference, Event, FleetStatus, NodeStatus, PoolStatus

PAGE = Path(__file__).parents[3] / "docs/elastic.md"


def say(folder: Path, node: NodeStatus, pool: PoolStatus, *words: str) -> Result:
    path = folder / "status.json"
    event = Event(1.0, "n1", "p5", "asked", "big", "zone-a")
    path.write_bytes(fleet.render_status(FleetStatus(2e9, pools={"p5": pool}, nodes=[node], history=[event])))
    return CliRunner().invoke(command, [words[0], "--status", str(path), *words[1:]], catch_exceptions=False)


POOL = PoolStatus("ec2", "n1", 1, 0, "burst", on=1, cost_hour=3.0, boot_s=95.0)


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_why_has_a_sentence_and_a_remedy_for_each_difference(tmp_path: Path, difference: Difference) -> None:
    node = NodeStatus("n1", "p5", "on", "registered", "m1", "big", "zone-a", 1.0, difference, "its words", 2e9, (7,))
    found = say(tmp_path, node, POOL, "why", "n1")
    what, remedy = DIFFERENCES[difference]
    assert f"n1 of pool p5: {what} (its words)" in found.stdout and f"remedy    {remedy}" in found.stdout
    assert "on, jobs 7" in found.stdout and "m1, big, zone-a" in found.stdout and "again" in found.stdout
    document = json.loads(say(tmp_path, node, POOL, "why", "--json", "n1").stdout)
    assert (document["difference"], document["remedy"]) == (difference, remedy)


def test_the_guide_says_of_each_difference_what_is_done() -> None:
    rows = [line.split("|")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    named = {word.strip("` ") for row in rows for word in row.split(",")}
    assert set(DIFFERENCES) <= named


def test_a_list_a_pool_and_its_history(tmp_path: Path) -> None:
    node = NodeStatus("n1", "p5", "up", "launched", "m1", "big", "zone-a", 1.0, "boots")
    assert "p5|ec2|burst|0|1|1|0|0|0|3.0||" in say(tmp_path, node, POOL, "list", "-P").stdout
    assert "n1|up|launched|big|zone-a|boots|" in say(tmp_path, node, POOL, "show", "-P", "p5").stdout
    assert "|n1|asked|big|zone-a|" in say(tmp_path, node, POOL, "history", "-P", "p5").stdout
    with pytest.raises(fleet.UsageError, match="'other': there is none of this name"):
        say(tmp_path, node, POOL, "show", "other")
    with pytest.raises(fleet.UsageError, match="'n2': not of a pool"):
        say(tmp_path, node, POOL, "why", "n2")
