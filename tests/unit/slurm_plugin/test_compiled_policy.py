"""The two readers of the compiled policy, Python's and the plugins', agree."""

from __future__ import annotations

import shutil
import string
import subprocess
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from policy import compiled
from policy.compiled import Budget, ClassRule, CompiledPolicy, Global, GpuClass, Tenant, Weights
from sluice.base.errors import SluiceError

_ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def tool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plugins' parser as a program."""
    program = tmp_path_factory.mktemp("tool") / "tool_policy"
    sources = [_ROOT / "slurm_plugin/tests/tool_policy.c", _ROOT / "slurm_plugin/rules/policy.c"]
    sources += sorted((_ROOT / "native/core").glob("*.c"))
    includes = [f"-I{_ROOT / folder}" for folder in ("slurm_plugin", "native/include", "native/core")]
    command = [
        "gcc",
        "-std=gnu11",
        "-O0",
        "-march=x86-64-v2",
        "-D_GNU_SOURCE",
        *includes,
        "-o",
        program,
        *sources,
        "-lm",
    ]
    if shutil.which("gcc") is None:
        pytest.skip("no gcc")
    subprocess.run(command, check=True, timeout=300)
    return program


def understood(tool: Path, text: bytes) -> tuple[bytes | None, str]:
    """How the plugins' parser reads it, or None and why not."""
    done = subprocess.run([tool], input=text, capture_output=True, timeout=60, check=False)
    assert done.returncode in (0, 1), done
    return (done.stdout, done.stderr.decode()) if done.returncode == 0 else (None, done.stdout.decode("latin-1"))


def with_checksum(body: str) -> bytes:
    data = body.encode("latin-1")
    return data + f"checksum = crc32:{zlib.crc32(data):08x}\n".encode()


def canonical(policy: CompiledPolicy) -> dict[str, Any]:
    """Without what means the same: the order of rules and allowed classes, rules that say nothing."""
    document = policy.model_dump()
    for tenant in document["tenants"]:
        allowed = tenant["classes"]
        everything = {one["name"] for one in document["classes"]}
        tenant["classes"] = sorted(everything if allowed is None else allowed)
        rules = tenant["class_rules"].items()
        tenant["class_rules"] = {name: rule for name, rule in sorted(rules) if rule != ClassRule().model_dump()}
    return document


names = st.text(string.ascii_letters + string.digits + "._-/@:+", min_size=1, max_size=20)


def limits(most: int) -> st.SearchStrategy[int | None]:
    return st.none() | st.integers(0, most)


@st.composite
def budgets(draw: st.DrawFn) -> Budget:
    """Any budget."""
    times = sorted(draw(st.sets(st.integers(0, 10080), max_size=6)))
    hours = [
        f"{start}-{end}:{draw(st.integers(0, 10**9))}" for start, end in zip(times[::2], times[1::2], strict=False)
    ]
    nodes = draw(st.none() | st.sampled_from(["n1", "n[1-16,20],gpu-x[001-128]"]))
    return Budget(
        name=draw(names), nodes=nodes, tenant=draw(st.none() | names), watts=draw(st.integers(0, 10**9)), hours=hours
    )


