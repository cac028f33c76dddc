"""What daemons tell systemd."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from sluice.base.service import notify


@pytest.mark.parametrize("name", ["{0}/notify", "@sluice-test-notify-{1}"])
def test_systemd_gets_one_datagram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    address = name.format(tmp_path, os.getpid())
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(address.replace("@", "\0"))
        systemd.settimeout(5)
        notify("READY=1", "STATUS=serves")
        assert systemd.recv(1024) == b"READY=1\nSTATUS=serves"
    notify("READY=1")  # nobody listens


def test_without_systemd_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notify("READY=1")
    monkeypatch.setenv("NOTIFY_SOCKET", "vsock:2:1234")
    notify("READY=1")
