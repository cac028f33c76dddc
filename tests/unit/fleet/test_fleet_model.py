"""A hostile provider, SIGKILL before and after every step, and an operator who changes a dynamic pool: nothing leaked,
nothing launched twice, no job lost, and Slurm's nodes are those of the policy.

SLUICE_FLEET_SEED=N: runs that begin with another seed than 0.
"""

import os

import pytest
from fleet_world import World

_RUNS = 10_000 if os.environ.get("SLUICE_TEST_SCALE") == "full" else 200
_FIRST = int(os.environ.get("SLUICE_FLEET_SEED", "0"))
_CHUNK = 50


@pytest.mark.parametrize("first", range(_FIRST, _FIRST + _RUNS, _CHUNK))
def test_every_run_settles(first: int) -> None:
    for seed in range(first, first + _CHUNK):
        world = World(seed)
        world.run()
        assert not world.problems, f"seed {seed}: {world.problems[0]}"
