"""The limiter's library: jobs must be able to open it, and only root may replace it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from prolog_epilog.regions import check_library
from sluice.base.errors import SluiceError


def test_a_limiter_that_users_cannot_open_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    folder = tmp_path / "home"
    folder.mkdir(mode=0o700)
    library = folder / "libsluice_limit.so"
    library.write_bytes(b"")
    library.chmod(0o644)
    with pytest.raises(SluiceError, match=r"users cannot open it, as .*/home has mode 700"):
        check_library(library)
    with pytest.raises(SluiceError, match="No such file"):
        check_library(folder / "missing")


@pytest.mark.skipif(os.geteuid() != 0, reason="files of other users need root")
def test_a_limiter_that_others_can_replace_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "sluice"
    folder.mkdir(mode=0o755)
    library = folder / "libsluice_limit.so"
    library.touch(mode=0o755)
    for path in (tmp_path, *tmp_path.parents[:-2]):
        path.chmod(path.stat().st_mode | 0o555)  # pytest's own folders are shut
    check_library(library)
    for path, change in ((library, 0o757), (library, 0o775), (folder, 0o777), (folder, 0o775)):
        path.chmod(change)
        with pytest.raises(SluiceError, match="others than root can replace it"):
            check_library(library)
        path.chmod(0o755)
    folder.chmod(0o1777)  # as /tmp
    check_library(library)
    os.chown(folder, 65534, -1)
    with pytest.raises(SluiceError, match="of user 65534"):
        check_library(library)
