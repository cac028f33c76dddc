"""Where the demonstration keeps its clusters."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from dev_cluster.demo import __main__ as demo


@pytest.mark.parametrize(
    ("mounted", "free", "place"),
    [(True, 2 << 30, "/dev/shm"), (True, 64 << 20, "/run"), (False, 2 << 30, "/run")],
)
def test_clusters_are_in_memory_where_that_is_mounted_and_large(
    monkeypatch: pytest.MonkeyPatch, mounted: bool, free: int, place: str
) -> None:
    monkeypatch.setattr(Path, "is_mount", lambda self: mounted)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=free))
    assert demo._place() == Path(place)
