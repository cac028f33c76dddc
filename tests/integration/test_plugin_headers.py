"""job_submit and SPANK need Slurm's public headers only, and compile against those of every release."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sluice.base.run import run_command
from sluice.plugin.builder import sources_folder
from sluice.plugin.sources import SourcesUnavailableError, public_headers, release_name
from sluice.plugin.symbols import missing

# Where each release of Slurm is to be had. 26.05 is the newest; its private headers differ from those that we know.
_SUITES = {"22.05": "bookworm", "24.11": "trixie", "26.05": "sid"}


@pytest.mark.parametrize("slurm", _SUITES)
def test_job_submit_and_spank_compile_against_public_headers(slurm: str, full_scale: bool, tmp_path: Path) -> None:
    if slurm != "26.05" and not full_scale:
        pytest.skip("the plugins of this release are built whole by other tests")
    try:
        headers = public_headers(_SUITES[slurm])
    except SourcesUnavailableError as error:
        pytest.skip(f"no headers of Slurm: {error}")
    found = re.search(r"SLURM_VERSION_NUMBER\s+0x(\w\w)(\w\w)", (headers / "slurm/slurm_version.h").read_text())
    assert found is not None
    version = f"{int(found[1], 16)}.{int(found[2], 16):02}"
    if version != slurm:
        pytest.skip(f"{_SUITES[slurm]} has Slurm {version} by now")
    place = sources_folder() / "slurm_plugin"
    run_command(
        ["cmake", "-G", "Ninja", "-S", place, "-B", tmp_path, f"-DSLURM_HEADERS={headers}", "-DSLUICE_WERROR=ON"]
    )
    run_command(["cmake", "--build", tmp_path], timeout=300)
    assert {path.name for path in tmp_path.glob("*.so")} == {
        "job_submit_sluice.so",
        "libsluice_controller.so",
        "spank_sluice.so",
        "spank_sluice_limit.so",
    }
    lacking = missing(tmp_path / "job_submit_sluice.so", [tmp_path / "libsluice_controller.so"])
    assert [name for name in lacking if name.startswith("sluice_")] == []  # slurmctld would end at the first submission


def test_headers_of_a_release_that_does_not_exist(tmp_path: Path) -> None:
    assert release_name()
    with pytest.raises(SourcesUnavailableError, match=r"apt-get update: .*; connect this machine to its mirror"):
        public_headers("no-such-release", cache=tmp_path)
    assert [path.name for path in tmp_path.iterdir() if not path.name.endswith(".lock")] == []
