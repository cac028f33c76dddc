"""How a cluster comes up: its files, its process 1, then two branches in parallel.

One branch makes the database and slurmdbd, the other the nodes, whose GPUs are probed and written into Slurm's
configuration. When both are done, the first controller and the node agents start side by side, then slurmds, then
other controllers.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Executor, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gpu_sim
from dev_cluster.accounts import SERVE_USERS, UserDatabase, sacctmgr_dump
from dev_cluster.agents import READY, NodeAgents
from dev_cluster.configuration import (
    ACCT_DATABASE,
    ADDRESSES,
    CLUSTER_NAME,
    Ports,
    cgroup_conf,
    controllers,
    hosts_file,
    node_addresses,
    slurm_conf,
    slurmdbd_conf,
    with_ports,
)
from dev_cluster.control import ask, connect_unix, init_pid
from dev_cluster.controllerd import (
    SERVE_FOLDERS,
    controllerd_command,
    explaind_command,
    fleetd_command,
    serve_commands,
    sluice_command,
    write_power_programs,
    write_program,
    write_replica_program,
)
from dev_cluster.database import install_database
from dev_cluster.description import ClusterDescription, NodeGroup
from dev_cluster.handle import ClusterHandle, DaemonError, Progress
from dev_cluster.layout import DATABASE, INSIDE, LOGIN, MARKER
from dev_cluster.plugins import ClusterPlugins
from dev_cluster.policy_file import dynamic_nodes, first_pools, first_snippet, policy_text
from dev_cluster.ports import claim_ports, listens
from dev_cluster.probing import probe
from dev_cluster.slurm_tree import SlurmTree
from gres_probe.inventory import Inventory
from gres_probe.nic_groups import NICS_FILE
from gres_probe.writer import generate
from policy.pool_nodes import NODES_FILE
from policy.state import SNIPPET
from sluice.base.errors import SluiceError
from sluice.base.files import write_atomic
from sluice.base.run import PYTHON
from sluice.base.slurm_version import parse_slurm_version

_SHARED_FROM = 16
"""From this many nodes of one platform on they share the unchanging part of their simulated hardware, and one is
probed for all."""

_CGROUP_VIEW = Path(__file__).parent / "cgroup_view/libcgroup_view.so"
_OWN_ADDRESS = Path(__file__).parent / "own_address/libown_address.so"
_NODELAY = Path(__file__).parent / "nodelay/libnodelay.so"


class Boot:
    """One `up`. Checks all that can be checked before anything is made."""

    def __init__(
        self,
        cluster: ClusterHandle,
        description: ClusterDescription,
        tree: SlurmTree,
        progress: Progress,
        deadline: float,
    ) -> None:
        self.cluster = cluster
        self.layout = cluster.layout
        self.description = description
        self.tree = tree
        self.progress = progress
        self.deadline = deadline
        self.commands: dict[str, dict[str, Any]] = {}  # how each daemon is started
        self.platforms = {
            group.platform: gpu_sim.load_platform(group.platform)
            for group in description.nodes
            if group.platform not in ("none", "real")
        }
        self.users = UserDatabase(tree.root or Path("/"), description)
        self.plugins = None if description.sluice is None else ClusterPlugins(description.sluice, tree, progress)
        self.policy = policy_text(description.policy)
        self.dynamic = dynamic_nodes(description, self.policy)
        self.agents = NodeAgents(tree, only_ends=description.agent == "ends") if description.agent else None
        self.claim = claim_ports(Ports.needed(len(description.hosts)), base=description.port_base)
        self.ports = Ports(self.claim.base)

    def run(self, *, wait: bool) -> int:
        """Everything, in order. Returns the write end of process 1's lifeline."""
        hosts = ", ".join(controllers(self.description))
        self.progress(f"{len(self.description.hosts)} nodes, controllers {hosts}, ports from {self.ports.slurmctld}")
        self.write_files()
        lifeline = self.start_init()
        try:
            self.write_facts()
            self.start("munged", LOGIN, self.munged(), user="munge")
            for host in self.hosts():
                # The database lives in memory: it goes with the cluster anyway, and nothing waits for a disk.
                memory = f"{INSIDE}/database/data" if host == DATABASE else None
                ask(self.layout, "node", name=host, owner=self.owner("slurm"), memory=memory)
            self.wait_for("munged", self.layout.munge / "munge.socket.2")
            self.in_parallel(self.bring_accounting, self.bring_nodes)
            primary, *backups = controllers(self.description)
            self.in_parallel(partial(self.bring_controller, primary), self.start_agents)
            for host in self.description.hosts:
                if host not in self.description.fixed_hosts:
                    self.commands[f"slurmd@{host}"] = self.machine(host)
                    continue
                if self.plugins is not None and self.agents is not None and self.plugins.build.has("prep_script"):
                    self.cluster.run(self.plugins.node_links(), node=host)
                self.start(f"slurmd@{host}", host, self.slurmd(host), env=self.node_environment)
            self.progress("slurmctld and slurmd started")
            if wait:
                fixed = self.description.fixed_hosts
                self.cluster.wait_idle(fixed, timeout=self.remaining(), progress=self.progress)
            else:
                self.cluster.node_states()
            # Now that the primary answers: while it starts, it would wait for a backup that starts as well.
            for host in backups:
                self.start_controller(host)
                self.wait_for_backup(host)
            if self.description.explaind:
                for host in controllers(self.description):
                    self.start(f"explaind@{host}", host, explaind_command(host, self.tree), env=self.ports.environment)
            self.apply_policy()
            if self.description.fleet:
                self.start_fleet()
            if self.description.serve:
                for host in controllers(self.description):
                    self.start_serving(host)
            self.write_facts(state="up")
        except BaseException:
            os.close(lifeline)
            raise
        return lifeline

    # ---- files ----

    def write_files(self) -> None:
        """The state folder with all that is known beforehand."""
        layout = self.layout
        for folder in (layout.overlay, layout.slurm, layout.sluice, layout.logs, layout.homes, layout.inventories):
            folder.mkdir(mode=0o755)
        layout.nodes.mkdir(mode=0o755)
        for name in ("slurm", "sluice"):
            (layout.overlay / name).mkdir()
        if self.agents is not None:
            self.agents.prepare_overlay(layout)
        if self.tree.root is not None:
            write_program(layout)
        if self.description.serve:
            write_replica_program(layout, self.tree)
        if self.description.fleet:
            write_power_programs(layout, self.tree)
        layout.scratch.mkdir()
        for name, text in (
            ("passwd", self.users.passwd),
            ("group", self.users.group),
            ("hosts", hosts_file(self.description)),
            ("hostname", f"{LOGIN}\n"),
        ):
            (layout.overlay / name).write_text(text)
        self.make_folder(layout.overlay / "munge", "munge", 0o700)
        key = layout.overlay / "munge/munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
        os.chown(key, *self.owner("munge"))
        self.make_folder(layout.munge, "munge", 0o755)
        self.make_folder(layout.state, "slurm", 0o700)
        if self.description.fleet:
            self.make_folder(layout.machines, "slurm", 0o755)
            self.make_folder(layout.folder / "fleet", "slurm", 0o755)
        if self.description.accounting:
            self.make_folder(layout.database, "slurm", 0o700)
            (layout.database / "data").mkdir()
            shutil.copy(_NODELAY, layout.folder)
        for user in self.description.users:
            self.make_folder(layout.homes / user.name, user.name, 0o755)
        (layout.slurm / "cgroup.conf").write_text(cgroup_conf(self.description))
        if self.description.cgroup == "v2":
            shutil.copy(_CGROUP_VIEW, layout.folder)
        if self.description.fleet:
            shutil.copy(_OWN_ADDRESS, layout.folder)
        if self.description.topology_conf:
            (layout.slurm / "topology.conf").write_text(self.description.topology_conf)
        for group in self.description.nodes:
            for host in group.hosts:
                (layout.node(host) / "spool").mkdir(parents=True)
                if group.config != "shared":
                    layout.node_slurm(host).mkdir()

    def make_folder(self, path: Path, user: str, mode: int) -> None:
        """A folder of a user's."""
        path.mkdir(mode=mode)
        path.chmod(mode)
        os.chown(path, *self.owner(user))

    def owner(self, name: str) -> tuple[int, int]:
        """uid and gid."""
        return self.users.users[name].uid, self.users.users[name].gid

    def write_facts(self, state: str = "starting") -> None:
        """What others need to work with the cluster."""
        users = [user.name for user in self.description.users]
        known = {
            name: {"uid": user.uid, "gid": user.gid, "groups": [user.gid], "home": user.home}
            for name, user in self.users.users.items()
            if name in (*users, "root", "slurm", "munge", "nobody", *SERVE_USERS)
        }
        self.cluster.write_facts(
            {
                "state": state,
                "cluster_name": CLUSTER_NAME,
                "nodes": {h: group.platform for group in self.description.nodes for h in group.hosts},
                "hosts": self.hosts(),
                "users": users,
                "unix_users": known,
                "accounting": self.description.accounting,
                "slurm_prefix": str(self.tree.prefix),
                "cgroup": self.description.cgroup,
                "root": None if self.tree.root is None else str(self.tree.root),
                # `sluice` itself comes last, so that it does not bring its Python along.
                "path": f"{self.tree.path}:{INSIDE / 'bin' if self.tree.root else Path(sys.executable).parent}",
                "name_slurm_conf": not self.tree.is_distribution,
                "ports": {
                    "slurmctld": self.ports.slurmctld,
                    "slurmdbd": self.ports.slurmdbd,
                    "count": self.claim.count,
                },
                "environment": self.ports.environment,
                "daemons": self.commands,
            }
        )

    def hosts(self) -> list[str]:
        """The hosts that are no nodes."""
        return [*controllers(self.description), *([DATABASE] if self.description.accounting else [])]

    # ---- process 1 and the daemons ----

    def start_init(self) -> int:
        """Start process 1 and wait until it answers; the write end of its lifeline."""
        read, lifeline = os.pipe()
        log = self.layout.logs / "init.log"
        arguments = [*PYTHON, "-m", "dev_cluster.init", str(self.layout.folder), self.description.cgroup]
        if self.tree.root is not None:
            arguments.append(str(self.tree.root.resolve()))
        try:
            with log.open("ab") as output:
                helper = subprocess.Popen(
                    arguments,
                    stdin=read,
                    stdout=output,
                    stderr=output,
                    env={**os.environ, MARKER: str(self.layout.folder)},
                    pass_fds=[claim.fileno() for claim in self.claim.sockets],
                )
            helper.wait()  # it forks process 1 and ends
            while True:
                try:
                    ask(self.layout, "list")
                    return lifeline
                except SluiceError:
                    if init_pid(self.layout) is None:
                        words = log.read_text().strip()
                        raise SluiceError(
                            f"the cluster's namespaces cannot be made: {words}",
                            remedy="containers need the right to mount, e.g. docker run --privileged",
                        ) from None
                    self.pause()
        except BaseException:
            os.close(lifeline)
            raise
        finally:
            os.close(read)
            self.claim.close()

    def start(
        self, name: str, host: str, argv: list[str], *, user: str = "root", env: dict[str, str] | None = None
    ) -> None:
        """Start a daemon."""
        self.commands[name] = self.daemon(host, argv, user=user, env=env)
        ask(self.layout, "spawn", name=name, **self.commands[name])

    def daemon(
        self, host: str, argv: list[str], *, user: str = "root", env: dict[str, str] | None = None
    ) -> dict[str, Any]:
        """How a daemon is started."""
        uid, gid = self.owner(user)
        environment = {"PATH": self.tree.path, "LANG": "C.UTF-8", "HOME": "/", **(env or {})}
        if not self.tree.is_distribution:
            environment["SLURM_CONF"] = "/etc/slurm/slurm.conf"
        return {"host": host, "argv": argv, "env": environment, "user": [uid, gid, [gid]]}

    def bring_controller(self, host: str) -> None:
        """The first slurmctld, which wants to find its accounts."""
        if self.description.accounting:
            self.load_accounts()
        self.start_controller(host)

    def start_controller(self, host: str) -> None:
        """Start slurmctld on one of the controllers."""
        env = None
        if self.plugins is not None:
            env = self.plugins.environment
            self.cluster.run(self.plugins.links(), node=host)
        argv = [self.program("slurmctld"), "-D"]
        if self.plugins is not None:
            argv = self.plugins.under_supervisor(argv)
        self.start(f"slurmctld@{host}", host, argv, env=env)
        self.wait_for(f"slurmctld@{host}", (ADDRESSES[host], self.ports.slurmctld))
        if self.description.controllerd:
            self.start(f"controllerd@{host}", host, controllerd_command(host, self.tree), env=self.ports.environment)

    def wait_for_backup(self, host: str) -> None:
        """Wait until the backup controller answers."""
        while f"at {host} is UP" not in self.cluster.run(["scontrol", "ping"], check=False).stdout:
            self.check_daemons()
            self.pause(f"slurmctld@{host}")

    def program(self, name: str) -> str:
        """Path of a program inside."""
        path = self.tree.program(name)
        assert path is not None  # noqa: S101 - SlurmTree.check has looked
        return path

    def wait_for(self, daemon: str, place: Path | tuple[str, int]) -> None:
        """Wait until a daemon accepts connections at a unix socket, or listens at a TCP port."""
        while True:
            if isinstance(place, Path):
                with suppress(OSError):
                    connect_unix(place, timeout=5).close()
                    return
            elif listens(*place):
                return
            self.check_daemons()
            self.pause(daemon)

    def check_daemons(self) -> None:
        """Raise DaemonError when one has ended."""
        for daemon in self.cluster.daemons():
            if daemon.status is not None:
                raise DaemonError(self.cluster, daemon)

    def remaining(self) -> float:
        """Seconds left, at least one."""
        return max(1.0, self.deadline - time.monotonic())

    def pause(self, waiting_for: str = "process 1") -> None:
        """A short sleep. Raises SluiceError when the time is over."""
        if time.monotonic() > self.deadline:
            words = self.cluster.log_tail(waiting_for)
            raise SluiceError(f"{waiting_for} was not ready in time; the last lines of its log:\n{words}")
        time.sleep(0.02)

    def in_parallel(self, *branches: Callable[[], None]) -> None:
        """Run all; when one fails the others stop waiting. Raises the first error."""
        with ThreadPoolExecutor(len(branches)) as pool:
            futures = [pool.submit(branch) for branch in branches]
            try:
                done, _ = wait(futures, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
            except BaseException:
                self.deadline = 0.0
                raise

    def munged(self) -> list[str]:
        """munged's command line."""
        place = f"{INSIDE}/munge"
        return [
            self.program("munged"),
            "--foreground",
            "--force",  # the state folder may lie where others can write
            "--key-file=/etc/munge/munge.key",
            "--socket=/run/munge/munge.socket.2",
            f"--pid-file={place}/munged.pid",
            f"--log-file={place}/munged.log",
            f"--seed-file={place}/munged.seed",
        ]

    # ---- accounting ----

    def bring_accounting(self) -> None:
        """MariaDB, slurmdbd, and the associations in it."""
        if not self.description.accounting:
            return
        place = f"{INSIDE}/database"
        options = [
            "--no-defaults",
            f"--datadir={place}/data",
            "--innodb-buffer-pool-size=64M",
            "--innodb-log-file-size=16M",
            "--innodb-flush-log-at-trx-commit=0",
            "--innodb-doublewrite=0",
            "--innodb-lock-wait-timeout=900",
            "--skip-log-bin",
        ]
        install = [self.program("mariadb-install-db"), *options, "--skip-test-db", "--skip-name-resolve"]
        install += ["--auth-root-authentication-method=normal", "--user=slurm", f"--tmpdir={place}"]
        data, owner = f"{place}/data", self.owner("slurm")
        install_database(self.cluster, self.tree, install, data, owner, timeout=self.remaining())
        self.progress("database made")
        server = [self.program("mariadbd"), *options, "--skip-networking", "--user=slurm"]
        server += [f"--socket={place}/mariadb.sock", f"--pid-file={place}/mariadbd.pid", f"--tmpdir={place}"]
        # slurmdbd would make its database, but ends after that with the client library of MariaDB 11.8.9: a handle
        # whose first connection failed, as there was no database, allows results of 0 columns.
        first = self.layout.database / "first.sql"
        write_atomic(first, f"CREATE DATABASE IF NOT EXISTS {ACCT_DATABASE};\n")
        server.append(f"--init-file={place}/{first.name}")
        self.start("mariadbd", DATABASE, server)
        self.wait_for("mariadbd", self.layout.database / "mariadb.sock")
        write_atomic(self.layout.slurm / "slurmdbd.conf", slurmdbd_conf(self.description, self.ports), mode=0o600)
        os.chown(self.layout.slurm / "slurmdbd.conf", *self.owner("slurm"))
        env = {"MYSQL_UNIX_PORT": f"{place}/mariadb.sock", "LD_PRELOAD": str(INSIDE / _NODELAY.name)}
        self.start("slurmdbd", DATABASE, [self.program("slurmdbd"), "-D"], user="slurm", env=env)
        addresses = [ADDRESSES[host] for host in controllers(self.description)]
        relay = "relay.py"
        shutil.copy(Path(__file__).with_name(relay), self.layout.folder)
        argv = ["/usr/bin/python3", "-I", f"{INSIDE}/{relay}", "127.0.0.1", str(self.ports.slurmctld), *addresses]
        self.start("relay", DATABASE, argv, user="nobody")
        self.wait_for("slurmdbd", (ADDRESSES[DATABASE], self.ports.slurmdbd))
        self.progress("slurmdbd ready")

    def load_accounts(self) -> None:
        """The cluster, its accounts and users, in one call."""
        dump = self.layout.folder / "accounts.dump"
        dump.write_text(sacctmgr_dump(CLUSTER_NAME, self.description))
        self.cluster.run(
            ["sacctmgr", "--immediate", "--quiet", "load", f"file={INSIDE / dump.name}"], timeout=self.remaining()
        )
        self.progress(f"accounts of {len(self.description.users)} users loaded")

    # ---- nodes ----

    def bring_nodes(self) -> None:
        """Simulated hardware, namespaces, inventories, and from them the configuration."""
        simulated = [group for group in self.description.nodes if group.platform in self.platforms]
        if simulated:
            copy_libraries(gpu_sim.library_dir(), self.layout.libraries)
            (self.layout.folder / "ld.so.conf").write_text(f"{INSIDE}/lib\ninclude /etc/ld.so.conf\n")
            cache = [self.program("ldconfig"), "-X", "-f", f"{INSIDE}/ld.so.conf", "-C", f"{INSIDE}/ld.so.cache"]
            self.cluster.run(cache, cwd="/", timeout=self.remaining())
        with ThreadPoolExecutor(4) as pool:
            found = [self.make_group(group, pool) for group in self.description.nodes]
            self.progress("nodes made")
            if self.description.gres is not None:
                self.write_configuration(self.description.gres.node_lines, self.description.gres.gres_conf)
                return
            inventories = [future.result() for futures in found for future in futures]
        for inventory in inventories:
            for problem in inventory.problems:
                self.progress(f"{inventory.node}: {problem.what}; {problem.remedy}")
        version = parse_slurm_version(self.cluster.run([self.program("slurmd"), "-V"]).stdout)
        gres = generate(inventories, slurm_version=version, shards=self.description.shards, nics=self.description.nics)
        fixed = {name: node for name, node in gres.nodes.items() if name in self.description.fixed_hosts}
        lines = replace(gres, nodes=fixed).nodes_conf()
        if self.description.nics:
            write_atomic(self.layout.slurm / NICS_FILE, gres.nics_conf())
        self.write_configuration(lines, gres.gres_conf)
        gpus = sum(len(inventory.gpus) for inventory in inventories)
        self.progress(f"{gpus} GPUs probed and written into gres.conf")

    def make_group(self, group: NodeGroup, pool: Executor) -> list[Future[Inventory]]:
        """Nodes of one kind; each is probed in the pool as soon as it is there.

        Of a large group only the first node is probed: the others differ in serial numbers only, which Slurm's
        configuration does not hold.
        """
        probed: list[Future[Inventory]] = []
        for host in group.hosts:
            self.make_node(group, host)
            if group.platform == "none":
                probed.append(pool.submit(plain_inventory, host))
            elif probed and len(group.hosts) >= _SHARED_FROM:
                probed.append(pool.submit(copied_inventory, probed[0], host))
            else:
                probed.append(pool.submit(probe, self.cluster, host, inside=self.tree.root is None))
        return probed

    def make_node(self, group: NodeGroup, host: str) -> None:
        """One node's namespaces and hardware."""
        devices: list[list[Any]] | None = None
        if group.platform != "real":
            devices = []
        if group.platform in self.platforms:
            folder = self.layout.gpu_sim(host)
            shared = self.layout.folder / "platforms" if len(group.hosts) >= _SHARED_FROM else None
            gpu_sim.write_node_state(folder, self.platforms[group.platform], host, shared=shared)
            devices = [[file.path, file.major, file.minor, file.mode] for file in gpu_sim.device_files(folder)]
        slurm = None if group.config == "shared" else f"{INSIDE}/nodes/{host}/slurm"
        ask(self.layout, "node", name=host, slurm=slurm, devices=devices)

    def write_configuration(self, nodes: str, gres: str) -> None:
        """slurm.conf and gres.conf, and the copies of nodes that have their own."""
        files = {"cgroup.conf", "gres.conf", "slurm.conf"}
        write_atomic(self.layout.slurm / "gres.conf", gres)
        lines = with_ports(nodes, self.ports)
        loaded: list[tuple[str, str]] = []
        if self.plugins is not None:
            files |= self.plugins.write(self.layout)
            loaded = self.plugins.parameters
        if self.agents is not None:
            files |= self.agents.write(self.layout)
            loaded = [*loaded, *self.agents.parameters]
        if self.description.fleet:
            files.add(NODES_FILE)
            write_atomic(self.layout.slurm / NODES_FILE, first_pools(self.description, self.policy))
        snippet = first_snippet(self.description, nodes) if self.policy else ""
        if snippet:
            files.add(SNIPPET)
            write_atomic(self.layout.slurm / SNIPPET, snippet)
        text = slurm_conf(self.description, self.ports, lines, loaded, snippet)
        write_atomic(self.layout.slurm / "slurm.conf", text)
        for group in self.description.nodes:
            if group.config == "own":
                for host in group.hosts:
                    for name in files:
                        shutil.copyfile(self.layout.slurm / name, self.layout.node_slurm(host) / name)

    def apply_policy(self) -> None:
        """Write and apply the policy, as an administrator does."""
        if not self.policy:
            return
        write_atomic(self.layout.sluice / "sluice.yaml", self.policy)
        self.cluster.run(sluice_command(self.tree, "apply", "--yes"), timeout=self.remaining())
        self.progress("policy applied: /etc/sluice/sluice.yaml")

    def start_fleet(self) -> None:
        """fleetd on each controller; SlurmUser may ask process 1, for the driver of machines."""
        self.layout.socket.chmod(0o660)
        os.chown(self.layout.socket, 0, self.owner("slurm")[1])
        self.write_facts()
        for host in controllers(self.description):
            self.start(f"fleetd@{host}", host, fleetd_command(self.tree), env=self.ports.environment)

    def start_serving(self, host: str) -> None:
        """What keeps services on a controller: root's helper, replicad, and a gateway where there is one, which listens
        then."""
        for user, folder, mode in SERVE_FOLDERS:
            self.cluster.run(["install", "-d", "-o", user, "-g", user, "-m", mode, folder], node=host, cwd="/")
        for name, user, argv in serve_commands(host, self.tree):
            if f"{name}@{host}" not in self.commands:
                self.start(f"{name}@{host}", host, argv, user=user, env=self.ports.environment)
                if name == "gateway":
                    self.wait_for(f"{name}@{host}", (ADDRESSES[host], self.ports.gateway))

    def start_agents(self) -> None:
        """The node agents, before any slurmd can start a job."""
        if self.agents is None:
            return
        for host in self.description.hosts:
            environment = {"SLURMD_NODENAME": host, **self.ports.environment, **self.node_environment}
            self.start(f"agent@{host}", host, self.agents.command(host), env=environment)
        for host in self.description.hosts:
            while READY not in self.cluster.log(f"agent@{host}").read_text():
                self.check_daemons()
                self.pause(f"agent@{host}")
        self.progress("node agents ready")

    @property
    def node_environment(self) -> dict[str, str]:
        """What is added to the environment of the nodes' daemons."""
        given = {} if self.description.sluice is None else self.description.sluice.node_environment
        if self.description.cgroup == "v1":
            return given
        # INVOCATION_ID: as systemd starts it, so that slurmd stays in the cgroup of its service.
        preloaded = [given.get("LD_PRELOAD", ""), str(INSIDE / _CGROUP_VIEW.name)]
        return {"INVOCATION_ID": "sluice", **given, "LD_PRELOAD": " ".join(filter(None, preloaded))}

    def machine(self, host: str) -> dict[str, Any]:
        """How slurmd is started on a machine of a pool."""
        environment = self.node_environment
        preloaded = [environment.get("LD_PRELOAD", ""), str(INSIDE / _OWN_ADDRESS.name)]
        own = {
            "LD_PRELOAD": " ".join(filter(None, preloaded)),
            "SLUICE_OWN_ADDRESS": node_addresses(self.description)[host],
        }
        just_booted = [*self.slurmd(host), "-b"]  # slurmctld waits for a machine that booted since it asked
        return self.daemon(host, just_booted, env={**environment, **own})

    def slurmd(self, host: str) -> list[str]:
        """slurmd's command line."""
        command = [self.program("slurmd"), "-D", "-N", host]
        if host in self.dynamic:
            command += ["-Z", "--conf", self.dynamic[host]]
        if self.description.group_of(host).config == "configless":
            servers = (f"{name}:{self.ports.slurmctld}" for name in controllers(self.description))
            command += ["--conf-server", ",".join(servers)]
        return command


def copy_libraries(source: Path, target: Path) -> None:
    """The simulated libraries with their links ``.so``, which in an installed package are files of their own.

    ldconfig lists such a name only where it is a link.
    """
    target.mkdir()
    for library in source.iterdir():
        name, _, version = library.name.partition(".so.")
        if version:
            shutil.copy2(library, target)
            (target / f"{name}.so").symlink_to(library.name)


def plain_inventory(host: str) -> Inventory:
    """A node without GPUs: what slurm.conf says of it."""
    return Inventory(node=host, sockets=1, cores_per_socket=8, threads_per_core=1, memory_mib=16384)


def copied_inventory(first: Future[Inventory], host: str) -> Inventory:
    """The inventory of a node like another one."""
    return dataclasses.replace(first.result(), node=host, problems=[])
