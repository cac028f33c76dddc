"""Slurm's configuration files, read as Slurm reads them."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gres_probe.lint import Site, lint
from sluice.base.errors import SluiceError
from sluice.slurm.slurm_conf import (
    ConfigFile,
    Place,
    interpret_slurm_conf,
    parse_text,
    read_config,
    read_slurm_conf,
    slurm_hostlist,
)


def pairs(text: str) -> list[tuple[str, str, int]]:
    return [(value.key, value.text, value.place.line) for line in parse_text(text).lines for value in line.pairs]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A=1 B=2", [("A", "1", 1), ("B", "2", 1)]),
        ("A = 1\n\n  B= 2", [("A", "1", 1), ("B", "2", 3)]),
        ('A="one two" B=3', [("A", "one two", 1), ("B", "3", 1)]),
        ("A=1 # B=2", [("A", "1", 1)]),
        ("# A=1\nB=2", [("B", "2", 2)]),
        ("A=x\\#y", [("A", "x#y", 1)]),
        ("A=x\\\\#y", [("A", "x\\", 1)]),
        ("A=1 \\\n B=2\nC=3", [("A", "1", 1), ("B", "2", 1), ("C", "3", 3)]),
        ("A=1\\\n2", [("A", "12", 1)]),
        ("A=1 \\", [("A", "1", 1)]),
        ("A=1 # \\\nB=2", [("A", "1", 1), ("B", "2", 2)]),
        ("A=1\r\nB=2\r\n", [("A", "1", 1), ("B", "2", 2)]),
        ("A+=1", [("A", "1", 1)]),
        ("A=a=b", [("A", "a=b", 1)]),
    ],
)
def test_lines(text: str, expected: list[tuple[str, str, int]]) -> None:
    config = parse_text(text)
    assert pairs(text) == expected
    assert not config.faults


@pytest.mark.parametrize(
    ("text", "kind", "line"),
    [
        ("word", "syntax", 1),
        ("A=1\nB=2 word", "syntax", 2),
        ("A=1 a=2", "repeated", 1),
        ('A="x', "", 0),  # a value that begins with a quote
        ('A="a"b', "", 0),
    ],
)
def test_faults(text: str, kind: str, line: int) -> None:
    assert [(fault.kind, fault.place.line) for fault in parse_text(text).faults] == ([(kind, line)] if kind else [])


def test_includes(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "slurm.conf").write_text(
        "ClusterName=blue\ninclude sub/a.conf\nINCLUDE nodes-%c.conf\ninclude gone.conf\n"
    )
    (tmp_path / "sub/a.conf").write_text("include b.conf\n")
    (tmp_path / "sub/b.conf").write_text("\nGresTypes=gpu\n")
    (tmp_path / "nodes-blue.conf").write_text("NodeName=n1\n")
    conf = read_slurm_conf(tmp_path)
    assert conf.place("grestypes") == Place(tmp_path / "sub/b.conf", 2)
    assert list(conf.nodes) == ["n1"]
    assert [(fault.kind, fault.place.line) for fault in conf.config.faults] == [("include", 4)]


@pytest.mark.parametrize("name", ["slurm.conf", "./slurm.conf", "other.conf"])
def test_endless_includes_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "slurm.conf").write_text(f"include {name}\n")
    (tmp_path / "other.conf").write_text("include slurm.conf\n")
    with pytest.raises(SluiceError, match="includes itself"):
        read_config(tmp_path / "slurm.conf")


def test_many_includes_are_refused(tmp_path: Path) -> None:
    """Twenty levels of two includes each would be a million files."""
    for level in range(20):
        (tmp_path / f"{level}.conf").write_text(f"include {level + 1}.conf\n" * 2)
    (tmp_path / "20.conf").write_text("A=1\n")
    with pytest.raises(SluiceError, match=r"10,000 files"):
        read_config(tmp_path / "0.conf")


def test_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(SluiceError, match="No such file"):
        read_config(tmp_path / "none.conf")
    with pytest.raises(SluiceError, match="Is a directory"):
        read_config(tmp_path)


def test_default_nodes() -> None:
    conf = interpret_slurm_conf(
        parse_text(
            "NodeName=a1 CPUs=1\nNodeName=DEFAULT CPUs=4 State=UNKNOWN\n"
            "NodeName=DEFAULT cpus=8\nNodeName=b[1-2] Port=7\n"
        )
    )
    assert conf.nodes["a1"].text("state") == ""
    assert (conf.nodes["b2"].text("cpus"), conf.nodes["b2"].text("state"), conf.nodes["b2"].place.line) == (
        "8",
        "UNKNOWN",
        4,
    )


def test_addresses_of_each_node() -> None:
    nodes = interpret_slurm_conf(parse_text("NodeName=n[1-2] NodeAddr=10.0.0.[1-2] Port=[7001-7002] CPUs=4")).nodes
    assert [(n.text("nodeaddr"), n.text("port"), n.text("cpus")) for n in nodes.values()] == [
        ("10.0.0.1", "7001", "4"),
        ("10.0.0.2", "7002", "4"),
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Sockets=2 CoresPerSocket=8 ThreadsPerCore=2", (2, 8, 2)),
        ("CPUs=32", (32, 1, 1)),
        ("CPUs=32 CoresPerSocket=8 ThreadsPerCore=2", (2, 8, 2)),
        ("Boards=2 SocketsPerBoard=2 CoresPerSocket=4", (4, 4, 1)),
        ("", (1, 1, 1)),
        ("Sockets=x CoresPerSocket=0", (1, 1, 1)),
    ],
)
def test_core_counts(text: str, expected: tuple[int, int, int]) -> None:
    assert interpret_slurm_conf(parse_text(f"NodeName=n1 {text}")).nodes["n1"].core_counts() == expected


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[01-02,7],m", ["n01", "n02", "n7", "m"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("/dev/nvidia[0-1]", ["/dev/nvidia0", "/dev/nvidia1"]),
        ("n[1-", None),
        ("n]1[", None),
        ("n[a-b]", None),
        ("n[3-1]", None),
        ("n[1-99999999]", None),
        ("n[[1-2]]", None),
        ("n[1-1000]m[1-1000]o[1-1000]", None),
        ("", []),
    ],
)
def test_hostlists(text: str, names: list[str] | None) -> None:
    assert slurm_hostlist(text) == names


WORDS = st.sampled_from(
    ["NodeName=", "Name=", "gpu", "shard", "File=", "/dev/nvidia", "[0-3]", "[", "]", ",", ":", "=", '"', "\\", "#",
     "\n", " ", "Count=", "Cores=", "Links=", "-1", "9" * 30, "Gres=", "GresTypes=", "AutoDetect=", "Flags=",
     "include x", "DEFAULT", "MultipleFiles=", "Type=", "CPUs=", "Sockets=", "\x00", "\udcff", "n1", "K", "(", "%c"]
)  # fmt: skip


@settings(max_examples=300, deadline=2000)
@given(st.one_of(st.lists(WORDS, max_size=60).map("".join), st.text(max_size=200)))
def test_anything_can_be_read_and_linted(text: str) -> None:
    """Any content of the files gives no exception other than SluiceError, and no hang."""
    with suppress(SluiceError):
        slurm = interpret_slurm_conf(parse_text(text + "\nGresTypes=gpu,shard\nNodeName=n1 Gres=gpu:2,shard:8\n"))
        lint(Site(slurm, gres=parse_text(text, Path("gres.conf")), local_nodes=frozenset({"n1"})))


@settings(max_examples=100, deadline=2000)
@given(content=st.binary(max_size=300))
def test_any_bytes_can_be_read(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("conf") / "gres.conf"
    path.write_bytes(content)
    with suppress(SluiceError):
        assert isinstance(read_config(path), ConfigFile)
