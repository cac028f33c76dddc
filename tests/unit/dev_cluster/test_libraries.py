"""The simulated libraries as a cluster's nodes get them."""

from __future__ import annotations

from pathlib import Path

from dev_cluster.boot import copy_libraries


def test_names_without_a_version_are_links_though_an_installed_package_has_files(tmp_path: Path) -> None:
    source, target = tmp_path / "installed", tmp_path / "lib"
    source.mkdir()
    for name in ("libamd_smi.so", "libamd_smi.so.26", "libcuda.so", "libcuda.so.1"):
        (source / name).write_text(name)
    copy_libraries(source, target)
    links = {path.name: str(path.readlink()) for path in target.iterdir() if path.is_symlink()}
    assert links == {"libamd_smi.so": "libamd_smi.so.26", "libcuda.so": "libcuda.so.1"}
    assert (target / "libamd_smi.so").read_text() == "libamd_smi.so.26"
