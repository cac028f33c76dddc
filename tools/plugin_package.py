"""For tools/deb and debian/rules: the plugins of a Slurm as a package.

source CACHE                    fetch the sources of this distribution's Slurm; prints their folder
build SOURCE OUTPUT CACHE       build the plugins
manifest RELEASE OUTPUT         write the manifest, when nothing changes the files any more
depends RELEASE                 what the package depends on
"""

from __future__ import annotations

import sys
from pathlib import Path

from sluice.base.run import run_command
from sluice.base.slurm_version import parse_slurm_version

_PACKAGE = "slurm-wlm-basic-plugins"
"""It has libslurmfull.so and the plugins that Sluice's link; all of Slurm's daemons and commands depend on it."""


def installed_release() -> str:
    """Upstream's version of the installed package, e.g. ``22.05.8``."""
    shown = run_command(["dpkg-query", "-W", "-f", "${source:Upstream-Version}", _PACKAGE], timeout=60)
    return shown.stdout.strip()


def depends(release: str) -> str:
    """Plugins fit one release, to the last digit, in all revisions of the distribution."""
    major, minor, micro = release.split(".")
    return f"{_PACKAGE} (>= {release}), {_PACKAGE} (<< {major}.{minor}.{int(micro) + 1}~)"


def main(arguments: list[str]) -> int:
    """Run one of the commands above."""
    match arguments:
        case ["source", cache]:
            from sluice.plugin.sources import distribution_source

            print(distribution_source(parse_slurm_version(installed_release()), cache=Path(cache)).folder)
        case ["build", source, output, cache]:
            from sluice.plugin.builder import build_plugins
            from sluice.plugin.site import find_plugin_dir
            from sluice.plugin.sources import named_source, source_version

            slurm = named_source(Path(source), source_version(Path(source)))
            build_plugins(slurm, Path(output), plugin_dir=find_plugin_dir(), cache=Path(cache))
        case ["manifest", release, output]:
            from sluice.plugin.builder import write_manifest

            write_manifest(Path(output), parse_slurm_version(release))
        case ["depends", release]:
            print(depends(release))
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
