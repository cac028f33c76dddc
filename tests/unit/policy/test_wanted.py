"""What a policy requires of a cluster, what differs, and the order of changes; without Slurm."""

from __future__ import annotations

import datetime
import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest

from policy import compiled
from policy.access import NONE, OPERATOR, Caller, permitted
from policy.apply import Applier
from policy.changes import Change, compare, read_files
from policy.document import parse
from policy.edit import edited, save, set_value
from policy.importer import import_policy
from policy.live import Cluster, Live
from policy.service_jobs import CALLERS_FILE, ServicesFile
from policy.service_jobs import FILE_NAME as SERVICES_FILE
from policy.site import _given_twice, _not_in_force
from policy.state import State, UserState
from policy.wanted import Wanted, make
from sluice.base.errors import SluiceError, UsageError
from sluice.core.order import FACTOR_ONE, FairShare
from sluice.slurm.accounting import Association, Use, canonical, chunks
from sluice.slurm.answers import Node

RICH = """\
tenants:
  a:
    gpu_memory_per_gpu: 40G
    submissions_per_minute: 5
    classes: [h100]
    partitions: [main]
    per_job: {gpu_memory: 80G, classes: {h100: {gpus: 4, time: 12h}}}
    limit: {classes: {h100: {gpus: 9}}}
"""


def node(name: str, gres: str = "gpu:h100:8(S:0-1),shard:h100:648064(S:0-1)") -> Node:
    return Node(
        name=name, address=name, hostname=name, state="idle", flags=frozenset(), reason="", cpus=8, cpus_allocated=0,
        sockets=1, cores_per_socket=8, threads_per_core=1, memory_mib=1000, memory_allocated_mib=0,
        memory_free_mib=None, gres=gres, gres_used="", features=("h100",), active_features=("h100",),
        partitions=("main",), weight=1, version="",
    )  # fmt: skip


def live(folder: Path, nodes: int = 4) -> Live:
    return Live("sluice", folder, {}, State(), frozenset(), [node(f"n{n}") for n in range(nodes)], [])


def wanted(text: str, folder: Path = Path("/nowhere"), **more: object) -> Wanted:
    return make(parse("classes: {h100: {types: [h100]}}\n" + text), live(folder), **more)  # type: ignore[arg-type]


def test_defaults_that_no_node_has_for_all_its_gpus_are_noted(tmp_path: Path) -> None:
    def notes(fields: str) -> list[str]:
        policy = parse(f"classes: {{h100: {{types: [h100], {fields}}}}}")
        nodes = [node("big", "gpu:h100:2"), node("small", "gpu:h100:8"), node("other", "gpu:l4:64"), node("none", "")]
        return make(policy, Live("sluice", tmp_path, {}, State(), frozenset(), nodes, [])).notes

    assert notes("cpus_per_gpu: 1.9, memory_per_gpu: 125M") == []  # 8 CPUs, 1000 MiB
    assert notes("cpus_per_gpu: 2, memory_per_gpu: 501M") == [
        f"classes.h100: with {key} the 8 GPUs of small take {amount}: jobs that name none leave some of its GPUs unused"
        for key, amount in (
            ("cpus_per_gpu", "16 CPUs, and it has 8"),
            ("memory_per_gpu", "4008 MiB, and it has 1000"),
        )
    ]


