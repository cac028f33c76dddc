"""Hostlists of people: what is too much is refused before it is made."""

from __future__ import annotations

import itertools
import random
import time

import pytest

from sluice.base.errors import UsageError
from sluice.base.hostlist import MOST_NAMES, expand, hosts

WHOLE = [
    ("n[1-3],m7", ["n1", "n2", "n3", "m7"]), ("n[01-03]", ["n01", "n02", "n03"]), ("n[1-9/4]", ["n1", "n5", "n9"]),
    ("r[1-2]n[1,3]", ["r1n1", "r1n3", "r2n1", "r2n3"]), ("", []), ("..", [".."]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "names"), WHOLE)
def test_names(text: str, names: list[str]) -> None:
    assert sorted(expand(text)) == sorted(names)


def test_names_are_folded_where_every_slurm_reads_it() -> None:
    """22.05 refuses brackets in the middle of a name."""
    assert hosts(["n1", "n2", "m7"]) == "m7,n[1-2]"
    assert hosts(["rack1-n1", "rack2-n1"]) == "rack1-n1,rack2-n1"


@pytest.mark.parametrize(
    "text",
    ["n[1-4096]" * 400, "n[1-9999] " * 3, "n[1-9999]" * 3, f"n[1-{MOST_NAMES + 1}]", "n[1-" + "9" * 40 + "]",
     "n[1-1]" * 2000, f"a[1-{MOST_NAMES}],b", "n[1 - 99999999]", "n[-5-99999999]", "n[ 1\t-+9_999_999]",
     "n[-99999999--1]"],
)  # fmt: skip
def test_more_names_than_a_cluster_can_have_are_refused_at_once(text: str) -> None:
    began = time.process_time()
    with pytest.raises(UsageError, match="too many names") as refused:
        expand(text)
    assert time.process_time() - began < 2 and len(str(refused.value)) < 300


@pytest.mark.parametrize("text", ["[" * 5000, "n[1-2" * 3000, "n[", "n[1-", "n]", "n[2-1]", "n[a]", "n[1-2]]"])
def test_what_is_malformed_is_named_shortly(text: str) -> None:
    with pytest.raises(UsageError, match="hostlist") as refused:
        expand(text)
    assert len(str(refused.value)) < 600


def test_what_is_bounded_is_never_refused() -> None:
    chance = random.Random(7)
    for _ in range(200):
        bounds = [sorted(chance.sample(range(30), 2)) for _ in range(chance.randint(1, 3))]
        text = "".join(f"{name}[{first}-{last}]" for name, (first, last) in zip("abc", bounds, strict=False))
        numbers = itertools.product(*(range(first, last + 1) for first, last in bounds))
        made = ["".join(f"{name}{number}" for name, number in zip("abc", one, strict=False)) for one in numbers]
        assert sorted(expand(text)) == sorted(made)
