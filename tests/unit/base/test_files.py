import os
from pathlib import Path

import pytest

from sluice.base.files import write_atomic, write_if_changed


def test_failed_write_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch):
    target = tmp_path / "gres.conf"
    target.write_text("old")

    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space") as caught:
        write_atomic(target, "new")
    assert caught.value.filename == str(target)
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["gres.conf"]


def test_a_symbolic_link_stays_one(tmp_path):
    real = tmp_path / "real.conf"
    real.write_text("old")
    link = tmp_path / "link.conf"
    link.symlink_to(real)
    write_atomic(link, "new", mode=0o600)
    assert link.is_symlink()
    assert real.read_text() == "new"
    assert real.stat().st_mode & 0o777 == 0o600


def test_a_planted_symbolic_link_is_replaced_and_not_followed(tmp_path):
    real = tmp_path / "real.conf"
    real.write_text("old")
    link = tmp_path / "link.conf"
    link.symlink_to(real)
    write_atomic(link, "new", follow_links=False)
    assert not link.is_symlink() and link.read_text() == "new"
    assert real.read_text() == "old"


def test_an_equal_file_is_not_touched(tmp_path):
    target = tmp_path / "f"
    assert write_if_changed(target, "a")
    inode = target.stat().st_ino
    assert not write_if_changed(target, "a")
    assert target.stat().st_ino == inode
    assert write_if_changed(target, "b")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_owner_and_mode_are_right_before_the_file_is_seen(tmp_path, monkeypatch):
    """In between a service that reads it by its group could not, or another could."""
    path, seen = tmp_path / "tokens.json", []
    path.write_text("old")
    os.chown(path, 12, 34)
    replace = Path.replace

    def watched(self, target):
        facts = self.stat()
        seen.append((facts.st_uid, facts.st_gid, facts.st_mode & 0o777, self.read_text()))
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", watched)
    write_atomic(path, "new", mode=0o640, like=path.stat())
    assert seen == [(12, 34, 0o640, "new")]
    assert (path.stat().st_uid, path.stat().st_gid) == (12, 34)
