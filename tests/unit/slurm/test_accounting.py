"""What sacctmgr and scontrol say of accounts, and what goes to sacctmgr."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from sluice.base.errors import SluiceError
from sluice.slurm.accounting import Accounting

USE = """\
Current Association Manager state

Association Records

ClusterName=sluice Account=one UserName= Partition= Priority=0 ID=45
    SharesRaw/Norm/Level/Factor=3/0.08/12/0.00
    UsageRaw/Norm/Efctv=582.57/1.00/1.00
    ParentAccount=root(1) Lft=2 DefAssoc=No
    GrpJobs=5(2) GrpJobsAccrue=N(64)
    GrpSubmitJobs=N(64) GrpWall=N(4.85)
    GrpTRES=cpu=N(7),mem=N(0),gres/gpu=8(4),gres/gpu:h100=N(4),gres/shard=N(0)
    GrpTRESMins=cpu=N(9),mem=N(48),gres/gpu=600(19),gres/gpu:h100=N(19)
    MaxJobs= MaxJobsAccrue= MaxSubmitJobs= MaxWallPJ=
ClusterName=sluice Account=one UserName=alice(2001) Partition= Priority=0 ID=47
    SharesRaw/Norm/Level/Factor=1/1.00/1/0.10
    GrpJobs=N(0) GrpJobsAccrue=N(64)
    GrpTRES=cpu=N(0),gres/gpu=2(1)
"""


class FakeCommands:
    """Gives prepared answers, and keeps what was sent."""

    def __init__(self, output: str = "", returncode: int = 0) -> None:
        self.answer = output
        self.returncode = returncode
        self.sent: list[tuple[tuple[str, ...], str | None]] = []

    def output(self, *words: str) -> str:
        self.sent.append((words, None))
        return self.answer

    def run(self, *words: str, input_text: str | None = None, **more: Any) -> subprocess.CompletedProcess[str]:
        self.sent.append((words, input_text))
        return subprocess.CompletedProcess(words, self.returncode, self.answer, "")


def accounting(output: str = "", returncode: int = 0) -> tuple[Accounting, FakeCommands]:
    commands = FakeCommands(output, returncode)
    return Accounting(commands), commands  # type: ignore[arg-type]


def test_use_of_accounts_and_members() -> None:
    account, member = accounting(USE)[0].use(["one"])
    assert (account.account, account.user, account.running, account.submitted) == ("one", "", 2, 64)
    assert account.tres["gres/gpu"] == 4
    assert account.tres_minutes["gres/gpu"] == 19
    assert (account.shares_raw, account.usage_raw) == (3, 582.57)
    assert (member.user, member.tres["gres/gpu"]) == ("alice", 1)


def test_associations_with_what_is_set_there() -> None:
    row = "red|bob||acme|3|gres/shard=10,gres/gpu=8||||||gres/gpu=2||||||0|b,a|a"
    (one,) = accounting(row + "\n")[0].associations("sluice")
    assert (one.account, one.user, one.parent, one.shares) == ("red", "bob", "acme", "3")
    assert one.limits["GrpTRES"] == "gres/gpu=8,gres/shard=10"
    assert one.limits["MaxTRESPerJob"] == "gres/gpu=2"
    assert "Priority" not in one.limits
    assert (one.qos, one.default_qos) == (("a", "b"), "a")


def test_a_description_may_hold_the_separator() -> None:
    found = accounting("red|carol,dave|uni|a|b\n")[0].accounts()["red"]
    assert (found.description, found.organization, found.coordinators) == ("a|b", "uni", frozenset({"carol", "dave"}))


def test_an_answer_that_is_cut_off_is_refused() -> None:
    with pytest.raises(SluiceError, match="fields"):
        accounting("red|bob\n")[0].associations("sluice")


def test_a_session_names_the_command_that_failed() -> None:
    said = (
        "sacctmgr: add qos a\n Adding QOS(s)\nsacctmgr: modify account where name=x set GrpJobs=1\n Nothing modified\n"
    )
    with pytest.raises(SluiceError, match=r"modify account where name=x set GrpJobs=1: Nothing modified"):
        accounting(said, 1)[0].session(["add qos a", "modify account where name=x set GrpJobs=1"])


@pytest.mark.parametrize("line", ["add qos a\nadd qos b", "!!", "# x", "add qos \x1b[0m"])
def test_no_line_becomes_two_or_something_else(line: str) -> None:
    client, commands = accounting()
    with pytest.raises(SluiceError):
        client.session([line])
    assert commands.sent == []


def test_sessions_and_files_go_through_standard_input() -> None:
    client, commands = accounting("ok\n")
    client.session(["add qos a"])
    client.load("sluice", "Parent - 'root'\n")
    (first, text), (second, file) = commands.sent
    assert (first[0], text) == ("sacctmgr", "add qos a\nquit\n")
    assert "file=/dev/stdin" in second
    assert file == "Cluster - 'sluice'\nParent - 'root'\n"
