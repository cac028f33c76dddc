"""The text backend with prepared output, such as no correct daemon prints."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.base.errors import SluiceError, UsageError
from sluice.slurm import Commands, connect
from sluice.slurm.answers import UNLIMITED, parse_tres
from sluice.slurm.text import _JOB_FIELDS, TextClient, node_state, parse_duration


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    """A Slurm prefix whose commands print what files of their name hold."""
    (tmp_path / "bin").mkdir()
    for name in ("squeue", "sinfo", "scontrol", "sacct"):
        script = tmp_path / "bin" / name
        script.write_text(
            f'#!/bin/sh\necho "$0 $@ TIME=$SLURM_TIME_FORMAT SQ=$SQUEUE_FORMAT" >>"{tmp_path}/calls"\n'
            f'echo "$SQUEUE_FORMAT2" >>"{tmp_path}/shapes"\n'
            f'cat "{tmp_path}/{name}.out"; exit "$(cat "{tmp_path}/{name}.rc" 2>/dev/null || echo 0)"\n'
        )
        script.chmod(0o755)
    return tmp_path


def test_prefix_and_environment(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's own formats do not reach the commands."""
    monkeypatch.setenv("SQUEUE_FORMAT", "%i")
    (fake / "squeue.out").write_text("")
    assert connect(prefix=fake).jobs() == []
    assert f"{fake}/bin/squeue --noheader --all" in (fake / "calls").read_text()
    assert (fake / "calls").read_text().endswith("TIME=%s SQ=\n")


def test_cut_off_answer(fake: Path) -> None:
    (fake / "squeue.out").write_text("1 jobs, but without any separator")
    with pytest.raises(SluiceError, match="cut off"):
        connect(prefix=fake).jobs()


def squeue_prints(fake: Path, rows: list[list[str]]) -> TextClient:
    """A client whose squeue gives these rows, with the separators that the client asks for."""
    client = TextClient(Commands(prefix=fake))
    mark, last = client._marks
    (fake / "squeue.out").write_text("".join(mark.join(row) + last + "\n" for row in rows), encoding="utf-8")
    return client


def a_row(number: int, **words: str) -> list[str]:
    usual = {"JobID": str(number), "State": "RUNNING", "NumNodes": "1", "NumCPUs": "2", "tres-alloc": "cpu=2"}
    return [(usual | words).get(field, "") for field in _JOB_FIELDS]


