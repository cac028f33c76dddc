"""The checklist on sites made of files, and with a Slurm that gives prepared answers."""

from __future__ import annotations

import errno
import grp
import json
import os
import pwd
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gres_probe.doctor import CHECKS, SiteView, Verdict, ebpf, examine, services
from gres_probe.doctor.check import Check, Outcome, ok, warn
from policy.node import NodePolicy
from policy.preflight import NodePreflight
from policy.traces import NodeTraces
from sluice.base.errors import UsageError
from sluice.base.slurm_version import parse_slurm_version
from sluice.plugin.builder import write_manifest

USER = pwd.getpwuid(os.geteuid()).pw_name
SOUND = f"""\
ClusterName=test
SlurmctldHost=localhost
SlurmctldHost=c2(localhost)
SlurmctldTimeout=15
SlurmUser={USER}
AuthType=auth/munge
StateSaveLocation=/srv/state
PluginDir=/srv/plugins
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
PriorityType=priority/multifactor
SchedulerType=sched/backfill
ProctrackType=proctrack/cgroup
TaskPlugin=task/affinity,task/cgroup
GresTypes=gpu,shard
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageTRES=gres/gpu,gres/shard
AccountingStorageEnforce=associations,limits,qos
Prolog=/srv/prolog
PrologFlags=Alloc,Contain
PrologEpilogTimeout=120
HealthCheckProgram=/srv/health
HealthCheckInterval=300
NodeName=n1 NodeAddr=localhost Gres=gpu:2
PartitionName=all Nodes=ALL
"""
PLUGINS = (
    "auth_munge",
    "select_cons_tres",
    "priority_multifactor",
    "sched_backfill",
    "proctrack_cgroup",
    "task_affinity",
    "task_cgroup",
    "accounting_storage_slurmdbd",
    "gres_gpu",
    "gres_shard",
)


