"""What lint reports without a daemon: inventories, several nodes, and the command."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from machines import dgx, l40s, mixed, nics

from gres_probe.inventory import Inventory, LinkType, Problem
from gres_probe.lint import RULES, Finding, Severity, Site, Source, lint
from gres_probe.nic_groups import NICS_FILE, render
from gres_probe.writer import generate
from sluice.slurm.slurm_conf import interpret_slurm_conf, parse_text

TOP = "GresTypes=gpu,shard\nSelectType=select/cons_tres\n"


def check(slurm: str, gres: str, *inventories: Inventory, version: tuple[int, int, int] = (22, 5, 8)) -> list[Finding]:
    site = Site(
        interpret_slurm_conf(parse_text(slurm)),
        gres=parse_text(gres, Path("gres.conf")),
        inventories={inventory.node: inventory for inventory in inventories},
        version=version,
    )
    return lint(site)


def codes(findings: list[Finding]) -> list[str]:
    return sorted({finding.rule.code for finding in findings})


def against(machine: Inventory, *changes: tuple[str, str]) -> list[str]:
    """The codes for a generated configuration after changes to it, checked against the machine."""
    configuration = generate([machine])
    text = f"{TOP}{configuration.nodes_conf()}\x00{configuration.gres_conf}"
    for old, new in changes:
        assert re.search(old, text), old
        text = re.sub(old, new, text)
    return codes(check(*text.split("\x00"), machine))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([], []),
        ([("File=/dev/nvidia7", "File=/dev/nvidia9"), (r"nvidia\[0-7\]", "nvidia[0-6,9]")], ["SL061"]),
        ([("gpu:h100:8", "gpu:h100:7")], ["SL044", "SL047", "SL046", "SL050", "SL060"]),
        ([("Cores=0-55", "Cores=56-111")], ["SL064"]),
        ([("CoresPerSocket=56", "CoresPerSocket=64")], ["SL062"]),
        ([("RealMemory=2063360", "RealMemory=2064001")], ["SL063"]),
        ([("Type=h100", "Type=a100"), ("gpu:h100", "gpu:a100")], ["SL067"]),
        ([("Count=648296", "Count=800000"), ("shard:648296", "shard:800000")], ["SL066"]),
    ],
)
def test_against_the_hardware(changes: list[tuple[str, str]], expected: list[str]) -> None:
    assert against(dgx(), *changes) == sorted(expected)


def test_config_overrides_believes_slurm_conf() -> None:
    machine = dgx()
    configuration = generate([machine])
    nodes = configuration.nodes_conf().replace("RealMemory=2063360", "RealMemory=9999999")
    assert codes(check(TOP + nodes, configuration.gres_conf, machine)) == ["SL063"]
    assert codes(check(f"{TOP}SlurmdParameters=config_overrides\n{nodes}", configuration.gres_conf, machine)) == []


def test_unreadable_gpus_are_reported() -> None:
    machine = l40s()
    machine.problems = [Problem("nvidia", "lost", index=3)]
    assert against(machine) == ["SL065"]


def test_autodetect_leaves_the_lines_to_slurm() -> None:
    gres = "NodeName=l40s1 AutoDetect=nvml\nNodeName=l40s1 Name=gpu Type=l40s File=/dev/nvidia[0-3] Cores=0-3\n"
    slurm = f"{TOP}NodeName=l40s1 CoresPerSocket=8 Gres=gpu:l40s:4\n"
    assert codes(check(slurm, gres, l40s())) == ["SL025"]


def test_file_on_some_nodes_only() -> None:
    slurm = "GresTypes=gpu,nic\nNodeName=n[1-2] Gres=nic:1\n"
    findings = check(slurm, "NodeName=n1 Name=nic File=/dev/a\nNodeName=n2 Name=nic Count=1\n")
    assert [(finding.rule.code, finding.nodes) for finding in findings] == [("SL053", ("n2",))]


def one_below_a_switch(gpu: int, nic: int) -> LinkType:
    return LinkType.PCI_SWITCH if gpu == nic else LinkType.SYSTEM


def test_groups_of_gpus_and_interfaces(tmp_path: Path) -> None:
    file = tmp_path / NICS_FILE
    sites = [dgx("n1"), dgx("n2")]
    for machine in sites:
        machine.nics = nics("InfiniBand", near=one_below_a_switch)
    written = generate(sites, nics=True)
    file.write_text(written.nics_conf())
    slurm = interpret_slurm_conf(parse_text(f"GresTypes=gpu,shard,nic\n{written.nodes_conf()}"))

    def found() -> list[tuple[str, str]]:
        site = Site(slurm, inventories={one.node: one for one in sites}, nics=file)
        return [(one.rule.code, one.what) for one in lint(site) if one.rule.code >= "SL080"]

    assert found() == []
    file.write_text(render(["n1 0,1,2,3,4,5,6,7 1"]))
    groups = "the inventory 0,1,2,3,4,5,6,7 0"
    assert found() == [("SL081", f"it has 0,1,2,3,4,5,6,7 1, {groups}"), ("SL081", f"it has no line, {groups}")]
    file.write_text(file.read_text().replace("7 1", "7 2"))
    assert found() == [("SL080", "not as it was written: head, number of nodes, or checksum")]
    file.unlink()
    assert found() == [("SL080", "No such file or directory")]
    slurm.nodes.clear()
    assert found() == []


def test_types_of_interfaces(tmp_path: Path) -> None:
    """Types of the inventory's are compared with it, a site's own are not; groups are in the order of types."""
    machine = dgx("n1")
    machine.nics = nics("InfiniBand", "Ethernet", "InfiniBand", near=one_below_a_switch)
    written = generate([machine], nics=True, nic_types=True)
    file = tmp_path / NICS_FILE
    file.write_text(written.nics_conf())

    def found(gres: str) -> list[tuple[str, str]]:
        text = f"GresTypes=gpu,shard,nic\n{written.nodes_conf()}".replace("nic:ib:2,nic:roce:1", gres)
        site = Site(interpret_slurm_conf(parse_text(text)), inventories={"n1": machine}, nics=file)
        return [(one.rule.code, one.what) for one in lint(site) if one.rule.code in ("SL068", "SL080", "SL081")]

    assert found("nic:ib:2,nic:roce:1") == []
    assert found("nic:mine:3") == []
    assert found("nic:ib:1,nic:roce:2") == [("SL068", "Gres has nic ib:1, roce:2, the inventory ib:2, roce:1")]
    assert found("nic:ib:2") == [("SL068", "Gres has 2 nic, the inventory 3")]
    assert found("nic:3") == [("SL081", "it has 0,1,2,3,4,5,6,7 0,2,1, the inventory 0,1,2,3,4,5,6,7 0,1,2")]


def test_select_plugin() -> None:
    text = "GresTypes=gpu,shard\nNodeName=n1\n"
    assert codes(check(text, "")) == ["SL015"]
    assert codes(check(text, "", version=(23, 11, 0))) == []  # the default changed
    assert codes(check(text + "SelectType=select/linear\n", "", version=(23, 11, 0))) == ["SL015"]


def test_newer_slurm_knows_more() -> None:
    text = "GresTypes=gpu\nNodeName=n1 RestrictedCoresPerGPU=2 Gres=gpu:1\n"
    gres = "AutoDetect=nvidia\nName=gpu File=/dev/x\n"
    assert codes(check(text, gres)) == ["SL002", "SL022"]
    assert codes(check(text, gres, version=(24, 11, 5))) == []


def test_multiple_files_with_shards() -> None:
    slurm, gres = f"{TOP}NodeName=n1 Gres=gpu:1\n", "Name=gpu MultipleFiles=/dev/a,/dev/b\n"
    assert codes(check(slurm, gres)) == ["SL049"]
    assert codes(check(slurm, gres, version=(23, 2, 7))) == []


@pytest.mark.parametrize(
    ("version", "more_in_gres_conf"),
    [((22, 5, 11), ["SL044"]), ((23, 2, 0), []), ((23, 11, 11), []), ((24, 11, 5), [])],
)
def test_lines_without_a_type_count_for_all_types(version: tuple[int, int, int], more_in_gres_conf: list[str]) -> None:
    slurm = "GresTypes=gpu\nSelectType=select/cons_tres\nNodeName=n1 Gres=gpu:a:2\n"
    found = codes(check(slurm, "Name=gpu File=/dev/x[0-1]\n", version=version))
    assert [code for code in found if code == "SL044"] == more_in_gres_conf


BACKUP = "SlurmctldHost=c1\nSlurmctldHost=c2\n"


@pytest.mark.parametrize(
    ("gres", "head", "version", "expected"),
    [
        ("gpu:a:2,shard:8", BACKUP, (23, 11, 0), ["SL054"]),
        ("gpu:a:2,shard:8", "ControlMachine=c1\nBackupController=c2\n", (24, 11, 5), ["SL054"]),
        ("gpu:a:2,shard:8", BACKUP, (23, 2, 7), []),
        ("gpu:a:2,shard:8", "SlurmctldHost=c1\n", (24, 11, 5), []),
        ("gpu:a:2,shard:a:8", BACKUP, (24, 11, 5), []),
        ("gpu:2,shard:8", BACKUP, (24, 11, 5), []),  # then slurmd reports no types
        ("gpu:a:1,gpu:b:1,shard:8", BACKUP, (24, 11, 5), ["SL054"]),
    ],
)
def test_shards_without_a_type_and_a_backup_controller(
    gres: str, head: str, version: tuple[int, int, int], expected: list[str]
) -> None:
    findings = check(f"{head}{TOP}NodeName=n1 Gres={gres}\n", "", version=version)
    assert [code for code in codes(findings) if code == "SL054"] == expected


@pytest.mark.parametrize(
    ("gres", "lines", "expected"),
    [
        ("gpu:a:2,shard:a:8", "Name=shard Type=a Count=8 File=/dev/x[0-1]", []),
        ("gpu:a:2,shard:a:8", "Name=shard Count=8 File=/dev/x[0-1]", []),  # one made up of slurm.conf
        ("gpu:a:2,shard:a:4,shard:b:4", "Name=shard Type=a Count=4 File=/dev/x0", ["SL055"]),
        ("gpu:a:2,shard:8", "Name=shard Count=4\nName=shard Count=4 File=/dev/x0", ["SL055"]),
    ],
)
def test_shards_of_several_lines_some_without_file(gres: str, lines: str, expected: list[str]) -> None:
    text = f"Name=gpu Type=a File=/dev/x[0-1]\n{lines}\n"
    findings = check(f"{TOP}NodeName=n1 Gres={gres}\n", text, version=(24, 11, 5))
    assert [code for code in codes(findings) if code == "SL055"] == expected


def test_what_is_written_for_a_backup_controller() -> None:
    """The writer's own nodes are named where one of them has GPUs of several types."""

    def found(*inventories: Inventory, version: tuple[int, int, int]) -> list[Finding]:
        written = generate(inventories, slurm_version=version)
        return check(f"{BACKUP}{TOP}{written.nodes_conf()}", written.gres_conf, version=version)

    assert found(dgx(), l40s(), version=(24, 11, 5)) == []
    several = found(dgx(), l40s(), mixed(), version=(24, 11, 5))
    assert {one.rule.code for one in several} == {"SL054"}
    assert sorted(name for one in several for name in one.nodes) == ["dgx1", "l40s1", "mixed1"]
    assert found(dgx(), l40s(), mixed(), version=(22, 5, 8)) == []