def test_each_job_whatever_users_write(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names with line breaks, separators and numbers make no jobs, wherever the answer is cut into pieces."""
    names = ["\n17\x1f", "\x1f0123456789abcdef\x1f\n18", "a\nb", "", "\u00fc" * 50, "\n"]
    rows = [a_row(number, Name=name, Comment=name, admin_comment=name) for number, name in enumerate(names, 1)]
    client = squeue_prints(fake, rows)
    for piece in (1, 7, 64, 1 << 20):
        monkeypatch.setattr("sluice.base.run._PIECE", piece)
        found = [one.job() for one in client.each_job()]
        assert [job.id for job in found] == [1, 2, 3, 4, 5, 6]
        assert [job.name for job in found] == names


def test_each_job_shows_what_changed(fake: Path) -> None:
    client = squeue_prints(fake, [a_row(1), a_row(2)])
    before = {one.id: one.print_ for one in client.each_job()}
    assert before == {one.id: one.print_ for one in client.each_job()}
    mark, last = client._marks
    rows = [a_row(1), a_row(2, Reason="Resources")]
    (fake / "squeue.out").write_text("".join(mark.join(row) + last + "\n" for row in rows))
    now = {one.id: one.print_ for one in client.each_job()}
    assert now[1] == before[1] and now[2] != before[2]


def test_each_job_of_an_answer_that_is_cut_off(fake: Path) -> None:
    client = squeue_prints(fake, [a_row(1), a_row(2)])
    whole = (fake / "squeue.out").read_bytes()
    (fake / "squeue.out").write_bytes(whole[:-9])
    with pytest.raises(SluiceError, match="cut off"):
        list(client.each_job())
    (fake / "squeue.rc").write_text("1")
    (fake / "squeue.out").write_bytes(whole)
    with pytest.raises(SluiceError, match="^squeue: exit status 1"):
        list(client.each_job())


def test_failing_command_says_why(fake: Path) -> None:
    (fake / "squeue.out").write_text("slurm_load_jobs error: Unable to contact slurm controller\n")
    (fake / "squeue.rc").write_text("1")
    with pytest.raises(SluiceError, match="^squeue: slurm_load_jobs error"):
        connect(prefix=fake).jobs()


def test_a_job_that_slurmctld_does_not_know_is_none(fake: Path) -> None:
    (fake / "squeue.out").write_text("slurm_load_jobs error: Invalid job id specified\n")
    (fake / "squeue.rc").write_text("1")
    assert connect(prefix=fake).jobs(ids=[7], states=["all"]) == []


def test_a_failing_command_is_named_once(fake: Path) -> None:
    """Slurm's commands begin each line with their own name, and some say the same twice."""
    (fake / "squeue.out").write_text("squeue: error: Invalid user: x\nsqueue: error: Invalid user: x\nsqueue: more\n")
    (fake / "squeue.rc").write_text("1")
    with pytest.raises(SluiceError, match="^squeue: Invalid user: x; more$"):
        connect(prefix=fake).jobs()


def test_node_records(fake: Path) -> None:
    (fake / "scontrol.out").write_text(
        "NodeName=n1 CoresPerSocket=8 CPUTot=16 State=DOWN*+DRAIN Gres=(null) AvailableFeatures=(null) RealMemory=100 "
        "FreeMem=N/A Weight=1 CfgTRES=cpu=16,mem=1.50G AllocTRES= Reason=no State=IDLE here [root@1700000000]"
        "        second line Comment=Reason=x\n"
    )
    [node] = connect(prefix=fake).nodes()
    assert (node.state, node.flags) == ("down", frozenset({"drain", "not_responding"}))
    assert node.reason == "no State=IDLE here\nsecond line"
    assert (node.memory_free_mib, node.features, node.gres) == (None, (), "")
    assert node.tres == {"cpu": 16, "mem": 1536}


def test_nodes_that_are_as_before_are_not_read_again(fake: Path) -> None:
    """A listing of a thousand nodes, of which a few change, is made each second."""
    client, out = connect(prefix=fake), fake / "scontrol.out"
    out.write_text("NodeName=n1 State=IDLE\nNodeName=n2 State=IDLE\n")
    first, second = client.nodes()
    assert client.nodes("n1") == [first, second]
    out.write_text("NodeName=n1 State=MIXED\nNodeName=n2 State=IDLE\n")
    changed, same = client.nodes()
    assert changed.state == "mixed" and same is second
    out.write_text("NodeName=n1 State=IDLE\n")
    assert client.nodes() == [first]


def test_accounting_options(fake: Path) -> None:
    (fake / "sacct.out").write_text("")
    assert connect(prefix=fake).accounting_jobs(start=0, users=["a", "b"], states=["COMPLETED"]) == []
    call = (fake / "calls").read_text()
    assert (
        "--starttime=19" in call and "--user=a,b" in call and "--state=COMPLETED" in call and "--allusers" not in call
    )


@pytest.mark.parametrize("user", ["", "a,b"])
def test_bad_filters(fake: Path, user: str) -> None:
    with pytest.raises(SluiceError, match="comma"):
        connect(prefix=fake).jobs(users=[user])
    assert not (fake / "calls").exists()


def test_bad_sites(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        connect(conf=tmp_path)
    with pytest.raises(UsageError, match="no sinfo"):
        connect(prefix=tmp_path).version()
    with pytest.raises(UsageError, match="unknown"):
        connect(backend="rest")


def test_conf_may_be_the_folder(tmp_path: Path) -> None:
    (tmp_path / "slurm.conf").touch()
    commands = Commands(conf=tmp_path)
    assert commands.environment()["SLURM_CONF"] == str(tmp_path / "slurm.conf")
    assert "SLURM_CONF" in os.environ or "SLURM_CONF" not in Commands().environment()


def test_ping(fake: Path) -> None:
    (fake / "scontrol.out").write_text("Slurmctld(primary) at c1 is UP\nSlurmctld(backup) at c2 is DOWN\n***\n")
    (fake / "scontrol.rc").write_text("1")
    assert [(c.host, c.role, c.up) for c in connect(prefix=fake).ping()] == [
        ("c1", "primary", True),
        ("c2", "backup", False),
    ]
    (fake / "scontrol.out").write_text("slurm_ping: no\n")
    with pytest.raises(SluiceError, match="slurm_ping"):
        connect(prefix=fake).ping()


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("UNLIMITED", UNLIMITED),
        ("1-02:03:04", 93784),
        ("02:03:04", 7384),
        ("30:00", 1800),
        ("NOT_SET", None),
        ("", None),
    ],
)
def test_durations(text: str, seconds: int | None) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("", {}),
        (
            "cpu=2,mem=1000M,node=1,billing=2,gres/gpu:h100=2",
            {"cpu": 2, "mem": 1000, "node": 1, "billing": 2, "gres/gpu:h100": 2},
        ),
        ("mem=1.50T,gres/shard=2K", {"mem": 1572864, "gres/shard": 2048}),
        ("mem=2P", {"mem": 2 << 30}),
        ("billing=1.5", {"billing": 1}),
    ],
)
def test_tres(text: str, values: dict[str, int]) -> None:
    assert parse_tres(text) == values


