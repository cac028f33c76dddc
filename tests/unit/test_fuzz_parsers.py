"""The fuzzers' targets, with their seeds and a few thousand changes of these: nothing is raised for any of them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from prolog_epilog import cgroups, jobs, server
from sluice.base import log
from tests.fuzz.parsers import TARGETS

RUNS = 1500
WORDS = [
    b"[",
    b"]",
    b"{",
    b"}",
    b",",
    b'"',
    b"\\ud800",
    b"1e999",
    b"-1",
    b"null",
    b"NaN",
    b"9" * 400,
    b"\xff",
    b"[" * 3000,
]


def changed(seed: bytes, rng: random.Random) -> bytes:
    """A seed with pieces that were taken out, put elsewhere, or replaced."""
    data = seed
    for _ in range(rng.randrange(1, 6)):
        begin = rng.randrange(len(data) + 1)
        end = begin + rng.choice((0, 1, 1, 4, 20))
        data = data[:begin] + rng.choice([b"", rng.choice(WORDS), rng.randbytes(2), data[begin:end] * 2]) + data[end:]
    return data


@pytest.mark.parametrize("name", TARGETS)
def test_nothing_is_raised_for_any_bytes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (log, jobs, server):
        monkeypatch.setattr(module, "log", module.log)  # put back afterwards
    monkeypatch.setattr(cgroups, "place_of", cgroups.place_of)
    target, rng = TARGETS[name](), random.Random(name)
    for seed in target.seeds:
        target.run(seed)
        for _ in range(RUNS // len(target.seeds)):
            target.run(changed(seed, rng))


def test_the_fuzzers_are_there() -> None:
    assert (Path(__file__).parents[1] / "fuzz/__main__.py").exists() and len(TARGETS) >= 5
