"""Which sources a Slurm's plugins are built against: nothing here needs the network."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.base.errors import SluiceError
from sluice.base.slurm_version import SlurmVersion
from sluice.plugin import sources
from sluice.plugin.builder import find_source
from sluice.plugin.sources import SlurmSource, header_version

NEWEST = (26, 5, 5)


def headers(folder: Path, version: SlurmVersion) -> Path:
    (folder / "slurm").mkdir(parents=True)
    number = "".join(f"{part:02x}" for part in version)
    (folder / "slurm/slurm_version.h").write_text(f"#define SLURM_VERSION_NUMBER 0x{number}\n")
    return folder


def test_a_release_of_which_public_headers_suffice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those named; else the installed ones, if they are of that version; else the distribution's."""
    fetched = headers(tmp_path / "fetched", NEWEST)
    monkeypatch.setattr(sources, "public_headers", lambda *_, **__: fetched)
    installed, older = headers(tmp_path / "installed", NEWEST), headers(tmp_path / "older", (26, 5, 4))
    assert header_version(older) == (26, 5, 4) and header_version(tmp_path) is None
    assert find_source(NEWEST, installed=installed) == SlurmSource(installed, NEWEST, whole=False)
    assert find_source(NEWEST, installed=older, suite="sid").folder == fetched
    assert find_source(NEWEST, installed=older, named=installed).folder == installed
    with pytest.raises(SluiceError, match=r"older: of Slurm 26.05.4, but the installed Slurm is 26.05.5"):
        find_source(NEWEST, named=older)
    with pytest.raises(SluiceError, match=r"no headers of Slurm \(slurm/slurm_version.h\)"):
        find_source(NEWEST, named=tmp_path)


def test_of_a_release_without_a_distribution_named_sources_are_used_whole(tmp_path: Path) -> None:
    tree = headers(tmp_path / "src", NEWEST)
    (tree / "META").write_text("  Version: 26.05.5\n")
    with pytest.raises(SluiceError, match="not a configured source tree of Slurm"):
        find_source(NEWEST, named=tree)
    (tree / "config.h").touch()
    assert find_source(NEWEST, named=tree) == SlurmSource(tree, NEWEST)
    with pytest.raises(SluiceError, match=r"Slurm 26.05.5, but slurmctld is 26.05.3"):
        find_source((26, 5, 3), named=tree)


def test_other_releases_need_whole_sources(tmp_path: Path) -> None:
    with pytest.raises(SluiceError, match="not a configured source tree of Slurm"):
        find_source((24, 11, 5), named=headers(tmp_path / "named", (24, 11, 5)))
    with pytest.raises(SluiceError, match="Slurm 25.05.2: the plugins support"):
        find_source((25, 5, 2), named=headers(tmp_path / "unknown", (25, 11, 2)))


def test_kept_headers_of_a_release_that_moved_are_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    headers(tmp_path / "slurm-headers-sid", (26, 5, 4))
    monkeypatch.setattr(sources, "_mirrors", lambda: {"main": "http://localhost/debian"})

    def run(self: object, program: str, *words: str) -> str:
        raise SluiceError(f"asked: {program} {words[0]}")

    monkeypatch.setattr(sources._Apt, "run", run)
    assert sources.public_headers("sid", cache=tmp_path).name == "slurm-headers-sid"
    assert sources.public_headers("sid", wanted=(26, 5, 4), cache=tmp_path).name == "slurm-headers-sid"
    with pytest.raises(SluiceError, match="asked: apt-get update"):
        sources.public_headers("sid", wanted=NEWEST, cache=tmp_path)
