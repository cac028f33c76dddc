"""A filled site without Slurm: rows as the controllers' daemon publishes them, served by the real application.

0 GPUs is a site on its first day, 40 a department's cluster with GPUs of several kinds, 8,192 a large hall.
"""
# ruff: noqa: E501 - tables

from __future__ import annotations

import asyncio
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import uvicorn

from gres_probe.inventory import Gpu, Health, Inventory, Link, LinkType, Nic, Partition
from policy.service_jobs import ServicePolicy, ServicesPolicy, job_name
from policy.service_use import service_documents
from sluice.base.text import one_line
from sluice.base.tokens import SCOPES
from sluice.controllerd.published_nodes import NodeRows, nodes_now
from sluice.controllerd.snapshot import job_row
from sluice.exchange.live import GpuNow, JobNow, Live
from sluice.exchange.recent_use import ServiceUse
from sluice.exchange.serve_status import ReplicaStatus, ServiceStatus, Status
from sluice.exchange.serving import State
from sluice.exchange.snapshot import Snapshot, parse_answer
from sluice.slurm.answers import Job, Node
from sluice.web.access import Viewer
from sluice.web.app import make_app
from sluice.web.login import Proxy
from sluice.web.serve import make_site

SIZES = (0, 40, 8192)
HOSTILE = '"><script>window.marker=1</script><img src=x onerror=window.marker=1>\u202e{{7*7}}'
"""What a tenant writes into everything that it can name."""
PARTS = (
    "jobs", "nodes", "tenants", "users", "cluster", "events", "health", "alerts", "policy", "inventory", "failover",
    "services", "power",
)  # fmt: skip
_HOUR = 3600
_MEMBERS = {
    "physics": ["alice", "bo", "carla"], "biology": ["dana", "emil"], "chemistry": ["farid"], "language": ["grace", "hiro", "ines"],
    "vision": ["jonas"],
}  # fmt: skip
_PARENTS = {"science": "", "learning": "", "physics": "science", "biology": "science", "chemistry": "science",
            "language": "learning", "vision": "learning"}  # fmt: skip
_NAMES = {
    "physics": ["lattice-qcd", "plasma-pic", "jet-tagging"], "biology": ["fold-batch", "gromacs-md", "cryo-em"],
    "chemistry": ["cp2k-dft", "neb-scan"], "language": ["pretrain-7b", "sft-13b", "eval-suite", "jupyter"],
    "vision": ["vit-large", "diffusion-ft"],
}  # fmt: skip
_MODELS = {
    "h100": ("NVIDIA H100 80GB HBM3", 81559, "nvidia"), "a100": ("NVIDIA A100-SXM4-40GB", 40960, "nvidia"),
    "mi300x": ("AMD Instinct MI300X", 196592, "amd"),
}  # fmt: skip
_REASONS = (
    "Priority",
    "Resources",
    "AssocGrpGRES",
    "QOSMaxGRESPerUser",
    "Dependency",
    "BeginTime",
    "Resources",
    "Priority",
)
_POLICY = {
    "version": 1,
    "classes": {"hopper": {"gpu_types": ["h100"], "gpu_memory": 81008}},
    "tenants": {
        "physics": {"shares": 20, "limits": {"gpus": 16}, "gpu_hours": 20000, "members": ["alice", "bo", "carla"]},
        "biology": {"shares": 10, "limits": {"gpus": 8}, "guarantee": {"gpus": 4}, "members": ["dana", "emil"]},
        "language": {"shares": 40, "limits": {"gpus": 24}, "members": ["grace", "hiro", "ines"]},
    },
    "services": {"deepseek-7b": {"limits": {"tokens_per_minute": 200_000, "concurrent": 256, "queued": 100}}},
}  # fmt: skip


_POLICY_TEXT = """\
# The hall's policy. Changes: sluice plan, then sluice apply, or the page.
version: 1
classes:
  hopper: {gpu_types: [h100], gpu_memory: 81008M}
tenants:
  physics:                       # until the end of the grant
    shares: 20
    limits: {gpus: 16}
    gpu_hours: 20000
    members: [alice, bo, carla]
  biology:
    shares: 10
    guarantee: {gpus: 4}
    limits: {gpus: 8}
    members: [dana, emil]
  language:
    shares: 40
    limits: {gpus: 24}
    members: [grace, hiro, ines]
"""


def _kind_of(number: int, count: int) -> str:
    if count > 5:
        return "h100"
    return ("h100", "h100", "h100", "mi300x", "a100")[number % 5]


