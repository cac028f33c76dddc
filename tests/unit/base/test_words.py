import sys

import pytest

from sluice.base.errors import UsageError
from sluice.base.hostlist import expand, fold
from sluice.base.run import CommandError, run_command
from sluice.base.sizes import format_mib, parse_mib


@pytest.mark.parametrize(
    ("text", "mib"),
    [("10G", 10240), ("512M", 512), ("800MB", 800), ("1.5T", 1572864), ("7", 7), ("1k", 1), ("10GiB", 10240)],
)
def test_sizes(text, mib):
    assert parse_mib(text) == mib


@pytest.mark.parametrize("text", ["", "G", "-1G", "10 G", "1e9G", "0x10", "10Q", "99999999999T", "10G\n\x1b[31m"])
def test_sizes_that_are_none(text):
    with pytest.raises(UsageError, match="size"):
        parse_mib(text)


@pytest.mark.parametrize(("mib", "text"), [(81920, "80G"), (81559, "79.6G"), (512, "512M"), (1048576, "1T")])
def test_format_mib(mib, text):
    assert format_mib(mib) == text


def test_hostlists():
    assert expand("n[1-3,07]") == ["n1", "n2", "n3", "n07"]
    assert expand("") == []
    assert fold(["n1", "n2", "n3"]) == "n[1-3]"
    with pytest.raises(UsageError, match="hostlist"):
        expand("n[1-")


def test_run_command_reports_what_the_program_said():
    with pytest.raises(CommandError, match="no such thing"):
        run_command([sys.executable, "-c", "import sys; sys.exit('no such thing')"])
    with pytest.raises(CommandError, match="No such file"):
        run_command(["/nonexistent/program"])
    with pytest.raises(CommandError, match=r"within 0.2 s"):
        run_command([sys.executable, "-c", "import time; time.sleep(60)"], timeout=0.2)
    assert run_command(["cat"], input_text="hello").stdout == "hello"