class Host:
    """A host below a folder: its /etc/slurm, /srv and so on."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("etc/slurm/slurm.conf", SOUND)
        self.write("etc/slurm/gres.conf", "Name=gpu File=/dev/nvidia[0-1]\n")
        self.write("etc/slurm/cgroup.conf", "ConstrainDevices=yes\nConstrainRAMSpace=yes\nConstrainCores=yes\n")
        self.write("etc/munge/munge.key", "key", 0o400)
        self.write("srv/state/job_state", "")
        self.write("srv/prolog", "#!/bin/sh\n# squeue is for others\ntrue\n", 0o755)
        self.write("srv/health", "#!/bin/sh\n", 0o755)
        for plugin in PLUGINS:
            self.write(f"srv/plugins/{plugin}.so", "")
        self.write("proc/mounts", f"none / ext4 rw 0 0\nserver:/x {root}/srv nfs4 rw 0 0\n")
        self.write(
            "etc/cron.d/backup",
            "0 1 * * * root mariadb-dump --single-transaction slurm_acct_db\n"
            "0 2 * * * root rsync -a /srv/state /etc/slurm backup:\n",
        )
        self.write("usr/bin/sinfo", '#!/bin/sh\necho "slurm 24.11.5"\n', 0o755)
        self.write("usr/bin/sacct", "#!/bin/sh\n", 0o755)
        self.write(
            "usr/bin/scontrol",
            "#!/bin/sh\necho 'Slurmctld(primary) at c1 is UP'\necho 'SLURM_VERSION = 24.11.5'\n",
            0o755,
        )

    def write(self, name: str, text: str, mode: int = 0o644) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(mode)
        return path

    def replace(self, old: str, new: str, name: str = "etc/slurm/slurm.conf") -> None:
        text = (self.root / name).read_text()
        assert old in text
        self.write(name, text.replace(old, new))

    def site(self, hostname: str = "c2") -> SiteView:
        conf = self.root / "etc/slurm/slurm.conf"
        return SiteView(conf, prefix=self.root, root=self.root, command_timeout=20, hostname=hostname)

    def verdicts(self, name: str) -> dict[str, str]:
        return {answer.outcome.what: answer.outcome.verdict.value for answer in examine(self.site(), [name])}


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_a_sound_site_has_nothing_to_mend(host: Host) -> None:
    bad = [a for a in examine(host.site()) if a.outcome.verdict in (Verdict.WARN, Verdict.FAIL)]
    assert [(answer.check.name, answer.outcome.what) for answer in bad] == []


@pytest.mark.parametrize(
    ("check", "old", "new", "verdict", "says"),
    [
        ("config", "ClusterName=test", "rubbish", "fail", "not key=value"),
        ("config", "ClusterName=test", "Include slurm.conf", "fail", "includes itself"),
        ("backup-controller", "SlurmctldHost=c2(localhost)", "", "warn", "one slurmctld only"),
        ("backup-controller", "SlurmctldTimeout=15", "SlurmctldTimeout=2", "fail", "heartbeat"),
        ("backup-controller", "SlurmctldTimeout=15", "", "warn", "without a scheduler"),
        ("state", "/srv/state", "/tmp/state", "fail", "does not survive"),
        ("state", f"SlurmUser={USER}", "SlurmUser=nosuchuser", "fail", "does not exist"),
        ("scheduling", "SelectType=select/cons_tres", "SelectType=select/linear", "fail", "not allocated one by one"),
        ("scheduling", "CR_Core_Memory", "CR_Core", "warn", "main memory"),
        ("scheduling", "priority/multifactor", "priority/basic", "warn", "first come"),
        ("authentication", "auth/munge", "auth/none", "fail", "any user can act as any other"),
        ("plugins", "sched/backfill", "sched/other", "fail", "sched/other"),
        ("plugins", "PluginDir=/srv/plugins", "PluginDir=/srv/none:/srv/plugins", "fail", "does not exist"),
        ("plugins", "ClusterName=test", "ClusterName=test\nJobSubmitPlugins=lua", "fail", "job_submit/lua"),
        ("gres", "Gres=gpu:2", "Gres=gpu:3", "fail", "SL046"),
        ("gres", "Gres=gpu:2", "", "warn", "no node has GPUs"),
        ("cgroup", "proctrack/cgroup", "proctrack/linuxproc", "fail", "escape"),
        ("cgroup", ",task/cgroup", "", "fail", "every GPU"),
        ("prolog", "Prolog=/srv/prolog", "", "warn", "no Prolog"),
        ("prolog", "Prolog=/srv/prolog", "Prolog=/srv/none", "warn", "not on this host"),
        ("prolog", "PrologEpilogTimeout=120", "", "warn", "hanging"),
        ("prolog", "PrologEpilogTimeout=120", "PrologEpilogTimeout=0", "warn", "hanging"),
        ("prolog", "PrologEpilogTimeout=120", "PrologEpilogTimeout=65534", "warn", "hanging"),
        ("prolog", "PrologFlags=Alloc,Contain", "", "warn", "first step"),
        ("prolog", "HealthCheckInterval=300", "", "warn", "HealthCheckProgram"),
        ("accounting", "accounting_storage/slurmdbd", "accounting_storage/none", "fail", "no usage"),
        ("accounting", "gres/gpu,gres/shard", "gres/gpu", "warn", "gres/shard is not accounted"),
        ("accounting", "associations,limits,qos", "associations", "warn", "limits are not enforced"),
        ("names", "NodeAddr=localhost", "NodeAddr=no.such.host.invalid", "fail", "no address for n1"),
    ],
)
def test_what_is_found_in_slurm_conf(host: Host, check: str, old: str, new: str, verdict: str, says: str) -> None:
    host.replace(old, new)
    found = host.verdicts(check)
    assert [what for what, one in found.items() if one == verdict and says in what], found


def test_what_is_found_on_the_host(host: Host) -> None:
    host.write("etc/slurm/cgroup.conf", "CgroupPlugin=cgroup/v2\n")
    assert host.verdicts("cgroup")["cgroup.conf: ConstrainDevices is off: jobs can open every GPU"] == "fail"
    assert host.verdicts("cgroup")["CgroupPlugin=cgroup/v2, this host has cgroup v1"] == "fail"
    host.write("etc/munge/munge.key", "key", 0o644)
    assert list(host.verdicts("authentication").values()) == ["fail"]
    host.write("etc/slurm/slurmdbd.conf", "StoragePass=x", 0o644)
    assert list(host.verdicts("slurmdbd-conf").values()) == ["fail"]
    host.write("srv/prolog", "#!/bin/sh\nif /usr/bin/squeue -j 1; then true; fi\n", 0o777)
    found = host.verdicts("prolog")
    assert [what for what in found if "calls squeue" in what] and [
        what for what in found if "written by others" in what
    ]
    (host.root / "srv/state").chmod(0o777)
    assert "fail" in host.verdicts("state").values()
    (host.root / "etc/cron.d/backup").unlink()
    assert list(host.verdicts("backups").values()) == ["warn", "warn"]
    host.write("etc/slurm/plugstack.conf", "required none.so\n# optional other.so\n")
    assert [verdict for what, verdict in host.verdicts("plugins").items() if "none.so" in what] == ["fail"]


@pytest.mark.parametrize(
    ("times", "said"),
    [
        ("PrologEpilogTimeout=30", "PrologEpilogTimeout=30 is shorter than a job's preflight may take, 31 s"),
        ("PrologEpilogTimeout=31", ""),
        ("PrologTimeout=30\nPrologEpilogTimeout=120", "PrologTimeout=30 is shorter"),
        ("PrologTimeout=31\nPrologEpilogTimeout=10", ""),
        ("PrologTimeout=120", ""),
    ],
)
def test_a_prolog_has_the_time_that_a_preflight_takes(host: Host, times: str, said: str) -> None:
    host.replace("PrologEpilogTimeout=120", times)
    host.write("etc/slurm/sluice.node.json", NodePolicy(preflight=NodePreflight(when="always", bound_s=20)).render())
    found = host.verdicts("prolog")
    assert [one for one in found if said in one and found[one] == "fail"] if said else "fail" not in found.values()
    host.write("etc/slurm/sluice.node.json", NodePolicy().render())
    assert "fail" not in host.verdicts("prolog").values()
    host.write("etc/slurm/sluice.node.json", "{")
    assert [one for one, verdict in host.verdicts("prolog").items() if verdict == "warn" and "sluice.node.json" in one]


def test_whether_the_kernel_can_bound_rdma_adapters(host: Host) -> None:
    assert list(host.verdicts("rdma").values()) == ["skip"]
    host.write("sys/class/infiniband/mlx5_0/node_guid", "")
    assert host.verdicts("rdma") == {"cgroup v1: what jobs hold of RDMA adapters is not bounded": "warn"}
    host.write("sys/fs/cgroup/cgroup.controllers", "cpuset cpu memory pids\n")
    assert [what for what, one in host.verdicts("rdma").items() if one == "warn" and "no rdma controller" in what]
    host.write("sys/fs/cgroup/cgroup.controllers", "cpuset cpu memory pids rdma\n")
    assert host.verdicts("rdma") == {"rdma controller, 1 adapters": "ok"}


def test_plugins_of_slurmctld_are_looked_for_on_controllers_only(host: Host) -> None:
    host.replace("ClusterName=test", "ClusterName=test\nJobSubmitPlugins=lua\nPrioritySiteFactorPlugin=site_factor/x")
    host.replace("SlurmctldHost=localhost", "SlurmctldHost=c1(localhost)")
    found = {
        name: [answer.outcome.what for answer in examine(host.site(name), ["plugins"])]
        for name in ("c2.site.org", "login")
    }
    assert found["c2.site.org"] == ["not installed: site_factor/x, job_submit/lua"]
    assert "plugins in /srv/plugins" in found["login"][0]


def test_plugins_of_another_version_than_slurms(host: Host) -> None:
    manifest = host.write("usr/local/lib/sluice/current/manifest.json", "")
    write_manifest(manifest.parent, parse_slurm_version("24.11.5"))
    assert list(host.verdicts("plugins").values()) == ["ok"]
    write_manifest(manifest.parent, parse_slurm_version("24.11.4"))
    assert host.verdicts("plugins") == {"Sluice's plugins are for Slurm 24.11.4, this host has 24.11.5": "fail"}
    manifest.write_text("[]")
    assert list(host.verdicts("plugins").values()) == ["fail"]


@pytest.mark.parametrize(("says", "root"), [("refuses cgroup/v2", False), ("jobs that can open every GPU", True)])
def test_cgroups_of_version_2_that_slurm_cannot_use(
    host: Host, monkeypatch: pytest.MonkeyPatch, says: str, root: bool
) -> None:
    host.write("sys/fs/cgroup/cgroup.controllers", "cpu memory\n")
    host.write("proc/self/cgroup", "0::/user.slice\n")
    assert list(host.verdicts("cgroup").values()) == ["ok"]
    site = host.site()
    if root:  # as nspawn's default filter of system calls does
        site.root, site.privileged = Path("/"), True
        monkeypatch.setattr(SiteView, "host", lambda _, path: host.root / str(path).lstrip("/"))
        monkeypatch.setattr("gres_probe.doctor.ebpf.refused", lambda: errno.EPERM)
    else:
        host.write("proc/self/cgroup", "9:devices:/\n4:memory:/x\n0::/user.slice\n")
    [answer] = examine(site, ["cgroup"])
    assert answer.outcome.verdict is Verdict.FAIL and says in answer.outcome.what


def test_more_devices_than_an_old_slurms_program_can_have(host: Host) -> None:
    host.write("sys/fs/cgroup/cgroup.controllers", "cpu memory\n")
    host.write("proc/self/cgroup", "0::/user.slice\n")
    host.replace("Gres=gpu:2", "Gres=gpu:h100:7,gpu:h100_1g.10gb:16,shard:655360")
    assert list(host.verdicts("cgroup").values()) == ["ok"]
    site = host.site()
    site.version = (22, 5, 8)
    [answer] = examine(site, ["cgroup"])
    assert answer.outcome.verdict is Verdict.FAIL and "23 GPU devices" in answer.outcome.what


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_process_without_capabilities_loads_no_program_for_devices() -> None:
    program = "from gres_probe.doctor.ebpf import refused; print(refused())"
    words = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", sys.executable, "-c", program]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == str(errno.EPERM), done.stderr
    assert ebpf.refused() in (0, errno.EPERM)  # a container may forbid it to root, too


UNITS = """#!/bin/sh
cat <<EOF
Type={type}
After=sysinit.target
Id=sluice-agent.service
LoadState=loaded
UnitFileState={state}

