"""An empty database of MariaDB, made once and copied for each cluster."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from dev_cluster.handle import ClusterHandle
from dev_cluster.layout import DATABASE, THIS_SYSTEM
from dev_cluster.slurm_tree import SlurmTree
from sluice.plugin.sources import default_cache, locked

_COPY = "cp --archive --sparse=always"
_KEEP = f'rm -rf "$2.new"; {_COPY} "$1" "$2.new"; mv "$2.new" "$2"'


def install_database(
    cluster: ClusterHandle,
    tree: SlurmTree,
    install: Sequence[str],
    data: str,
    owner: tuple[int, int],
    *,
    timeout: float,
) -> None:
    """Fill the empty folder `data` of the database's host as `install` (mariadb-install-db) does.

    What that makes is kept, and copied while MariaDB is the same: it takes a second of processor time. `timeout` in
    seconds. Raises CommandError.
    """
    server = Path(f"{tree.root or ''}{tree.program('mariadbd')}").resolve()
    facts = server.stat()
    made_by = json.dumps([str(server), facts.st_size, facts.st_mtime_ns, *owner, *install])
    kept = default_cache().resolve() / f"database-{hashlib.sha256(made_by.encode()).hexdigest()[:12]}"
    inside = f"{'' if tree.root is None else THIS_SYSTEM}{kept}"
    if not kept.is_dir():
        cluster.run(install, node=DATABASE, cwd="/", timeout=timeout)
        with locked(kept.with_name(f".{kept.name}.lock")):
            if not kept.is_dir():  # nor has another cluster made it meanwhile
                keep = ["sh", "-euc", _KEEP, "sh", data, inside]
                cluster.run(keep, node=DATABASE, cwd="/", timeout=timeout, check=False)  # e.g. the disk is full
        return
    cluster.run([*_COPY.split(), f"{inside}/.", data], node=DATABASE, cwd="/", timeout=timeout)