@st.composite
def policies(draw: st.DrawFn) -> CompiledPolicy:
    """Any policy."""
    class_names = draw(st.lists(names, max_size=4, unique=True))
    types = draw(st.lists(names, max_size=6, unique=True))
    owners = [draw(st.sampled_from(class_names)) for _ in types] if class_names else []
    rule = st.builds(
        ClassRule,
        gpus_per_job=limits(10**7),
        run_time_s=limits(315360000),
        gpus_limit=limits(10**7),
        gpus_guaranteed=st.integers(0, 10**7),
        power_w=st.integers(0, 100_000),
        power_most_w=st.integers(0, 100_000),
    )
    chosen = st.sampled_from(class_names or ["none"])
    most = len(class_names)
    tenant = st.builds(
        Tenant,
        account=names,
        parent=st.none() | names,
        qos=st.none() | names,
        partitions=st.lists(names, max_size=3, unique=True),
        features=st.lists(names, max_size=3, unique=True),
        shares=st.integers(0, 10**6),
        tier=st.integers(0, 1000),
        default_priority=st.integers(0, 10**6),
        gpu_memory_mib_per_job=limits(1 << 40),
        gpu_memory_mib_per_gpu=limits(1 << 40),
        gpus_per_job=limits(10**7),
        run_time_s=limits(315360000),
        submissions_per_minute=limits(10**6),
        expires_s=st.integers(0, 1 << 40),
        gang=st.booleans(),
        deadline=st.booleans(),
        borrow=st.booleans(),
        classes=st.none() | st.lists(chosen, max_size=most, unique=True),
        class_rules=st.dictionaries(chosen, rule, max_size=most),
    )
    weight = st.integers(0, 10**6)
    return CompiledPolicy(
        generated_s=draw(st.integers(0, 1 << 40)),
        source=draw(st.just("") | names),
        settings=Global(
            weight=draw(st.builds(Weights, **dict.fromkeys(Weights.model_fields, weight))),
            age_full_s=draw(st.integers(1, 315360000)),
            laxity_horizon_s=draw(st.integers(1, 315360000)),
            size_full_gpus=draw(st.integers(1, 10**7)),
            starvation_s=draw(st.integers(0, 315360000)),
            placement=draw(st.sampled_from(["first-fit", "fgd", "sluice"])),
            planner_interval_ms=draw(st.integers(100, 600000)),
            gang_limit_s=draw(st.integers(1, 86400)),
            gang_incomplete_s=draw(st.integers(0, 2_592_000)),
            gang_incomplete_cancel=draw(st.booleans()),
            deadlines=draw(st.booleans()),
            memory_mib_per_gpu=draw(st.integers(0, 1 << 40)),
            gpu_shares=draw(st.booleans()),
            checkpoint_signal=draw(st.integers(1, 31)),
            checkpoint_system=draw(st.booleans()),
            journal=draw(st.booleans()),
            journal_wait_ms=draw(st.integers(1, 10000)),
            journal_warn=draw(st.booleans()),
            journal_max_mib=draw(st.integers(8, 65536)),
        ),
        classes=[
            GpuClass(
                name=name,
                gpu_types=[one for one, owner in zip(types, owners, strict=True) if owner == name] if owners else [],
                strategy=draw(st.sampled_from(["static", "dynamic", "hybrid"])),
                gpu_memory_mib=draw(st.integers(0, 1 << 40)),
                reserved_permille=draw(st.integers(0, 1000)),
                power_least_w=draw(st.integers(0, 100_000)),
                power_most_w=draw(st.integers(0, 100_000)),
                power_default_w=draw(st.integers(0, 100_000)),
                power_idle_w=draw(st.integers(0, 100_000)),
                power_start_least_w=draw(st.integers(0, 100_000)),
            )
            for name in class_names
        ],
        tenants=draw(st.lists(tenant, max_size=4, unique_by=lambda one: one.account)),
        budgets=draw(st.lists(budgets(), max_size=3, unique_by=lambda one: one.name)),
    )


@given(policy=policies())
@settings(max_examples=100)
def test_both_halves_read_what_is_written(tool: Path, policy: CompiledPolicy) -> None:
    text = policy.render().encode()
    again, warnings = compiled.parse(text)
    assert canonical(again) == canonical(policy)
    assert warnings == []
    said, why = understood(tool, text)
    assert said is not None, why
    assert canonical(compiled.parse(said)[0]) == canonical(policy)


