"""Faults below the controllers of a cluster: a full, hanging or powerless storage, cut connections."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dev_cluster.cluster import DevCluster
from dev_cluster.layout import INSIDE
from sluice.base.run import run_command

_SYNC = """
import os, pathlib
for path in pathlib.Path(os.environ["SLUICE_CHAOS_STATE"]).rglob("*"):
    if path.is_file():
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.close(file)
"""


class Faults:
    """The shim (shim.c), and the folder whose files switch its faults on.

    `place` must be seen under the same name inside the cluster, e.g. below /tmp.
    """

    def __init__(self, place: Path, *, power: bool) -> None:
        self.folder = place / "faults"
        self.shim = place / "shim.so"
        source = Path(__file__).with_name("shim.c")
        run_command(["gcc", "-std=gnu11", "-O1", "-shared", "-fPIC", source, "-o", self.shim, "-ldl"], timeout=120)
        place.chmod(0o755)
        (self.folder / "durable").mkdir(parents=True)
        for path in (self.folder, self.folder / "durable"):
            path.chmod(0o777)
        if power:
            (self.folder / "power").touch()

    @property
    def environment(self) -> dict[str, str]:
        """For slurmctld and its supervisor."""
        return {
            "LD_PRELOAD": str(self.shim),
            "SLUICE_CHAOS": str(self.folder),
            "SLUICE_CHAOS_STATE": str(INSIDE / "state"),
        }

    @contextmanager
    def on(self, name: str, text: str = "") -> Iterator[None]:
        """A fault, for a while."""
        path = self.folder / name
        path.write_text(text)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)

    def all_is_durable(self, cluster: DevCluster) -> None:
        """What is in the state folder now would be left by a power cut."""
        cluster.run(["/usr/bin/python3", "-I", "-c", _SYNC], env=self.environment)

    def lose_unsynced(self, state: Path) -> int:
        """What a power cut leaves of the state folder, nobody running; how many files were lost or became empty."""
        durable = self.folder / "durable"
        owner = state.stat()
        fresh = state.with_name("state.after")
        fresh.mkdir(mode=0o700)
        lost = 0
        paths = [fresh]
        for line in (durable / "names").read_text().splitlines():
            kind, _, rest = line.partition(" ")
            key, _, name = rest.partition(" ") if kind == "f" else ("", "", rest)
            path = fresh / name
            paths.append(path)
            if kind == "d":
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            elif (durable / key).exists():
                shutil.copyfile(durable / key, path)
                path.chmod(0o600)
            else:
                path.touch(mode=0o600)
                lost += 1
        for path in paths:
            os.chown(path, owner.st_uid, owner.st_gid)
        for entry in list(state.iterdir()):
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        for entry in list(fresh.iterdir()):
            entry.rename(state / entry.name)
        fresh.rmdir()
        return lost