@dataclass
class Demo:
    """What there is. `gpus`: how many; `hostile`: texts of tenants and nodes are attacks."""

    gpus: int
    hostile: bool = False
    now: float = field(default_factory=time.time)
    jobs: dict[int, Job] = field(default_factory=dict)
    nodes: dict[str, Node] = field(default_factory=dict)
    live: Live = field(default_factory=Live)

    def __post_init__(self) -> None:
        self._choose = random.Random(self.gpus)
        self._free: dict[str, list[int]] = {}
        self._shared: dict[str, list[int]] = {}
        count = self.gpus // 8
        width = max(2, len(str(count)))
        self._out = {(f"gpu{3:0{width}}", 5): self._text("XID 79: fallen off the bus")} if self.gpus else {}
        for number in range(count):
            kind, name = _kind_of(number, count), f"gpu{number + 1:0{width}}"
            self._free[name] = [index for index in range(8) if (name, index) not in self._out]
            self.nodes[name] = Node(
                name=name, address=name, hostname=name, state="idle", flags=frozenset(), reason="", cpus=128,
                cpus_allocated=0, sockets=2, cores_per_socket=32, threads_per_core=2, memory_mib=2_063_000,
                memory_allocated_mib=0, memory_free_mib=None,
                gres=f"gpu:{kind}:8(S:0-1),shard:{kind}:{8 * _MODELS[kind][1]}(S:0-1)", gres_used="",
                features=(), active_features=(kind, f"rack-{number // 16 + 1:02}" if count > 5 else f"rack-{'ab'[number > 2]}"),
                partitions=("main", "debug") if number == 0 else ("main",), weight=1, version="24.11.5",
                tres={"gres/gpu": 8}, tres_allocated={},
            )  # fmt: skip
        if count:
            drained = f"gpu{count:0{width}}"
            self._change_node(drained, flags=frozenset({"drain"}), reason=self._text("memory: replace DIMM 7 [root]"))
            self._free[drained] = []
            self._fill(max(60, self.gpus // 4))

    def _text(self, usual: str) -> str:
        return f"{usual} {HOSTILE}" if self.hostile else usual

    # ---- jobs ----

    def _fill(self, count: int) -> None:
        waits = 0
        for number in range(count):
            account = self._choose.choices(list(_MEMBERS), [4, 3, 1, 6, 2])[0]
            gpus = self._choose.choices([1, 2, 4, 8, 16], [5, 4, 4, 6, 1])[0]
            ended = number < count // 4
            places = [] if ended else self._place(gpus)
            waits += not ended and not places
            if waits > count // 3:
                break
            self._add(4001 + number, account, gpus, places, ended)
        for name in self.nodes:
            self._show_use(name)

    def _place(self, gpus: int) -> list[tuple[str, int]]:
        nodes = max(1, gpus // 8)
        each = gpus // nodes
        names = [name for name, free in self._free.items() if len(free) >= each and len(free) > 1][:nodes]
        if len(names) < nodes or self._choose.random() < 0.12:
            return []
        return [(name, self._free[name].pop(0)) for name in names for _ in range(each)]

    def _add(self, number: int, account: str, gpus: int, places: list[tuple[str, int]], ended: bool) -> None:
        choose = self._choose
        age = choose.randrange(600, 30 * _HOUR)
        run = choose.randrange(300, min(age, 12 * _HOUR)) if places or ended else 0
        state = (
            "RUNNING"
            if places
            else choose.choice(["COMPLETED"] * 4 + ["FAILED", "TIMEOUT", "CANCELLED"])
            if ended
            else "PENDING"
        )
        reason = "" if places else "None" if ended else choose.choice(_REASONS)
        names = sorted({name for name, _ in places}) or (list(self.nodes)[:1] if ended else [])
        submit = int(self.now) - age
        start = (
            submit + age - run if ended is False and places else submit + choose.randrange(60, age) if ended else None
        )
        self.jobs[number] = Job(
            id=number, array_id=None, array_tasks="", name=self._text(choose.choice(_NAMES[account])),
            user=choose.choice(_MEMBERS[account]), uid=20000, account=account, qos=account, partition="main",
            state=state, reason=self._text(reason) if reason not in ("", "None") else reason, nodes=",".join(names),
            node_count=len(names) or max(1, gpus // 8), cpus=gpus * 8, submit_time=submit, eligible_time=submit,
            start_time=start, end_time=start + choose.randrange(60, 3600) if ended and start else None,
            time_limit_s=choose.choice([one for one in (4, 8, 24, 48) if one * _HOUR > run]) * _HOUR, priority=choose.randrange(500, 3000),
            tres={"gres/gpu": gpus, "mem": gpus * 64 * 1024}, tres_per_node="", tres_per_job="", tres_per_task="",
            features="", dependency="", reservation="", comment=self._text("seed 7") if number % 9 == 0 or self.hostile else "",
            work_dir=self._text(f"/home/{account}/runs"),
        )  # fmt: skip
        for node, index in places:
            total = _MODELS[_kind_of(int(node[3:]) - 1, len(self.nodes))][1]
            percent = float(choose.choice([0, 12, 63, 88, 93, 97, 98, 99]))
            used = int(total * choose.uniform(0.2, 0.95))
            self.live.gpus.setdefault(node, {})[index] = GpuNow(percent, used, total, float(choose.randrange(38, 78)))
            self.live.jobs.setdefault(number, []).append(JobNow(node, index, percent, used))

    def add_job(self, number: int, user: str, account: str, name: str) -> None:
        """A job that was just submitted."""
        some = next(iter(self.jobs.values()))
        self.jobs[number] = replace(
            some, id=number, user=user, account=account, name=name, state="PENDING", reason="None", nodes="",
            submit_time=int(time.time()), start_time=None, end_time=None,
        )  # fmt: skip

    def _show_use(self, name: str) -> None:
        node = self.nodes[name]
        used = sorted(index for index in self.live.gpus.get(name, {}))
        total = _MODELS[node.active_features[0]][1]
        for index in range(8):
            if (name, index) not in self._out:
                self.live.gpus.setdefault(name, {}).setdefault(index, GpuNow(0.0, 4, total, 31.0))
        indices = ",".join(map(str, used))
        self._change_node(
            name,
            state="allocated" if len(used) == 8 else "mixed" if used else "idle",
            gres_used=f"gpu:{node.active_features[0]}:{len(used)}(IDX:{indices})" if used else "",
            cpus_allocated=8 * len(used),
            memory_allocated_mib=64 * 1024 * len(used),
            tres_allocated={"gres/gpu": len(used)},
        )

    def _change_node(self, name: str, **changes: Any) -> None:
        self.nodes[name] = replace(self.nodes[name], **changes)

    # ---- the rows ----

    def snapshot(self) -> Snapshot:
        """All rows, as controllerd puts them."""
        made = Snapshot()
        made.put("jobs", {str(job.id): job_row(job) for job in self.jobs.values()})
        NodeRows(made).publish(nodes_now(self.nodes.values(), self.live, self._out))
        made.put("tenants", self._tenants())
        made.put("users", self._users())
        made.put_one("cluster", "cluster", {
            "cluster": "hall" if self.gpus > 100 else "lab", "slurm_version": "24.11.5", "private_data": ["jobs", "usage"],
            "default_partition": "main", "days": [], "gpu_classes": {"hopper": ["h100"]},
        })  # fmt: skip
        made.put("events", self._events())
        made.put("health", {f"{row['node']}/{row['gpu']}/{row['state']}/{row['check']}": row for row in self._health()})
        bad = {row["node"] for row in self._health()}
        healthy = [name for name in self.nodes if name not in bad]
        made.put_one("cluster-health", "health", {
            "schema_version": 1, "mode": "act", "breaker_since": None, "left_out": 0,
            "healthy": ",".join(healthy[:200]),
        })  # fmt: skip
        made.put_one("alerts", "alerts", self._alerts())
        made.put_one("policy", "policy", _POLICY if self.gpus else {"version": 1})
        made.put_one("policy-text", "text", _POLICY_TEXT if self.gpus else "version: 1\n")
        inventories = {name: {"inventory": asdict(self.inventory(name))} for name in list(self.nodes)[:64]}
        made.put("inventory", inventories)
        made.put_one("failover", "failover", self._failover())
        made.put_one("power", "power", {"budgets": self._budgets() if self.gpus else [], "stopped": 2})
        names = {"nodes": list(self.nodes)[:64], "tenants": list(_MEMBERS)} if self.gpus else {}
        for what, users in names.items():
            made.put(f"power-{what}", {
                name: {"name": name, "gpus": 8.0, "power_w": 5200.0 - 70 * at, "bound_w": 5600.0, "capped_gpus": at % 3, "silent_gpus": at % 7 // 6}
                for at, name in enumerate(users)
            })  # fmt: skip
        made.put("services", self.services())
        made.put_one(
            "serving", "serving", {
                "address": "https://models.lab.org/v1" if self.gpus else "", "counted": True, "open_whole": True,
            }
        )  # fmt: skip
        made.put("serving-open", {
            "user/alice": {"requests": 5}, "tenant/physics": {"requests": 21}, "tenant/biology": {"requests": 2},
        } if self.gpus else {})  # fmt: skip
        made.put("serving-limits", {
            key: {"requests_per_minute": None, "tokens_per_minute": None, "concurrent": None, "queued": None, "tokens": None, **limits}
            for key, limits in {
                "user/*": {"requests_per_minute": 120, "tokens_per_minute": 60_000, "concurrent": 16},
                "tenant/*": {"tokens_per_minute": 200_000}, "tenant/physics": {"tokens_per_minute": 400_000, "tokens": 500_000_000},
            }.items()
        } if self.gpus else {})  # fmt: skip
        made.put("serving-use", {
            "user/alice": {"requests_per_minute": 31, "tokens_per_minute": 22_400},
            "tenant/physics": {"requests_per_minute": 88, "tokens_per_minute": 140_300},
        })  # fmt: skip
        for part in PARTS:
            made.put_one("parts", part, {"at": round(self.now, 2), "stale_since": None, "problem": ""})
        return made

    def _tenants(self) -> dict[str, Any]:
        rows = {}
        for name, parent in _PARENTS.items() if self.gpus else ():
            below = [one for one in _PARENTS if one == name or _PARENTS[one] == name]
            running = [job for job in self.jobs.values() if job.account in below and job.state == "RUNNING"]
            waiting = [job for job in self.jobs.values() if job.account in below and job.state == "PENDING"]
            used = sum(job.tres["gres/gpu"] for job in running)
            limit = max(8, self.gpus // (2 if parent == "" else 4))
            minutes = 60.0 * limit * 150
            members = _MEMBERS.get(name, [])
            rows[name] = {
                "name": name, "parent": parent, "members": members, "shares": "20", "qos": [name, "over"],
                "default_qos": name, "borrow": True, "guarantee": {"gres/gpu": limit // 2},
                "limits": {"GrpTRES": f"gres/gpu={limit}", "GrpTRESMins": f"gres/gpu={int(minutes)}"},
                "running": len(running), "submitted": len(running) + len(waiting), "used": {"gres/gpu": used},
                "used_minutes": {"gres/gpu": minutes * 0.62},
                "example": f"sbatch --account={name} --gres=gpu:1 job.sh",
                "budget": {
                    "gpus_now": used, "shares": "20", "gpu_limit": limit, "quota_percent": round(100 * used / limit, 1),
                    "budget_gpu_s": minutes * 60, "budget_used_percent": 62.0, "budget_left_gpu_s": minutes * 60 * 0.38,
                    "budget_projected_percent": 104.0, "budget_used_up_at": int(self.now + 6 * 24 * _HOUR),
                },
                "quota": [
                    {"what": "gres/gpu", "guaranteed": limit // 2, "limit": limit, "used": used, "left": max(0, limit - used)},
                    {"what": "gres/gpu hours", "guaranteed": None, "limit": minutes / 60, "used": round(minutes * 0.62 / 60, 1),
                     "left": round(minutes * 0.38 / 60, 1)},
                ],
                "member_use": [{
                    "user": user, "running": sum(job.user == user for job in running),
                    "submitted": sum(job.user == user for job in running + waiting),
                    "used": {"gres/gpu": sum(job.tres["gres/gpu"] for job in running if job.user == user)},
                    "used_minutes": {"gres/gpu": minutes * 0.62 / max(1, len(members))},
                } for user in members],
            }  # fmt: skip
        return rows

    def _users(self) -> dict[str, Any]:
        users = {
            user: {"level": 0, "coordinates": [], "accounts": [name]}
            for name, mine in _MEMBERS.items()
            for user in mine
        }
        return {
            **users,
            "carla": {"level": 0, "coordinates": ["physics"], "accounts": ["physics"]},
            "oper": {"level": 1, "coordinates": [], "accounts": ["science"]},
            "root": {"level": 2, "coordinates": [], "accounts": ["root"]},
        }

    def _events(self) -> dict[str, Any]:
        if not self.gpus:
            return {}
        job = next(job.id for job in self.jobs.values() if job.state == "RUNNING")
        told: list[tuple[float, str, dict[str, Any]]] = [
            (26.0, "takeover", {"host": "ctl2", "from": "ctl1", "seconds": 3.4, "lost": 0}),
            (25.5, "failover.back", {"host": "ctl1"}),
            (20.0, "drill", {"host": "ctl2", "result": "ok", "seconds": 2.9}),
            (9.2, "health.fault", {"node": "gpu03", "gpu": "5", "check": "xid", "reason": self._text("XID 79")}),
            (9.2, "health.out", {"node": "gpu03", "gpu": "5", "reason": self._text("XID 79: fallen off the bus")}),
            (9.1, "health.requeue", {"node": "gpu03", "job": job, "reason": self._text("its GPU failed")}),
            (5.0, "alert.fired", {"rule": "gpu-out", "subject": "gpu03/5", "text": self._text("1 GPU is out of service")}),
            (2.4, "policy.applied", {"user": "root", "changes": 2}),
            (0.3, "health.warning", {"node": "gpu02", "gpu": "1", "check": "ecc", "reason": "12 corrected errors an hour"}),
        ]  # fmt: skip
        rows = enumerate(told, start=1)
        return {
            str(n): {"seq": n, "time": self.now - ago * _HOUR, "kind": kind, "fields": f} for n, (ago, kind, f) in rows
        }

    def _health(self) -> list[dict[str, Any]]:
        if not self.gpus:
            return []

        def row(
            node: str, gpu: str, state: str, severity: str, check: str, hours: float, reason: str
        ) -> dict[str, Any]:
            return {"node": node, "gpu": gpu, "state": state, "severity": severity, "check": check,
                    "since": self.now - hours * _HOUR, "reason": self._text(reason), "uuid": f"GPU-{node}-{gpu}" if gpu else ""}  # fmt: skip

        names = list(self.nodes)
        return [
            row(names[2], "5", "out", "", "", 9.2, "XID 79: fallen off the bus"),
            row(names[2], "5", "fault", "fatal", "xid", 9.2, "XID 79: fallen off the bus (requeue)"),
            row(names[1], "1", "warning", "minor", "ecc", 0.3, "12 corrected errors an hour"),
            row(names[-1], "", "drained", "", "", 30.0, "memory: replace DIMM 7"),
        ]

    def _alerts(self) -> dict[str, Any]:
        alerts = [
            ("gpu-out", "firing", "gpu03/5", 9.1, 1.0, "1 GPU is out of service"),
            ("queue-wait", "waiting", "main", 0.2, 5400.0, "half of the jobs wait longer than 90 min"),
            ("node-silent", "silenced", "gpu05", 30.0, 1.0, "gpu05: no report"),
        ]
        silence = {"id": "s1", "rule": "node-silent", "subject": "gpu05", "until": self.now + 5 * _HOUR, "by": "oper",
                   "comment": self._text("memory is replaced today")}  # fmt: skip
        rows = [
            {
                "rule": rule,
                "state": state,
                "subject": subject,
                "since": self.now - hours * _HOUR,
                "value": value,
                "text": self._text(text),
            }
            for rule, state, subject, hours, value, text in (alerts if self.gpus else ())
        ]
        return {"schema_version": 1, "alerts": rows, "undelivered": 0, "silences": [silence] if self.gpus else []}

    def _budgets(self) -> list[dict[str, Any]]:
        budgets = [("hall", "*", [], 90_000, 60_000, 58_700.0, 14), ("row1", "gpu[01-02]", [], 12_000, None, 9_100.0, 0),
                   ("guests", "", ["vision"], 8_000, None, None, None)]  # fmt: skip
        return [
            {"name": name, "nodes": nodes, "accounts": accounts, "policy_w": watts, "changes": None if lowered else "Mon 18:00",
             "lowered_w": lowered, "lowered_until": self.now + _HOUR if lowered else None,
             "lowered_by": "oper" if lowered else "", "watts": lowered or watts, "measured_w": drawn,
             "bound_w": drawn and drawn + 1_200, "capped_gpus": capped, "silent_gpus": capped, "short_w": drawn and 0.0}
            for name, nodes, accounts, watts, lowered, drawn, capped in budgets
        ]  # fmt: skip

    def _failover(self) -> dict[str, Any]:
        if not self.gpus:
            return {"schema_version": 1, "hosts": ["ctl1"], "leader": "ctl1", "up": {"ctl1": True}, "lease": None, "journal": {},
                    "findings": [{"kind": "problem", "what": "slurm.conf names one controller", "remedy": "add a second SlurmctldHost line"}]}  # fmt: skip
        return {
            "schema_version": 1, "hosts": ["ctl1", "ctl2"], "leader": "ctl1", "up": {"ctl1": True, "ctl2": True},
            "lease": {"epoch": 7, "held": True, "host": "ctl1", "valid_s": 8.0, "age_s": 1.2},
            "journal": {"entries": 48211, "bytes": 9318400, "lag_ms": 3, "behind": 0},
            "findings": [
                {"kind": "ok", "what": "ctl1 leads (heartbeat 1 s old)", "remedy": ""},
                {"kind": "ok", "what": "ctl2 answers", "remedy": ""},
                {"kind": "remark", "what": "ctl2: a write into /slurm/state took 612 ms", "remedy": "check the storage"},
            ],
        }  # fmt: skip

    def audit(self, words: dict[str, Any]) -> list[dict[str, Any]]:
        """The audit log, as root's helper answers."""
        told = [
            ("alice", "web submit", "job 4061", 0.2, {"request_id": "a1b2c3d4", "gpus": "2"}),
            ("grace", "web refused", "", 0.4, {"request_id": "77aa01be", "why": self._text("more than 24 GPUs for language")}),
            ("root", "web policy-apply", "/etc/sluice/sluice.yaml", 2.4, {"request_id": "0f31c9aa", "changes": 2}),
            ("oper", "web silence", "node-silent gpu05", 5.1, {"request_id": "c0ffee00", "comment": self._text("memory is replaced today")}),
            ("dana", "web cancel", "job 4012", 7.0, {"request_id": "ba5eba11"}),
        ]  # fmt: skip
        rows = [
            {"seq": 900 - at, "time": self.now - hours * _HOUR, "user": user, "action": action, "subject": subject, "detail": detail,
             "version": "b7c2", "host": "ctl1", "prev": "0" * 64, "hash": "1" * 64}
            for at, (user, action, subject, hours, detail) in enumerate(told if self.gpus else ())
        ]  # fmt: skip
        return [
            one for one in rows
            if words["user"] in ("", one["user"]) and words["action"] in ("", one["action"])
            if words["request_id"] in ("", one["detail"]["request_id"])
        ]  # fmt: skip

    # ---- models as services ----

    def services(self) -> dict[str, Any]:
        """One that is busy, one that nobody asks, one that fails and one that is paused."""
        jobs = iter(sorted(job.id for job in self.jobs.values() if job.state == "RUNNING"))
        told: tuple[tuple[str, str, tuple[str, ...], dict[str, Any], tuple[State, ...], ServiceUse | None], ...] = (
            ("deepseek-7b", "language", ("*",), {"most": 4, "least": 1, "slots": 64},
             (State.READY, State.READY, State.STARTING, State.DRAINING), ServiceUse(312, 186_420, 99.2)),
            ("bge-m3", "physics", ("physics", "biology"), {"most": 2, "engine": "tei"}, (), ServiceUse(0, 0, None)),
            ("llava-34b", "vision", ("vision", "physics"), {"most": 1}, (State.FAILED,), ServiceUse(2, 0, 41.7)),
            ("whisper-large", "language", ("language", "physics"), {"most": 1, "engine": "python", "paused": True}, (), None),
        ) if self.gpus else ()  # fmt: skip
        made, said, now, use = {}, {}, {}, {}
        replicas = []
        for number, (name, tenant, callers, more, states, used) in enumerate(told):
            engine = {"engine": "vllm", **more}
            made[name] = ServicePolicy(
                name=name, tenant=tenant, user=f"{tenant}-serve", callers=callers, model=self._text(f"/models/{name}"),
                gres="gpu:h100:1", partition="main", first_token_s=120, **engine,
            )  # fmt: skip
            why = self._text("the engine ended: CUDA out of memory") if State.FAILED in states else ""
            busy = len(states) > 1
            now[name] = ServiceStatus(
                7 if busy else 0, 3.4 if busy else 0.0, 118 if busy else 0, 61_000 if busy else 0, 0.8 if busy else 0.0,
                len(states), why, 95.0 if why else None,
            )  # fmt: skip
            if used is not None:
                use[name] = used
            for at, state in enumerate(states):
                launch, job = f"{number:08x}{at:08x}", next(jobs)
                replicas.append(replace(
                    self.jobs[job], name=job_name(name, launch), user=f"{tenant}-serve", account=tenant, reason=""
                ))  # fmt: skip
                works = state in (State.READY, State.DRAINING)
                said[launch] = ReplicaStatus(
                    name, launch, job, "gpu01", state, 64, 38 if works else 0, 2 if works else 0, 4_210_000, 1_940_000, 0.62,
                    "tokens", self.now, self.now + 5 * _HOUR, self._text("CUDA out of memory") if state == State.FAILED else "",
                )  # fmt: skip
        policy = ServicesPolicy(services=made)
        return {row["name"]: row for row in service_documents(policy, replicas, Status(now, said), use)}

    # ---- inventories ----

    def inventory(self, name: str) -> Inventory:
        """What a node was probed to have: two sockets of four GPUs, a NIC next to each."""
        kind = self.nodes[name].active_features[0]
        model, memory, vendor = _MODELS[kind]
        gpus = [
            Gpu(
                vendor=vendor, index=index, uuid=f"GPU-{name}-{index}", model=model,
                device_file=f"/dev/nvidia{index}" if vendor == "nvidia" else f"/dev/dri/renderD{128 + index}", minor=index,
                pci_address=f"0000:{index * 16 + 7:02x}:00.0", memory_total_mib=memory, memory_usable_mib=memory - 551,
                numa_node=index // 4, cores="0-31,64-95" if index < 4 else "32-63,96-127", driver_version="570.86",
                health=Health.FAILED if (name, index) in self._out else Health.OK,
                partitioned=kind == "a100" and index < 2,
                partitions=[
                    Partition(at, f"MIG-{name}-{index}-{at}", "1g.5gb", 4864, [f"/dev/nvidia{index}"]) for at in range(7)
                ] if kind == "a100" and index < 2 else [],
                power_limit_w=700, power_limit_max_w=700, nics=[f"mlx5_{index}"],
            )
            for index in range(8)
        ]  # fmt: skip
        best = Link(LinkType.XGMI, 1) if vendor == "amd" else Link(LinkType.NVLINK, 18 if kind == "h100" else 12)
        links = [[Link(LinkType.SELF) if a == b else best for b in range(8)] for a in range(8)]
        nics = [
            Nic(
                f"mlx5_{number}", f"0000:{number * 16 + 9:02x}:00.0", number // 4,
                [Link(LinkType.PCI_SWITCH if at == number else LinkType.NUMA_NODE if at // 4 == number // 4 else LinkType.SYSTEM)
                 for at in range(8)]
                + [Link(LinkType.SELF if at == number else LinkType.NUMA_NODE if at // 4 == number // 4 else LinkType.SYSTEM)
                   for at in range(8)],
            )
            for number in range(8)
        ]  # fmt: skip
        return Inventory(
            name, gpus, links, nics=nics, sockets=2, cores_per_socket=32, threads_per_core=2, memory_mib=2_063_000,
            probed_at="2026-11-24T08:00:00Z",
        )  # fmt: skip

    def explain(self, number: int) -> dict[str, Any]:
        """Why a job waits, as controllerd answers."""
        job = self.jobs.get(number)
        if job is None:
            return {"explanation": None}
        found: dict[str, Any] = {
            "schema_version": 1, "job": str(number), "job_id": number, "account": job.account, "partition": job.partition,
            "order": {
                "as_of": self.now - 2, "site_factor": 1700, "place": 4, "slurm_terms": {"age": 12},
                "terms": [{"name": "fair-share", "weight": 1000, "value": 500.0}, {"name": "size", "weight": 800, "value": 400.0}],
                "predicted_run_s": 5400, "gpus": job.tres["gres/gpu"], "starving": False, "deadline": "none",
                "tenant": {"account": job.account, "shares": 20, "fair_share": 0.5, "gpu_hours": 4.6, "tier": 0},
            },
        }  # fmt: skip
        if number % 2:
            runs = job.state == "RUNNING"
            found["checkpoint"] = {
                "mode": "app", "saved": self.now - 400 if runs else None, "signal": "USR1", "daly": True,
                "interval_s": 1260 if runs else None, "signals": 3 if runs else 0, "answers": 2 if runs else 0,
                "save_s": 8.0 if runs else None, "mttf_s": 864_000.0 if runs else None,
            }  # fmt: skip
        else:
            found["checkpoint"] = {"mode": "no", "saved": None}
        if job.state == "PENDING":
            total = max(1, len(self.nodes))
            found["waiting"] = {
                "as_of": self.now - 2, "fits_now": False, "never": False, "nodes": total, "nodes_that_fit": 0,
                "nodes_by_reason": [{"reason": "too few GPUs free", "nodes": total - 1}, {"reason": "drained or down", "nodes": 1}],
                "would_start_now": [{"what": "gpus", "value": max(1, job.tres["gres/gpu"] // 2), "unit": ""}],
                "plan": {"planned_at": self.now - 2, "expected_start": self.now + 1850, "reason": "planned", "gang": 0},
            }  # fmt: skip
        return {"explanation": found}


class DemoSite:
    """The application over a demo, on a port of loopback."""

    def __init__(self, demo: Demo, folder: Path) -> None:
        self.demo = demo
        self._loop: Any = None
        self.site = make_site(folder / "socket", folder / "tokens.json", Proxy())
        self.snapshot = demo.snapshot()
        self.site.store.apply(parse_answer(self.snapshot.after("", 0)))
        while len(self.site.store.rows("gpus")) < demo.gpus or not self.site.store.complete:
            self.apply()
        from tests.web import demo_reports

        demo_reports.fill_series(demo, self.site.store)
        self.site.feed.ask = self._ask  # type: ignore[method-assign]
        self.site.acts.ask = self._act  # type: ignore[method-assign]

    def apply(self) -> None:
        """What was put into `snapshot` since the last call gets to viewers."""
        store = self.site.store
        changes = store.apply(parse_answer(self.snapshot.after(store.epoch, store.last)))
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.site.streams.changed, changes)

    async def _ask(self, do: str, **words: Any) -> dict[str, Any]:
        from tests.web import demo_reports

        if do == "explain":
            return self.demo.explain(int(words["job"]))
        if do == "job-page":
            return {"document": demo_reports.job_page(self.demo, str(words["job"]))}
        if do == "report":
            return {"document": demo_reports.report(self.demo, words)}
        raise AssertionError(do)

    async def _act(self, viewer: Viewer, do: str, **words: Any) -> dict[str, Any]:
        """What root's helper would answer; nothing changes but the job of a submission, which waits."""
        if do == "submit":
            number = max(self.demo.jobs, default=4000) + 1
            account = words.get("account") or sorted(viewer.accounts)[0]
            self.demo.add_job(number, viewer.user, account, str(words.get("name", "")))
            self.snapshot.put_one("jobs", str(number), job_row(self.demo.jobs[number]))
            self.apply()
            return {"schema_version": 1, "job_id": number, "messages": [f"Submitted batch job {number}"]}
        if do == "profile-summary":
            from tests.web import demo_reports

            return demo_reports.profile(int(str(words["job"]).partition("_")[0]), one_line(HOSTILE))
        if do == "what-if":
            return {
                "schema_version": 1, "accepted": True, "refused": [], "messages": [], "start_time": self.demo.now + 1850,
                "starts_now": False, "nodes": "gpu02", "partition": "main", "cpus": 64,
                "becomes": {"account": "physics", "qos": "physics", "memory": "512G"},
                "smaller": {"changed": {"gpus": "4"}, "start_time": self.demo.now, "nodes": "gpu02"},
            }  # fmt: skip
        if do == "policy-check":
            mistakes = [
                {
                    "line": 3,
                    "place": "tenants.physics.limits",
                    "what": "gpus: -1 is less than 0",
                    "remedy": "write 0 or more",
                }
            ]
            bad = "-1" in words["text"]
            return {
                "schema_version": 1,
                "mistakes": mistakes if bad else [],
                "tenants": None if bad else 3,
                "unenforced": [],
            }
        if do == "policy-plan":
            return {
                "schema_version": 1, "hash": "a" * 64, "cluster": "lab", "version": "b7c2",
                "changes": [
                    {"action": "add", "kind": "user", "name": "kim@physics", "account": "physics", "user": "kim",
                     "fields": {"fairshare": {"from": "", "to": "1"}}},
                    {"action": "change", "kind": "account", "name": "physics", "account": "physics", "user": "",
                     "fields": {"GrpTRES": {"from": "gres/gpu=16", "to": "gres/gpu=24"}, "fairshare": {"from": "20", "to": "30"}}},
                    {"action": "remove", "kind": "user", "name": "emil@biology", "account": "biology", "user": "emil", "fields": {}},
                    {"action": "change", "kind": "file", "name": "/etc/slurm/slurm.sluice.conf", "account": "", "user": "",
                     "fields": {"content": {"from": "AccountingStorageTRES=gres/gpu\n", "to": "AccountingStorageTRES=gres/gpu,gres/shard\n"}}},
                ],
                "notes": ["emil@biology has 1 running job: it is cancelled after 0 s"],
                "lines": ["+ user kim@physics", "    fairshare: 1", "~ account physics", "    GrpTRES: gres/gpu=16 -> gres/gpu=24",
                          "    fairshare: 20 -> 30", "- user emil@biology", "~ file /etc/slurm/slurm.sluice.conf",
                          "    -AccountingStorageTRES=gres/gpu", "    +AccountingStorageTRES=gres/gpu,gres/shard"],
            }  # fmt: skip
        if do == "audit":
            return {"schema_version": 1, "entries": self.demo.audit(words)}
        if do == "policy-apply":
            return {"schema_version": 1, "hash": words["hash"], "changes": 4, "left": 0, "messages": []}
        if do == "service-change":
            return {"schema_version": 1, "service": words["service"], "changes": 1, "messages": []}
        if do == "health-return":
            return {"schema_version": 1, "node": words["node"], "done": ["GPU 5: returned to service"]}
        if do in ("silence", "silence-end"):
            return {"schema_version": 1, "id": "0123456789ab", "until": self.demo.now + 4 * _HOUR}
        return {"schema_version": 1, "job": words.get("job", ""), "did": do, "messages": []}

    def token(self, user: str) -> str:
        """A token to log in with."""
        return self.site.login.tokens.create(user, SCOPES, now=time.time(), seconds=24 * _HOUR)[1]

    @contextmanager
    def serving(self) -> Iterator[str]:
        """Its address, until the block ends."""
        listening = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(
            make_app(self.site, follow=False), log_config=None, access_log=False, ws="none", timeout_graceful_shutdown=1
        )
        server = uvicorn.Server(config)

        def run() -> None:
            async def main() -> None:
                self._loop = asyncio.get_running_loop()
                await server.serve(sockets=[listening])

            asyncio.run(main())

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.02)
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(10)
