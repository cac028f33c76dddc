"""The cluster's users: /etc/passwd and /etc/group that exist inside it only, and what Slurm's accounting knows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dev_cluster.description import ClusterDescription
from dev_cluster.layout import INSIDE

_SYSTEM_USERS = {"slurm": 64030, "munge": 64031}  # where the system has none of its own
SERVE_USERS = {"sluice-serve": 990, "sluice-gateway": 991}


@dataclass(frozen=True, slots=True)
class UnixUser:
    """One line of passwd."""

    name: str
    uid: int
    gid: int
    home: str


class UserDatabase:
    """passwd and group of a system tree, with the cluster's users in place of any of the same name or number."""

    def __init__(self, root: Path, description: ClusterDescription) -> None:
        uids = {user.name: user.uid or 0 for user in description.users}
        passwd = (root / "etc/passwd").read_text().splitlines()
        group = (root / "etc/group").read_text().splitlines()
        wanted = _SYSTEM_USERS | (SERVE_USERS if description.serve else {})
        for name, uid in wanted.items():
            if not any(line.startswith(f"{name}:") for line in passwd):
                passwd.append(f"{name}:x:{uid}:{uid}::/nonexistent:/usr/sbin/nologin")
                group.append(f"{name}:x:{uid}:")
        ids = {str(uid) for uid in uids.values()}
        self._passwd = [line for line in passwd if not (line.split(":")[0] in uids or line.split(":")[2:3][0] in ids)]
        self._group = [line for line in group if not (line.split(":")[0] in uids or line.split(":")[2:3][0] in ids)]
        for name, uid in uids.items():
            self._passwd.append(f"{name}:x:{uid}:{uid}:{name}:{INSIDE}/home/{name}:/bin/bash")
            self._group.append(f"{name}:x:{uid}:")
        self.users: dict[str, UnixUser] = {}
        for line in self._passwd:
            fields = line.split(":")
            if len(fields) >= 7:
                self.users[fields[0]] = UnixUser(fields[0], int(fields[2]), int(fields[3]), fields[5])

    @property
    def passwd(self) -> str:
        """/etc/passwd."""
        return "\n".join(self._passwd) + "\n"

    @property
    def group(self) -> str:
        """/etc/group."""
        return "\n".join(self._group) + "\n"


def sacctmgr_dump(cluster: str, description: ClusterDescription) -> str:
    """What `sacctmgr load` reads: the cluster, its accounts, and who may use them; users without any use root's."""
    lines = [f"Cluster - '{cluster}':Fairshare=1:QOS='normal'"]
    for parent in ("root", *(account.name for account in description.accounts)):
        lines.append(f"Parent - '{parent}'")
        if parent == "root":
            lines.append("User - 'root':DefaultAccount='root':AdminLevel='Administrator':Fairshare=1")
        for account in description.accounts:
            if account.parent == parent:
                about = account.description or account.name
                lines.append(f"Account - '{account.name}':Description='{about}':Organization='sluice':Fairshare=1")
        for user in description.users:
            accounts = user.accounts or ["root"]
            if parent in accounts:
                lines.append(f"User - '{user.name}':DefaultAccount='{accounts[0]}':Fairshare=1")
    return "\n".join(lines) + "\n"
