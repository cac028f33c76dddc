"""Ports for programs that listen later."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from sluice.base import ports


def test_the_kernel_gives_it_to_no_connection(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = int(ports._RANGE.read_text().split()[0])
    for host in ("127.0.0.1", ""):
        number = ports.free_port(host)
        assert 10_000 <= number < first
        with socket.create_server((host, number)):
            pass
    monkeypatch.setattr(ports, "_RANGE", tmp_path / "none")
    assert ports.free_port() < 32_768


def test_one_that_is_taken_is_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    taken = socket.create_server(("127.0.0.1", ports.free_port()))
    with taken:
        number = taken.getsockname()[1]
        (tmp_path / "range").write_text(f"{number + 2}\t60999\n")
        monkeypatch.setattr(ports, "_RANGE", tmp_path / "range")
        monkeypatch.setattr(ports, "_LEAST", number)
        assert {ports.free_port() for _ in range(10)} == {number + 1}


@pytest.mark.parametrize("text", ["1024\t65535\n", "", "x"])
def test_where_the_kernel_leaves_no_room_any_free_one_is_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
) -> None:
    (tmp_path / "range").write_text(text)
    monkeypatch.setattr(ports, "_RANGE", tmp_path / "range")
    with socket.create_server(("127.0.0.1", ports.free_port())):
        pass