def test_limits_become_associations_and_guarantees_qos() -> None:
    state = wanted(
        "tenants:\n"
        "  a: {limit: {gpus: 16, gpu_memory: 1G, gpu_hours: 10, classes: {h100: {gpus: 8}}}}\n"
        "  b: {parent: a, guarantee: {gpus: 4}, limit: {gpus: 8}, borrow: true, tier: 2,\n"
        "      members: [u, {name: v, max_gpus: 1}]}\n"
        "  c: {guarantee: {gpus: 3}, max_time: 1h, max_jobs: 5, max_queued: 6, per_job: {gpus: 2}}\n"
        "  d: {borrow: true}\n"
        "defaults: {max_gpus_per_user: 2, default_priority: 7}\n"
        "scheduling: {usage_period: monthly, fair_share_half_life: 0s, preemption: {min_run_time: 5m}}\n"
    ).state
    assert state.accounts["a"].limits == {
        "GrpTRES": "gres/gpu=16,gres/gpu:h100=8,gres/shard=1024",
        "GrpTRESMins": "gres/gpu=600",
    }
    assert state.accounts["c"].limits == {
        "GrpTRES": "gres/gpu=3",
        "GrpJobs": "5",
        "GrpSubmitJobs": "6",
        "MaxTRESPerJob": "gres/gpu=2",
        "MaxWall": "60",
    }
    assert state.qos["b"] == {"Priority": "2007", "MaxTRESPA": "gres/gpu=4", "Preempt": "sluice_over"}
    assert state.qos["c"] == {"Priority": "7", "Preempt": "sluice_over"}
    assert state.qos["sluice_over"] == {"PreemptMode": "requeue", "GraceTime": "30", "PreemptExemptTime": "300"}
    assert (state.accounts["d"].qos, state.accounts["d"].default_qos) == (("sluice_over",), "sluice_over")
    assert state.accounts["b"].qos == ("b", "sluice_over")
    assert state.users["b", "u"].limits == {"GrpTRES": "gres/gpu=2"}
    assert state.users["b", "v"].limits == {"GrpTRES": "gres/gpu=1"}
    # A GrpTRES of a QOS would switch off the associations' own.
    assert not any("GrpTRES" in fields for fields in state.qos.values())


@pytest.mark.parametrize(("before", "grace"), [("10s", "30"), ("2m", "120")])
def test_who_is_preempted_has_the_time_that_his_signal_needs(before: str, grace: str) -> None:
    state = wanted(
        "tenants: {a: {guarantee: {gpus: 2}, borrow: true}}\nscheduling: {preemption: {min_run_time: 5m}}\n"
        f"checkpoint: {{before_preemption: {before}}}\n"
    ).state
    assert state.qos["sluice_over"]["GraceTime"] == grace


def test_a_guarantee_is_split_between_a_tenant_and_those_below_it() -> None:
    state = wanted(
        "tenants:\n  a: {guarantee: {gpus: 8}, borrow: true}\n  b: {parent: a, guarantee: {gpus: 6}, borrow: true}\n"
    ).state
    assert state.qos["a"]["MaxTRESPA"] == "gres/gpu=2"
    assert state.qos["b"]["MaxTRESPA"] == "gres/gpu=6"


@pytest.mark.parametrize(
    ("allocation", "tenants", "reserved"),
    [
        ("strategy: dynamic", "a: {guarantee: {gpus: 9}}", {}),
        ("strategy: static", "a: {guarantee: {gpus: 9}}", {"sluice_h100_a": 2}),
        ("strategy: hybrid, reserved_ratio: 0.3", "a: {guarantee: {gpus: 9}}", {"sluice_h100": 2}),
        ("strategy: dynamic", "a: {guarantee: {gpus: 9}, lend: false}", {"sluice_h100_a": 2}),
        ("strategy: hybrid, reserved_ratio: 0.3", "a: {limit: {gpus: 9}}", {}),
    ],
)
def test_reserved_nodes(allocation: str, tenants: str, reserved: dict[str, int]) -> None:
    state = wanted(f"allocation: {{{allocation}}}\ntenants:\n  {tenants}\n").state
    assert {name: one.nodes for name, one in state.reservations.items()} == reserved


@pytest.mark.parametrize(
    "text",
    [
        "tenants:\n  a: {guarantee: {gpus: 33}}\n",
        "allocation: {strategy: hybrid, reserved_ratio: 0.3}\ntenants:\n  a: {guarantee: {gpus: 17}}\n",
        "allocation: {strategy: static}\ntenants:\n"
        + "".join(f"  t{n}: {{guarantee: {{gpus: 1}}}}\n" for n in range(5)),
    ],
)
def test_more_than_there_is_cannot_be_guaranteed(text: str) -> None:
    with pytest.raises(SluiceError, match="guaranteed"):
        wanted(text)