ONE_PARTITION = "PartitionName=p Nodes=ALL\n"


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("gpu:a:2,shard:a:8", "gpu:b:2,shard:b:8", []),
        ("gpu:a:2,shard:8", "gpu:b:2,shard:8", []),
        ("gpu:a:2,shard:a:8", "gpu:b:2", []),
        ("gpu:a:2,shard:a:8", "gpu:b:2,shard:8", ["SL056"]),
        ("gpu:2,shard:8", "gpu:b:2,shard:b:8", ["SL056"]),
    ],
)
def test_shards_of_some_nodes_have_a_type(first: str, second: str, expected: list[str]) -> None:
    text = f"{TOP}NodeName=n1 Gres={first}\nNodeName=n2 Gres={second}\n{ONE_PARTITION}"
    for version, wanted in {(23, 11, 5): expected, (24, 11, 5): expected, (23, 11, 4): [], (22, 5, 8): []}.items():
        found = [one.rule.code for one in check(text, "", version=version) if one.rule.code == "SL056"]
        assert found == wanted, version


@pytest.mark.parametrize(
    ("partitions", "expected"),
    [
        ("PartitionName=a Nodes=n[1-2]\nPartitionName=b Nodes=n3\n", ""),  # as those of pools
        ("PartitionName=a Nodes=n1\nPartitionName=b Nodes=n[2-3],x\n", "b"),
        ("PartitionName=DEFAULT Nodes=n[1-3]\nPartitionName=a Nodes=n1\nPartitionName=b State=UP\n", "b"),
        ("PartitionName=default Nodes=ALL\nPartitionName=a Nodes=n1\nPartitionName=b Nodes=n3\n", ""),
        ("NodeSet=s Feature=f\nPartitionName=a Nodes=n1\nPartitionName=b Nodes=s\n", "b"),
        ("NodeSet=s Nodes=n[2-3]\nPartitionName=a Nodes=s,n1\nPartitionName=b Nodes=n1\n", "a"),
        ("PartitionName=a Nodes=n[1-\nPartitionName=b\n", ""),
    ],
)
def test_types_of_shards_are_compared_in_each_partition(partitions: str, expected: str) -> None:
    nodes = "NodeName=n[1-2] Gres=gpu:a:2,shard:a:8 Feature=e,f\nNodeName=n3 Gres=gpu:b:2,shard:8 Feature=f\n"
    findings = check(f"{TOP}{nodes}{partitions}", "", version=(24, 11, 5))
    found = [one for one in findings if one.rule.code == "SL056"]
    assert [one.what.partition(":")[0] for one in found] == ([f"partition {expected}"] if expected else [])