@given(policy=policies(), data=st.data())
@settings(max_examples=200)
def test_both_halves_refuse_the_same(tool: Path, policy: CompiledPolicy, data: st.DataObject) -> None:
    """Lines taken out, doubled, swapped or changed: both read it, to the same effect, or neither does."""
    lines = policy.render().splitlines()[:-1]
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(lines) - 1))
        change = data.draw(st.sampled_from(["drop", "double", "cut", "add", "swap"]))
        if change == "drop":
            lines[at : at + 1] = []
        elif change == "double":
            lines.insert(at, lines[at])
        elif change == "swap":
            other = data.draw(st.integers(0, len(lines) - 1))
            lines[at], lines[other] = lines[other], lines[at]
        elif change == "cut":
            lines[at] = lines[at][: data.draw(st.integers(0, len(lines[at])))]
        else:
            place = data.draw(st.integers(0, len(lines[at])))
            word = data.draw(
                st.sampled_from(["0", "9", "-", " ", "]", "[", ",", ".", " = ", "class.", "\t", "\xe9", "\0"])
            )
            lines[at] = lines[at][:place] + word + lines[at][place:]
        if not lines:
            lines = [""]
    text = with_checksum("".join(f"{line}\n" for line in lines))
    said, why = understood(tool, text)
    try:
        read, warnings = compiled.parse(text)
    except SluiceError as error:
        assert said is None, f"only Python refuses it: {error}"
        return
    assert said is not None, f"only the plugins refuse it: {why}"
    assert canonical(compiled.parse(said)[0]) == canonical(read)
    assert len(warnings) == len(why.splitlines()) or len(warnings) > 16


def test_damaged_files_are_refused(tool: Path) -> None:
    text = CompiledPolicy(tenants=[Tenant(account="physics")]).render().encode()
    for broken in (b"", text[:-1], text[:50], text.replace(b"physics", b"physiks"), text + b"\n", text + text):
        assert understood(tool, broken)[0] is None
        with pytest.raises(SluiceError, match=r"checksum"):
            compiled.parse(broken)


def test_errors_name_line_and_remedy() -> None:
    body = "sluice-policy 1.0\n[tenant physics]\ngang = maybe\n"
    with pytest.raises(SluiceError, match=r"^here:3: gang: 'maybe' is not yes or no; write it again"):
        compiled.parse(with_checksum(body), source="here")
    with pytest.raises(SluiceError, match=r"policy format 2.0"):
        compiled.parse(with_checksum("sluice-policy 2.0\n"))


def test_what_this_version_does_not_know_is_a_warning() -> None:
    body = "sluice-policy 1.9\n[global]\ninvented = 1\n[tenant physics]\nquota.x = 2\n[zones of]\na = b\n"
    policy, warnings = compiled.parse(with_checksum(body))
    assert [tenant.account for tenant in policy.tenants] == ["physics"]
    assert warnings == [
        "line 3: invented: not known to this version, ignored",
        "line 5: quota.x: not known to this version, ignored",
        "line 6: [zones]: not known to this version, ignored",
    ]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Global(weight=Weights(age=5)),
        lambda: CompiledPolicy(tenants=[Tenant(account="a"), Tenant(account="a")]),
        lambda: CompiledPolicy(tenants=[Tenant(account="a", classes=["h100"])]),
        lambda: CompiledPolicy(classes=[GpuClass(name="a", gpu_types=["x"]), GpuClass(name="b", gpu_types=["x"])]),
        lambda: Tenant(account="a b"),
        lambda: Tenant(account="a\n[tenant b]"),
        lambda: Tenant(account="a", partitions=["p", "p"]),
    ],
)
def test_what_contradicts_itself_cannot_be_written(wrong: Any) -> None:
    with pytest.raises(ValidationError):
        wrong()


def test_written_in_one_step(tmp_path: Path) -> None:
    path = tmp_path / compiled.FILE_NAME
    policy = CompiledPolicy(tenants=[Tenant(account="physics", qos="high")])
    policy.write(path)
    assert compiled.load(path) == (policy, [])
    assert [entry.name for entry in tmp_path.iterdir()] == [compiled.FILE_NAME]


def test_sections_written_by_hand(tool: Path) -> None:
    text = compiled.complete("[tenant physics]\nshares = 3\n\n").encode()
    policy, _ = compiled.parse(text)
    assert policy.tenants[0].shares == 3
    assert understood(tool, text)[0] is not None