@pytest.mark.parametrize("tenants", [1, 2, 30])
def test_tenants_are_ordered_by_one_fair_share(tmp_path: Path, tenants: int) -> None:
    """At level place by the core's; Slurm's weighs less than one step of it, and is all there is below."""

    def weights(level: str, more: str = "") -> tuple[int, int]:
        text = f"level: {level}\ntenants: {{{', '.join(f't{n}: {{}}' for n in range(tenants))}}}\n"
        made = wanted(f"{text}scheduling: {{order: {{fair_share: 50000}}{more}}}\n", tmp_path)
        snippet = made.state.files[tmp_path / "policy.sluice.conf"]
        slurms = next(line for line in snippet.splitlines() if line.startswith("PriorityWeightFairshare="))
        return int(slurms.partition("=")[2]), made.compiled.settings.weight.fair_share

    assert all(weights(level) == (50000, 0) for level in ("off", "admit", "shadow"))
    assert weights("place", ", usage_period: monthly") == (50000, 0), "only Slurm's starts again with each period"
    slurms, ours = weights("place")
    assert ours == 50000
    assert slurms > 0
    fairshare = FairShare(tenants + 2)
    accounts = [fairshare.add(0, 1) for _ in range(tenants + 1)]  # the last one: accounts that are no tenants
    for usage, account in enumerate(accounts):
        fairshare.charge(account, 1 + usage, 0)
    fairshare.refresh(0)
    terms = [ours * fairshare.factor(account) // FACTOR_ONE for account in accounts]
    assert min(before - after for before, after in itertools.pairwise(terms)) > slurms


def test_the_fair_share_weight_is_imported_from_where_it_is(tmp_path: Path) -> None:
    here = live(tmp_path)
    made = wanted("level: place\ntenants: {a: {}, b: {}}\nscheduling: {order: {fair_share: 50000}}\n", tmp_path)
    here.config = {"PriorityWeightFairshare": "12499"}
    assert parse(import_policy(here)[0]).scheduling.weights.fair_share == 12499
    made.compiled.write(tmp_path / compiled.FILE_NAME)
    assert parse(import_policy(here)[0]).scheduling.weights.fair_share == 50000


def test_a_tenant_that_expired_submits_nothing() -> None:
    text = "tenants:\n  a: {expires: 2026-02-03, max_queued: 9}\n"
    day = datetime.datetime(2026, 2, 2, 23, 59).timestamp()
    assert wanted(text, now=day).state.accounts["a"].limits["GrpSubmitJobs"] == "9"
    assert wanted(text, now=day + 120).state.accounts["a"].limits["GrpSubmitJobs"] == "0"


@pytest.mark.parametrize(("hours", "priority"), [(70, "5"), (80, ""), (101, "")])
def test_a_used_budget_lowers_the_priority(hours: float, priority: str) -> None:
    text = (
        "tenants:\n  a: {default_priority: 5, budget: {gpu_hours: 100, at_80: lower_priority}}\n"
        "scheduling: {usage_period: monthly, fair_share_half_life: 0s}\n"
    )
    made = wanted(text, use=[Use("a", "", 0, 0, {}, {"gres/gpu": hours * 60})])
    assert made.state.qos["a"].get("Priority", "") == priority
    assert made.state.accounts["a"].limits["GrpTRESMins"] == "gres/gpu=6000"
    assert any("budget" in note for note in made.notes) == (hours >= 80)


def test_the_compiled_policy_says_what_slurm_cannot(tmp_path: Path) -> None:
    made = wanted(
        RICH,
        tmp_path,
    )
    text = made.state.files[tmp_path / compiled.FILE_NAME]
    policy, warnings = compiled.parse(text.encode())
    assert warnings == []
    (tenant,) = policy.tenants
    assert (tenant.gpu_memory_mib_per_gpu, tenant.submissions_per_minute, tenant.classes) == (40960, 5, ["h100"])
    assert tenant.class_rules["h100"] == compiled.ClassRule(gpus_per_job=4, run_time_s=43200, gpus_limit=9)
    assert policy.classes[0].gpu_memory_mib == 81008
    assert any("level is off" in note for note in made.notes)
    # What was written at any time is found again.
    (tmp_path / compiled.FILE_NAME).write_text(text)
    again = wanted(RICH, tmp_path, now=1e9)
    assert again.state.files[tmp_path / compiled.FILE_NAME] == text


def test_of_tenants_the_nearest_one_says_whether_its_jobs_are_moved(tmp_path: Path) -> None:
    made = wanted(
        "failover: {journal: true}\n"
        "compaction: {wait: 5m, classes: {h100: 2m}, factor: 1.5, empty_within: 1h, default: false, "
        "tenants: {a: true, c: false}}\n"
        "tenants: {a: {}, b: {parent: a}, c: {parent: b}, d: {}}\n",
        tmp_path,
    )
    policy, warnings = compiled.parse(made.state.files[tmp_path / compiled.FILE_NAME].encode())
    assert warnings == []
    assert {tenant.account: tenant.movable for tenant in policy.tenants} == {
        "a": True,
        "b": True,
        "c": False,
        "d": False,
    }
    settings = policy.settings
    assert (settings.compaction_wait_s, settings.compaction_factor_permille) == (300, 1500)
    assert settings.compaction_empty_within_s == 3600
    assert (settings.compaction_moves_unlisted, policy.classes[0].compaction_wait_s) == (False, 120)
    none, _ = compiled.parse(wanted(RICH, tmp_path).state.files[tmp_path / compiled.FILE_NAME].encode())
    assert none.settings.compaction_wait_s == none.settings.compaction_empty_within_s == 0


def test_a_tenants_jobs_wait_for_one_block(tmp_path: Path) -> None:
    made = wanted("tenants: {near: {one_block_for: 10m}, far: {}}\n", tmp_path)
    policy, warnings = compiled.parse(made.state.files[tmp_path / compiled.FILE_NAME].encode())
    assert warnings == []
    assert {tenant.account: tenant.one_block_s for tenant in policy.tenants} == {"near": 600, "far": 0}


# ---- changes ----


class Recorder:
    """In place of a cluster: records what would be done, in order."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.accounting = self
        self.control = self

    def session(self, lines: list[str]) -> None:
        self.done += lines

    def load(self, cluster: str, text: str) -> None:
        self.done += text.splitlines()

    def default_accounts(self, users: object) -> dict[str, str]:
        return {}


def steps(before: str, after: str) -> list[str]:
    old, new = wanted(before).state, wanted(after).state
    old.files, new.files = {}, {}
    here = live(Path("/nowhere"))
    here.state = old
    changes = compare(old, new, managed=old.accounts, managed_qos=old.qos)
    recorder = Recorder()
    Applier(recorder, here, new).run(changes)  # type: ignore[arg-type]
    return recorder.done


def test_a_limit_goes_after_its_replacement_is_there() -> None:
    done = steps(
        "tenants:\n  a: {limit: {gpus: 8}, max_jobs: 3, members: [x]}\n  b: {}\n",
        "tenants:\n  a: {limit: {gpu_memory: 1G, classes: {h100: {gpus: 4}}}, members: [x, y]}\n  c: {members: [z]}\n",
    )

    def place(word: str) -> int:
        return next(number for number, line in enumerate(done) if word in line)

    assert place("set GrpTRES=gres/gpu:h100=4,gres/shard=1024") < place("GrpTRES=gres/gpu=-1")
    assert place("User - 'y'") < place("GrpJobs=-1")
    assert place("GrpJobs=-1") < place("remove account where name=b")
    assert place("remove account where name=b") < place("remove qos where name=b")
    assert place("add qos c") < place("Account - 'c'")


def test_what_is_equal_is_no_change() -> None:
    text = "tenants:\n  a: {limit: {gpus: 8}, members: [x]}\n"
    assert steps(text, text) == []


def test_equal_changes_are_one_command() -> None:
    before = "tenants:\n" + "".join(f"  t{n}: {{}}\n" for n in range(50))
    after = "tenants:\n" + "".join(f"  t{n}: {{max_jobs: {n % 2 + 1}}}\n" for n in range(50))
    assert len(steps(before, after)) == 2


def test_chunks_fit_a_line_and_lose_nothing() -> None:
    names = [f"name{n}" for n in range(1000)]
    found = chunks(names, 100)
    assert [name for chunk in found for name in chunk] == names
    assert all(len(",".join(chunk)) <= 100 for chunk in found)


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("GrpTRES", "gres/shard=10,gres/gpu=2", "gres/gpu=2,gres/shard=10"),
        ("GrpTRES", "mem=2T", "mem=2097152"),
        ("MaxWall", "2-00:00:00", "2880"),
        ("PreemptExemptTime", "00:10:00", "600"),
        ("GrpJobs", "-1", ""),
        ("Preempt", "b,a", "a,b"),
        ("PreemptMode", "REQUEUE", "requeue"),
    ],
)
def test_one_spelling_for_each_value(option: str, value: str, said: str) -> None:
    assert canonical(option, value) == said


# ---- who may do what ----


def test_coordinators_may_change_members_and_what_is_below() -> None:
    changes = [
        Change("user", "add", "x@acme"),
        Change("account", "change", "acme"),
        Change("account", "change", "red"),
        Change("user", "add", "x@other"),
        Change("qos", "add", "q"),
        Change("file", "change", "/f"),
        Change("cluster", "change", "root"),
        Change("reservation", "remove", "r"),
    ]
    carol = Caller("carol", 1000, NONE, frozenset({"acme", "red"}))
    allowed, refused = permitted(carol, changes, ["acme"])
    assert [change.name for change in allowed] == ["x@acme", "red"]
    assert len(refused) == 6
    assert permitted(Caller("oper", 1, OPERATOR), changes, []) == (changes, [])
    assert permitted(Caller("x", 1, NONE), changes, []) == ([], changes)


# ---- the file ----


def test_edits_keep_comments_and_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "sluice.yaml"
    text = "# top\ntenants:\n  a:   # the first\n    limit: {gpus: 8}  # enough\n\n  # behind\n  b: {members: [x]}\n"
    path.write_text(text)
    path.chmod(0o640)
    source = edited(path, lambda document: set_value(document["tenants"]["a"], "limit.gpus", "9"))
    assert path.read_text() == text
    with pytest.raises(SluiceError, match="in the meantime"):
        save(source, "another text")
    assert path.read_text() == text
    save(source, text)
    assert path.read_text() == text.replace("gpus: 8", "gpus: 9")
    assert path.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(("key", "value"), [("limit.gpus", "-1"), ("limt.gpus", "3"), ("limit", "8"), ("a..b", "1")])
def test_edits_that_the_checks_refuse_change_nothing(tmp_path: Path, key: str, value: str) -> None:
    path = tmp_path / "sluice.yaml"
    path.write_text("tenants:\n  a: {limit: {gpus: 8}}\n")
    with pytest.raises(UsageError):
        edited(path, lambda document: set_value(document["tenants"]["a"], key, value))


def test_import_of_what_sluice_made_wants_the_same(tmp_path: Path) -> None:
    here = live(tmp_path)
    here.state = wanted("tenants:\n  a: {limit: {gpus: 8, gpu_memory: 1G}, members: [x], max_time: 1h}\n").state
    here.odd_users = [Association("a", "y", "main", "", "1")]
    text, notes = import_policy(here)
    again = make(parse(text), here).state
    assert again.accounts == here.state.accounts
    assert again.users == here.state.users
    assert any("partition main" in note for note in notes)


def test_qos_that_a_user_was_given_by_hand_differ_and_are_imported(tmp_path: Path) -> None:
    text = "tenants:\n  a: {members: [x]}\n"
    here = live(tmp_path)
    here.state = wanted(text, tmp_path).state
    there = UserState("1", {"qos": "high,normal", "defaultqos": "high"})
    here.state.users = {("a", "x"): there}
    found = compare(here.state, wanted(text, tmp_path).state, managed=["a"], managed_qos=["a"])
    assert [one.fields for one in found] == [{"qos": ("high,normal", ""), "defaultqos": ("high", "")}]
    applier = Applier(Cluster.at(), here, State())
    assert applier.user_clearings(found) == ["modify user where name=x account=a set qos= defaultqos=-1"]
    imported, _ = import_policy(here)
    assert make(parse(imported), here).state.users == {("a", "x"): there}


def test_a_qos_that_a_tenant_still_uses_is_not_removed() -> None:
    here = wanted("tenants:\n  a: {guarantee: {gpus: 1}, borrow: true}\n  b: {members: [x]}\n").state
    text = "tenants:\n  a: {qos: {use: [a, sluice_over], default: a}}\n  c: {members: [{name: y, slurm: {qos: b}}]}\n"
    found = compare(here, wanted(text).state, managed=["a", "b"], managed_qos=["a", "b"])
    assert not [one for one in found if (one.kind, one.action) == ("qos", "remove")]
    text = "tenants:\n  a: {qos: {use: [a], default: a}}\n"
    found = compare(here, wanted(text).state, managed=["a", "b"], managed_qos=["a", "b"])
    assert [one.name for one in found if (one.kind, one.action) == ("qos", "remove")] == ["sluice_over", "b"]


@pytest.mark.parametrize("text", ["GrpFoo: '1'", "GrpWall: '1 parent=root'", "GrpWall: ''", 'MaxJobs: "1\\nquit"'])
def test_further_options_are_those_that_slurm_has(text: str) -> None:
    for place in (f"slurm: {{{text}}}", f"members: [{{name: x, slurm: {{{text}}}}}]"):
        with pytest.raises(UsageError, match=r"slurm\."):
            parse(f"tenants:\n  a: {{{place}}}\n")


def test_cluster_is_made_without_asking_slurm() -> None:
    assert Cluster.at().client.name == "text"


def test_backfill_is_set_to_what_suits_the_planner(tmp_path: Path) -> None:
    def words(level: str, more: str = "", **config: str) -> list[str]:
        here = live(tmp_path)
        here.config = config
        made = make(parse(f"level: {level}\ntenants: {{a: {{}}, b: {{{more}}}}}\n"), here)
        snippet = made.state.files[tmp_path / "policy.sluice.conf"]
        lines = [line for line in snippet.splitlines() if line.startswith("SchedulerParameters=")]
        return [word for line in lines for word in line.partition("=")[2].split(",")]

    assert words("shadow") == []
    ours = words("place")
    assert {"bf_interval=30", "bf_continue", "bf_yield_interval=500000", "bf_window=1440"} <= set(ours)
    assert words("place", "max_time: 7d")[-1] == "bf_window=10080"
    # what the site has set stays, what Sluice sets is there once
    theirs = words("place", SchedulerParameters="defer,bf_interval=5,bf_continue,nohold_on_prolog_fail")
    assert theirs == ["defer", "nohold_on_prolog_fail", *ours]
    assert words("place", SchedulerParameters="(null)") == ours


@pytest.mark.parametrize("word", ["", "off", "admit", "shadow", "place", "\x1b[2J"])
def test_a_policy_without_a_level_follows_the_one_that_is_asked_for(tmp_path: Path, word: str) -> None:
    tenants = "tenants: {a: {}, b: {}}\nscheduling: {order: {fair_share: 50000}}\n"
    if word:
        (tmp_path / "sluice.level").write_text(f"{word}\n")
    level = word if word.isalpha() else "off"
    ours = wanted(tenants, tmp_path)
    files = dict(wanted(f"level: {level}\n{tenants}", tmp_path).state.files)
    assert files.pop(tmp_path / "sluice.level") == f"{level}\n"
    assert {path.name for path in files} == {path.name for path in ours.state.files}
    snippet = ours.state.files[tmp_path / "policy.sluice.conf"]
    assert snippet == files[tmp_path / "policy.sluice.conf"]
    assert ("SchedulerParameters=" in snippet) == (level == "place")
    assert ours.compiled.settings.weight.fair_share == (50000 if level == "place" else 0)


def test_large_jobs_first(tmp_path: Path) -> None:
    settings = wanted("tenants: {a: {}}\nscheduling: {order: {size: 1000}}\n", tmp_path).compiled.settings
    assert (settings.weight.size, settings.size_full_gpus) == (1000, 8)
    assert wanted("tenants: {a: {}}\n", tmp_path).compiled.settings.weight.size == 0


def test_timeouts_go_with_the_journal_and_a_backup_controller(tmp_path: Path) -> None:
    two = {"SlurmctldHost[0]": "ctl1", "SlurmctldHost[1]": "ctl2", "SlurmdTimeout": "300 sec"}

    def found(failover: str, config: dict[str, str]) -> list[str]:
        here = live(tmp_path)
        here.config = config
        made = make(parse(f"failover: {{{failover}}}\ntenants: {{a: {{}}}}\n"), here)
        text = made.state.files[tmp_path / "policy.sluice.conf"]
        return [line for line in text.splitlines() if "Timeout" in line]

    assert found("", two) == []
    assert found("journal: true", {"SlurmctldHost[0]": "ctl1"}) == []
    assert found("journal: true", two) == ["SlurmctldTimeout=6", "SlurmdTimeout=300"]
    assert found("journal: true", two | {"SlurmdTimeout": "900 sec"})[1] == "SlurmdTimeout=900"
    assert found("journal: true", two | {"SlurmdTimeout": "60 sec"})[1] == "SlurmdTimeout=300"
    chosen = "journal: true, controller_timeout: 14s, node_timeout: 10m"
    assert found(chosen, two) == ["SlurmctldTimeout=14", "SlurmdTimeout=600"]
    assert found("controller_timeout: 30s", {}) == ["SlurmctldTimeout=30"]
    for bad in ("controller_timeout: 4s", "node_timeout: 5s", "controller_timeout: 2h"):
        with pytest.raises(UsageError, match="failover"):
            found(bad, two)


def test_what_slurm_conf_sets_in_addition_to_the_snippet_is_reported(tmp_path: Path) -> None:
    here = live(tmp_path)
    here.config = {"SlurmctldHost[0]": "a", "SlurmctldHost[1]": "b", "SlurmctldTimeout": "6 sec"}
    made = make(parse("failover: {journal: true}\ntenants: {a: {}}\n"), here)
    conf, snippet = tmp_path / "slurm.conf", tmp_path / "policy.sluice.conf"
    snippet.write_text(made.state.files[snippet])
    conf.write_text("SlurmctldTimeout=120\n")
    assert _given_twice(here, made) == []  # the snippet is not included
    conf.write_text(
        "SlurmctldTimeout=120\nInclude policy.sluice.conf\nInclude more.conf\n"
        "PartitionName=p Nodes=ALL PreemptMode=off PriorityType=x\n"
    )
    (tmp_path / "more.conf").write_text("# of the site\nslurmdtimeout=60\n")
    first, second = _given_twice(here, made)
    assert first.startswith(f"{conf}:1: remove SlurmctldTimeout=120: SlurmctldTimeout=6 is in policy.sluice.conf")
    assert second.startswith(f"{tmp_path / 'more.conf'}:2: remove slurmdtimeout=60: SlurmdTimeout=300")
    assert "SlurmctldTimeout" not in _not_in_force(here, made)[0]
    assert "SlurmdTimeout is unset, wanted 300" in _not_in_force(here, made)[0]


def test_a_setting_in_force_is_found_however_scontrol_spells_it(tmp_path: Path) -> None:
    here = live(tmp_path)
    made = make(parse("tenants: {a: {}}\n"), here)
    here.config = {"PriorityWeightFairShare": "100000", "PriorityUsageResetPeriod": ""}  # NONE is read as unset
    missing = _not_in_force(here, made)[0]
    assert "PriorityWeightFairshare" not in missing and "PriorityUsageResetPeriod" not in missing
    assert "PriorityWeightQOS is unset" in missing


SERVED = (
    "tenants:\n  a: {members: [x]}\nservices:\n  llm: {tenant: a, user: x, engine: vllm, model: /m}\n"
    "serving: {users: {x: {concurrent: 3}}}\n"
)


def test_services_are_written_for_those_who_run_them_and_for_nobody_where_there_are_none(tmp_path: Path) -> None:
    services, callers = tmp_path / SERVICES_FILE, tmp_path / CALLERS_FILE
    assert services not in wanted("tenants: {a: {members: [x]}}\n", tmp_path).state.files
    files = wanted(SERVED, tmp_path).state.files
    assert '"llm"' in files[services] and '"concurrent": 3' in files[callers]
    here = live(tmp_path)
    changes = [Change("file", "add", str(path), {"content": ("", files[path])}) for path in (services, callers)]
    Applier(Recorder(), here, State()).run(changes)  # type: ignore[arg-type]
    assert [path.stat().st_mode & 0o777 for path in (services, callers)] == [0o644, 0o640]
    assert ServicesFile(services).current().accounts == {"x": ("a",)}
    again = wanted(SERVED, tmp_path).state
    here.state.files = read_files(again.files)
    assert not [
        one
        for one in compare(here.state, again, managed=[], managed_qos=[])
        if one.name in (str(services), str(callers))
    ]
    removed = wanted("tenants: {a: {members: [x]}}\n", tmp_path).state.files
    assert '"llm"' not in removed[services], "replicad sees that it is gone"


def test_the_file_of_callers_is_given_to_replicads_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[str, int]] = []
    monkeypatch.setattr("policy.apply.pwd.getpwnam", lambda name: SimpleNamespace(pw_gid=4711))
    monkeypatch.setattr("policy.apply.os.chown", lambda path, uid, gid: given.append((path.name, gid)))
    files = {tmp_path / name: name for name in (SERVICES_FILE, CALLERS_FILE)}
    changes = [Change("file", "add", str(path), {"content": ("", text)}) for path, text in files.items()]
    Applier(Recorder(), live(tmp_path), State()).run(changes)  # type: ignore[arg-type]
    assert given == [(CALLERS_FILE, 4711)]


def test_what_this_user_may_not_read_is_no_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, **_: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuse)
    assert read_files({tmp_path / "a": "text"}) == {tmp_path / "a": "text"}