def test_equal_nodes_are_one_finding() -> None:
    findings = check(f"{TOP}NodeName=n[1-500] Gres=gpu:3\n", "Name=gpu File=/dev/x[0-1]\n")
    assert [(f.rule.code, len(f.nodes)) for f in findings] == [("SL045", 500), ("SL046", 500)]


def test_ten_thousand_nodes_are_quick() -> None:
    """Equal nodes are read once, so this takes a second, not minutes; the bound is far from both."""
    machines = [dgx(f"n{number}") for number in range(200)]
    configuration = generate(machines)
    slurm = TOP + configuration.nodes_conf().replace("n[0-199]", "n[0-9999]")
    start = time.process_time()
    assert check(slurm, configuration.gres_conf.replace("n[0-199]", "n[0-9999]")) == []
    assert time.process_time() - start < 60


def test_every_rule_is_whole() -> None:
    for code, rule in RULES.items():
        assert rule.code == code and rule.title and rule.remedy
        assert bool(rule.says) == (rule.source is not Source.SLUICE), code
        assert rule.severity in Severity


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sluice.main", "lint", *arguments], capture_output=True, text=True, timeout=120
    )


def test_command(tmp_path: Path) -> None:
    (tmp_path / "slurm.conf").write_text(f"{TOP}NodeName=n[1-2] Gres=gpu:2\n")
    (tmp_path / "gres.conf").write_text("Name=gpu File=/dev/x[0-1]\n")
    conf = ["--slurm-conf", str(tmp_path)]
    clean = run(*conf)
    assert (clean.returncode, clean.stdout) == (0, "")
    (tmp_path / "gres.conf").write_text("Name=gpu File=/dev/x[0-2]\n")
    assert run(*conf).returncode == 0  # a warning
    assert run(*conf, "--strict").returncode == 1
    (tmp_path / "gres.conf").write_text("\nName=gpu Foo=1\n")
    broken = run(*conf)
    assert broken.returncode == 1
    assert f"{tmp_path}/gres.conf:2: fatal SL002: unknown key: Foo is not known in gres.conf" in broken.stdout
    parsable = run(*conf, "-P", "-n", "-o", "code,line,nodes").stdout.splitlines()
    assert parsable == ["SL002|2|", "SL045|3|n[1-2]", "SL046|3|n[1-2]"]
    document = json.loads(run(*conf, "--json").stdout)
    assert document["schema_version"] == 1
    assert document["findings"][0]["code"] == "SL002"
    (tmp_path / "n1").mkdir()
    (tmp_path / "n1/gres.conf").write_text("Name=gpu File=/dev/x[0-1]\n")
    own = run(*conf, "--node-gres", str(tmp_path), "-P", "-n", "-o", "code,nodes").stdout.splitlines()
    assert own == ["SL002|", "SL045|n2", "SL046|n2"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--slurm-conf", "/nonexistent"], "no such file"),
        (["--explain", "SL999"], "no such rule"),
        (["--slurm-conf", "{}", "--node", "n9"], "is not in"),
        (["--slurm-conf", "{}", "--gres-conf", "/nonexistent"], "no such file"),
        (["--slurm-conf", "{}", "-o", "colour"], "no column"),
    ],
)
def test_bad_input(tmp_path: Path, arguments: list[str], says: str) -> None:
    (tmp_path / "slurm.conf").write_text(f"{TOP}NodeName=n1 Gres=gpu:1\n")
    done = run(*(argument.format(tmp_path) for argument in arguments))
    assert done.returncode == 2
    assert says in done.stderr and "Traceback" not in done.stderr


def test_explain() -> None:
    assert "SL026  error, slurmd: Cores are beyond" in run("--explain", "sl026").stdout
    assert len(run("--explain", "all").stdout.split("remedy:")) == len(RULES) + 1