Type=simple
After=munge.service {after} network-online.target
Id=slurmd.service
LoadState={load}
UnitFileState=enabled
EOF
"""
RIGHT = {"type": "notify", "state": "enabled", "after": "sluice-agent.service", "load": "loaded"}


@pytest.mark.parametrize(
    ("wrong", "verdict", "says"),
    [
        ({}, "ok", "slurmd.service is After=sluice-agent.service"),
        ({"after": "sluice-agent.socket"}, "fail", "the first prologs find no agent"),
        ({"type": "simple"}, "warn", "does not wait until the agent answers"),
        ({"state": "disabled"}, "fail", "not started at boot"),
        ({"load": "not-found"}, "skip", "no slurmd.service"),
    ],
)
def test_the_order_of_units(host: Host, wrong: dict[str, str], verdict: str, says: str) -> None:
    assert host.verdicts("units") == {"systemd does not run here": "skip"}
    (host.root / "run/systemd/system").mkdir(parents=True)
    host.write("usr/bin/systemctl", UNITS.format(**RIGHT | wrong), 0o755)
    [(what, found)] = host.verdicts("units").items()
    assert found == verdict and says in what


def test_who_reads_the_records_of_requests(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    assert host.verdicts("services") == {"no model services were applied": "skip"}
    host.write("etc/slurm/sluice.services.json", "{}")
    members: list[str] = []
    monkeypatch.setattr(services.grp, "getgrnam", lambda _: grp.struct_group(("sluice-gateway", "x", 991, members)))
    numbers = {"sluice-serve": 990, USER: 64030}
    known = {name: pwd.struct_passwd((name, "x", uid, uid, "", "/", "")) for name, uid in numbers.items()}
    monkeypatch.setattr(services.pwd, "getpwnam", known.__getitem__)
    members += [USER]
    [(what, found)] = host.verdicts("services").items()
    assert found == "fail" and "sluice-serve is not in group sluice-gateway" in what
    members += ["sluice-serve"]
    assert host.verdicts("services") == {f"sluice-serve and {USER} may read the records of requests": "ok"}
    del known["sluice-serve"]
    assert host.verdicts("services") == {f"{USER} may read the records of requests": "ok"}
    known.clear()
    [(what, found)] = host.verdicts("services").items()
    assert found == "skip" and "no user sluice-serve" in what


@pytest.mark.parametrize(
    ("mount", "mode", "verdict", "says"),
    [
        ("nfs4 rw,vers=4.2,hard", 0o700, "ok", "on nfs4"),
        ("nfs rw,vers=3,nolock", 0o700, "fail", "locks do not hold over hosts"),
        ("nfs4 rw,vers=4.2,local_lock=all", 0o700, "fail", "local_lock=all"),
        ("lustre rw,localflock", 0o700, "fail", "localflock"),
        ("nfs4 rw,vers=4.2,soft", 0o700, "warn", "writes may be lost"),
        ("vfat rw", 0o700, "fail", "no hard links"),
        ("ext4 rw", 0o755, "fail", "others may read it"),
    ],
)
def test_where_the_files_of_batches_are(host: Host, mount: str, mode: int, verdict: str, says: str) -> None:
    assert host.verdicts("batches") == {"no model services were applied": "skip"}
    policy: dict[str, Any] = {
        "gateways": ["https://m"], "api": "https://w", "folder": "/shared/files", "quota": 1, "keep": 1, "nice": 1,
        "program": "/b",
    }  # fmt: skip
    host.write("etc/slurm/sluice.services.json", json.dumps({"batches": policy}))
    assert host.verdicts("batches") == {"/shared/files: not on this host; gateways make it": "skip"}
    (host.root / "shared/files").mkdir(parents=True)
    (host.root / "shared/files").chmod(mode)
    host.write("proc/mounts", f"none / ext4 rw 0 0\nserver:/x {host.root}/shared {mount} 0 0\n")
    assert verdict in {found for what, found in host.verdicts("batches").items() if says in what}


def test_whether_spans_may_leave(host: Host) -> None:
    assert host.verdicts("traces") == {"the policy has no traces.endpoint": "skip"}

    def found(private: list[Any]) -> dict[str, str]:
        settings = NodeTraces(endpoint="http://receiver:4318", private=private)
        host.write("etc/slurm/sluice.node.json", NodePolicy(traces=settings).render())
        return host.verdicts("traces")

    assert set(found([]).values()) == {"ok"}
    conf = host.root / "etc/slurm/slurm.conf"
    conf.write_text(conf.read_text() + "PrivateData=jobs,users\n")
    assert [what for what, verdict in found(["users"]).items() if verdict == "fail"] == [
        "jobs are private (PrivateData=jobs,users), so that no spans are sent to http://receiver:4318"
    ]
    assert set(found(["jobs"]).values()) == {"ok"}


def test_state_that_only_one_controller_sees(host: Host) -> None:
    host.write("proc/mounts", f"none / ext4 rw 0 0\n/dev/sda1 {host.root}/srv xfs rw 0 0\n")
    assert [verdict for what, verdict in host.verdicts("state").items() if "is on xfs" in what] == ["warn"]


def test_versions_that_differ(host: Host) -> None:
    host.write("usr/bin/sinfo", '#!/bin/sh\necho "slurm 23.11.4"\n', 0o755)
    assert [verdict for what, verdict in host.verdicts("versions").items() if "slurmctld is 24.11.5" in what] == [
        "warn"
    ]
    host.write("usr/bin/sinfo", '#!/bin/sh\necho "slurm 21.08.1"\n', 0o755)
    assert "fail" in host.verdicts("versions").values()


def test_a_silent_controller_costs_its_own_checks_only(host: Host) -> None:
    host.write("usr/bin/scontrol", "#!/bin/sh\nexec sleep 60\n", 0o755)
    site = host.site()
    site.command_timeout = 1
    answers = {answer.check.name: answer.outcome.verdict for answer in examine(site)}
    assert answers["versions"] is answers["nodes"] is Verdict.SKIP
    assert answers["cgroup"] is answers["plugins"] is Verdict.OK
    assert set(answers) >= set(CHECKS) - {"slurmdbd-conf"}


def test_time_is_bounded(host: Host) -> None:
    answers = examine(host.site(), budget=-1)
    assert {answer.outcome.what for answer in answers} == {"no time left"}


def test_nothing_is_changed(host: Host) -> None:
    def look() -> dict[Path, tuple[int, int]]:
        return {p: (p.stat().st_mtime_ns, p.stat().st_mode) for p in host.root.rglob("*")}

    before = look()
    examine(host.site())
    assert look() == before


def test_a_failing_check_is_skipped(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(site: SiteView) -> list[Outcome]:
        raise PermissionError(13, "Permission denied", "/secret")

    def half(site: SiteView) -> list[Outcome]:
        return [ok("fine"), warn("but", "mend it")]

    monkeypatch.setitem(CHECKS, "secret", Check("secret", "secret", refused))
    monkeypatch.setitem(CHECKS, "half", Check("half", "half", half))
    assert [a.outcome.what for a in examine(host.site(), ["secret", "half"])] == [
        "/secret: Permission denied",
        "but",
    ]
    with pytest.raises(UsageError, match="nonsense"):
        examine(host.site(), ["nonsense"])


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sluice.main", "doctor", *arguments], capture_output=True, text=True, timeout=120
    )


def test_command(host: Host) -> None:
    conf = ["--slurm-conf", str(host.root / "etc/slurm"), "--slurm-prefix", str(host.root)]
    shown = run(*conf, "--only", "scheduling")
    assert (shown.returncode, shown.stdout.splitlines()[-1]) == (0, "1 ok, 0 warn, 0 fail, 0 skip")
    host.replace("SelectType=select/cons_tres", "SelectType=select/linear")
    failed = run(*conf, "--only", "scheduling", "-P", "-n")
    assert failed.returncode == 1
    assert failed.stdout.startswith("scheduling|fail|SelectType=select/linear")
    document = json.loads(run(*conf, "--only", "scheduling", "--json").stdout)
    assert document["schema_version"] == 1 and document["answers"][0]["verdict"] == "fail"
    assert len(run("--list").stdout.splitlines()) == len(CHECKS)
    for arguments in (["--slurm-conf", "/nonexistent"], [*conf, "--only", "nonsense"]):
        refused = run(*arguments)
        assert refused.returncode == 2 and "Traceback" not in refused.stderr


def test_every_check_has_a_line_in_the_manual() -> None:
    manual = (Path(__file__).parents[3] / "docs/doctor.md").read_text()
    assert [name for name in CHECKS if f"| {name} |" not in manual] == []