@given(st.text(max_size=60))
def test_any_tres_is_read_or_refused(text: str) -> None:
    with suppress(SluiceError):
        assert all(isinstance(value, int) for value in parse_tres(text).values())


@pytest.mark.parametrize(
    ("words", "state", "flags"),
    [
        (["IDLE"], "idle", set()),
        (["MIXED", "DRAIN"], "mixed", {"drain"}),
        (["DOWN*"], "down", {"not_responding"}),
        (["IDLE~#"], "idle", {"powered_down", "powering_up"}),
        ([], "", set()),
    ],
)
def test_states(words: list[str], state: str, flags: set[str]) -> None:
    assert node_state(words) == (state, flags)


def test_a_name_cannot_forge_a_separator(fake: Path) -> None:
    """The separator is another one for each call, and no option: /proc/PID/cmdline shows those to all."""
    (fake / "squeue.out").write_text("")
    client = TextClient(Commands(prefix=fake))
    client.jobs()
    client.jobs()
    first, second = (fake / "shapes").read_text().splitlines()
    assert first.split("\x1f")[1] != second.split("\x1f")[1]
    assert "\x1f" not in (fake / "calls").read_text()


def test_a_listing_that_hangs_or_fails_says_so(fake: Path) -> None:
    script = fake / "bin" / "squeue"
    script.write_text("#!/bin/sh\necho 'squeue: error: Unable to contact slurm controller' >&2\nexit 1\n")
    with pytest.raises(SluiceError, match="^squeue: Unable to contact"):
        list(TextClient(Commands(prefix=fake)).each_job())
    script.write_text("#!/bin/sh\nexec sleep 30\n")
    with pytest.raises(SluiceError, match="no answer within 0.5 s"):
        list(TextClient(Commands(prefix=fake, timeout=0.5)).each_job())


def test_nodes_that_backfill_has_chosen(fake: Path) -> None:
    (fake / "squeue.out").write_text("7|n[1-2]\n8|\n9|(null)\n")
    assert TextClient(Commands(prefix=fake)).planned_nodes() == {7: "n[1-2]"}
