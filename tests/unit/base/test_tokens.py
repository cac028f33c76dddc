"""The store of tokens."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

from sluice.base.tokens import TokenStore


def test_whoever_can_read_the_folder_cannot_prevent_revoking(tmp_path: Path) -> None:
    store = TokenStore(tmp_path / "tokens.json")
    made, text = store.create("alice", ["read"], now=0.0, seconds=60.0)
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)  # any user can
    thread = threading.Thread(target=store.revoke, args=([made.id],), daemon=True)
    thread.start()
    thread.join(5)
    held_up = thread.is_alive()
    os.close(descriptor)
    thread.join(5)
    assert not held_up and not store.tokens()
    modes = {one.name: one.stat().st_mode & 0o777 for one in tmp_path.iterdir()}
    assert modes == {"tokens.json": 0o640, ".tokens.json.lock": 0o600}
    assert text not in (tmp_path / "tokens.json").read_text()
