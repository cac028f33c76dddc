"""The simulation of jobs that save: what they lose, and which failures are read."""

from __future__ import annotations

import lzma
from pathlib import Path

import pytest

from benchmarks import checkpoint_save
from benchmarks.checkpoint import History, _Learnt, _Optimum, _Simulation, drawn, listed
from sluice.base.errors import SluiceError
from sluice.controllerd.health.checkpoints import daly

DAY = 86400.0


def test_without_failures_only_saves_are_lost() -> None:
    way = _Optimum(10 * DAY)
    lost = sum(_Simulation(History(1, 4 * DAY, ()), 1, way, 1).run())
    interval = daly(20.0, 10 * DAY)  # of a save of 20 s; the job's own is some other
    assert 0.1 < lost / (4 * DAY / interval * 20.0) < 10


def test_a_failure_costs_the_work_since_the_last_save() -> None:
    without, late, early = (
        sum(_Simulation(History(1, 4 * DAY, failures), 1, _Optimum(1e12), 1).run())
        for failures in ((), ((DAY, 0),), ((DAY / 2, 0), (DAY, 0)))
    )
    assert (without, late, early) == (0.0, DAY, DAY)


def test_what_is_learnt_comes_near_the_optimum() -> None:
    history = drawn(1.0, 15 * DAY, 64, 30 * DAY, 1)
    assert 0.5 < history.mtbf_s / (15 * DAY) < 2
    lost, optimum = (
        sum(_Simulation(history, 32, way, 1).run()) for way in (_Learnt(32), _Optimum(history.mtbf_s / 32))
    )
    assert 0.8 < lost / optimum < 1.3


def test_systems_of_the_public_list(tmp_path: Path) -> None:
    rows = [f"20,16,{number % 16},1/{1 + number % 28}/2004 {number % 24}:00" for number in range(100)]
    text = "\n".join(["System,nodes,nodenumz,Prob Started", *rows, "7,1,0,1/1/2004 0:00", "21,,3,1/1/2004 0:00"])
    plain, packed = tmp_path / "list.csv", tmp_path / "list.csv.xz"
    plain.write_text(text)
    packed.write_bytes(lzma.compress(text.encode()))
    for path in (plain, packed):
        (history,) = listed(path).values()
        assert (history.nodes, len(history.failures)) == (16, 100)
        assert min(history.failures)[0] == 0 and 27 * DAY < history.length_s < 28 * DAY
    plain.write_text("System\n20\n")
    with pytest.raises(SluiceError, match="LA-UR-05-7318"):
        listed(plain)


def test_a_save_is_compared_with_the_write_before_it() -> None:
    written = {"plain_s": [1.0, 2.0, 4.0], "early_s": [1.0, 1.0, 1.0]}
    taken = written | {"free_s": [2.0, 2.0, 2.0], "gpu_s": [0.1, 0.3, 0.2]}
    found = checkpoint_save.figures(taken, 100)
    assert found["save_over_plain_write"] == 1.0 and found["save_over_plain_write_worst"] == 2.0
    assert found["save_over_early_write"] == found["save_over_early_write_worst"] == 2.0
    assert found["save_plain_write_mib_s"] == 50.0 and found["save_gpu_s"] == 0.2 and found["save_memory_mib"] == 100
