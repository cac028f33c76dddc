"""The store of tokens."""

from __future__ import annotations

import fcntl
import json
import os
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner

from sluice.base.errors import SluiceError, UsageError
from sluice.base.tokens import MOST_OVERLAP_S, ScopeError, TokenStore


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


# ---- keys of gateways, and rotation ----


def test_a_key_of_gateways_is_for_nothing_else(tmp_path: Path) -> None:
    store = TokenStore(tmp_path / "tokens.json")
    _, text = store.create("alice", ["serve"], now=0.0, seconds=60.0)
    assert store.check(text, "serve", 1.0).user == "alice"
    for scope in ("read", "write"):
        with pytest.raises(ScopeError):
            store.check(text, scope, 1.0)
    _, other = store.create("alice", ["read", "write"], now=0.0, seconds=60.0)
    with pytest.raises(ScopeError):
        store.check(other, "serve", 1.0)


def test_a_rotated_key_has_two_secrets_for_a_while(tmp_path: Path) -> None:
    store, reader = (TokenStore(tmp_path / "tokens.json") for _ in range(2))
    made, first = store.create("alice", ["serve"], now=0.0, seconds=1000.0)
    rotated, second = store.rotate(made.id, now=10.0, old_for=100.0)
    assert (rotated.id, rotated.user, rotated.scopes, rotated.expires) == (made.id, "alice", ("serve",), 1000.0)
    assert first != second
    for text, now, holds in (
        (second, 10.0, True), (first, 109.9, True), (first, 110.0, False), (second, 999.9, True),
        (second, 1000.0, False),
    ):  # fmt: skip
        if holds:
            assert reader.check(text, "serve", now).id == made.id
        else:
            with pytest.raises(SluiceError):
                reader.check(text, "serve", now)
    _, third = store.rotate(made.id, now=20.0, old_for=100.0, seconds=5000.0)
    with pytest.raises(SluiceError):
        reader.check(first, "serve", 21.0)  # the secret before the last one
    assert reader.check(second, "serve", 21.0) and reader.check(third, "serve", 5000.0)
    store.rotate(made.id, now=30.0, old_for=0.0)
    for text in (second, third):
        with pytest.raises(SluiceError):
            reader.check(text, "serve", 30.0)


def test_what_cannot_be_rotated(tmp_path: Path) -> None:
    store = TokenStore(tmp_path / "tokens.json")
    made, text = store.create("alice", ["read"], now=0.0, seconds=60.0)
    before = (tmp_path / "tokens.json").read_bytes()
    for name, now, old_for, seconds in (
        ("0" * 16, 1.0, 0.0, None), (made.id, 60.0, 0.0, None), (made.id, 1.0, MOST_OVERLAP_S + 1.0, None),
        (made.id, 1.0, -1.0, None), (made.id, 1.0, 0.0, 0.0), (made.id, 1.0, 0.0, 1e10),
    ):  # fmt: skip
        with pytest.raises(UsageError):
            store.rotate(name, now=now, old_for=old_for, seconds=seconds)
    assert (tmp_path / "tokens.json").read_bytes() == before and store.check(text, "read", 1.0)


def test_a_store_of_an_older_version_is_read(tmp_path: Path) -> None:
    store = TokenStore(tmp_path / "tokens.json")
    _, text = store.create("alice", ["read"], now=0.0, seconds=60.0)
    document = json.loads(store.path.read_text())
    for one in document["tokens"]:
        del one["old_digest"], one["old_until"]
    store.path.write_text(json.dumps(document))
    assert TokenStore(store.path).check(text, "read", 1.0).user == "alice"


def test_the_commands(tmp_path: Path) -> None:
    from sluice.cli.token import command

    words = ["--store", str(tmp_path / "tokens.json")]
    made = CliRunner().invoke(command, ["create", "alice", "--scope", "serve", *words])
    first = made.stdout.strip()
    name = first.split("_")[1]
    rotated = CliRunner().invoke(command, ["rotate", name, "--old-for", "1h", *words])
    second = rotated.stdout.strip()
    store = TokenStore(tmp_path / "tokens.json")
    now = store.tokens()[name].created
    assert second.startswith(f"sluice_{name}_") and "the old secret until" in rotated.stderr
    assert store.check(first, "serve", now + 60) and store.check(second, "serve", now + 60)
    shown = CliRunner().invoke(command, ["list", "--json", *words]).stdout
    assert "digest" not in shown and json.loads(shown)["tokens"][0]["old_until"] > now
    wrong = CliRunner().invoke(command, ["rotate", name, "--old-for", "90", *words])
    assert "--old-for: '90' is not a duration" in str(wrong.exception)
