"""Files with secrets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sluice.base.errors import SluiceError
from sluice.base.private import read_private


def private(path: Path) -> Path:
    path.write_text("secret")
    path.chmod(0o600)
    return path


def test_at_most_so_many_bytes(tmp_path: Path) -> None:
    path = private(tmp_path / "file")
    assert read_private(path, 100) == b"secret"
    assert read_private(path, 3) == b"sec"


def test_a_file_that_is_not_there_is_the_caller_s_to_judge(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_private(tmp_path / "file", 100)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601])
def test_no_other_user_may_reach_it(tmp_path: Path, mode: int) -> None:
    path = private(tmp_path / "file")
    path.chmod(mode)
    with pytest.raises(SluiceError, match="others than its owner") as error:
        read_private(path, 100)
    assert error.value.remedy is not None and f"chmod 600 {path}" in error.value.remedy


@pytest.mark.skipif(os.geteuid() != 0, reason="giving files away needs root")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = private(tmp_path / "file")
    os.chown(path, 12345, 12345)
    with pytest.raises(SluiceError, match="another user owns it"):
        read_private(path, 100)


def test_a_fifo_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(SluiceError):
        read_private(tmp_path / "fifo", 100)


def test_links_are_followed_unless_they_must_not_be(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(private(tmp_path / "file"))
    assert read_private(link, 100) == b"secret"
    with pytest.raises(SluiceError):
        read_private(link, 100, follow_links=False)
