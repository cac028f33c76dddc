"""A socket of this host."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from sluice.base.local_server import _listen


def test_the_socket_is_there_when_it_can_be_connected_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, there, chmod = tmp_path / "socket", list[bool](), Path.chmod

    def changed(one: Path, mode: int) -> None:
        there.append(path.exists())
        chmod(one, mode)

    monkeypatch.setattr(Path, "chmod", changed)
    for _ in range(2):  # the second one in place of the first
        with _listen(path, ""), socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            assert path.stat().st_mode & 0o777 == 0o666
    assert there == [False, True]
    assert list(tmp_path.iterdir()) == [path]
