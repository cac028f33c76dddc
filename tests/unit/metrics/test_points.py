"""Line protocol and OpenMetrics' text: hostile names, and the same bytes as influxdb-client's own."""

from __future__ import annotations

import math
import re
import subprocess
import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sluice.metrics.names import BY_NAME, MEASUREMENTS, unknown
from sluice.metrics.points import Point, to_line, to_lines, to_openmetrics

HOSTILE = [
    "a b,c=d",
    'quote" and \\ backslash\\',
    "line\nbreak\r\n# HELP x",
    "\x1b[31mred\x00",
    "=cmd|' /C calc'!A1",
    "<script>alert(1)</script>",
    "ünïcode 漢字 \u202eevil\u2066",
    "\\",
    "x" * 5000,
    "\ud800",
    '{} } "',
]


def unescape(text: str) -> str:
    return re.sub(r"\\([,= ])", r"\1", text)


def split(text: str, marks: str, *, quotes: bool) -> tuple[str, str]:
    """Up to the first mark that no backslash precedes and, in fields, no quotes enclose; and what follows it."""
    quoted = False
    place = 0
    while place < len(text):
        if text[place] == "\\":
            place += 2
            continue
        if text[place] == '"' and quotes:
            quoted = not quoted
        elif text[place] in marks and not quoted:
            return text[:place], text[place + 1 :]
        place += 1
    return text, ""


def parse(line: str) -> tuple[dict[str, str], dict[str, str], str]:
    """A line's tags, fields and time, by the rules of the protocol."""
    key, rest = split(line, " ", quotes=False)
    fields, stamp = split(rest, " ", quotes=True)
    _, key = split(key, ",", quotes=False)
    tags, values = {}, {}
    while key:
        one, key = split(key, ",", quotes=False)
        name, value = split(one, "=", quotes=False)
        tags[name] = unescape(value)
    while fields:
        one, fields = split(fields, ",", quotes=True)
        name, value = split(one, "=", quotes=True)
        values[name] = value
    return tags, values, stamp


@given(st.text(), st.text(), st.text())
@example(HOSTILE[0], HOSTILE[1], HOSTILE[2])
@example(HOSTILE[3], HOSTILE[7], HOSTILE[9])
@example("\\", "\\", "\\")
def test_any_name_stays_one_line_with_the_same_parts(account: str, user: str, step: str) -> None:
    line = to_line(Point("sluice_job", {"account": account, "user": user}, {"processes": 1}, 17, {"step": step}))
    line.encode()
    assert len(line.splitlines()) == 1
    tags, fields, stamp = parse(line)
    assert stamp == "17" and list(fields) == ["processes", "step"]
    assert set(tags) <= {"account", "user"}
    for name, given_name in (("account", account), ("user", user)):
        if given_name.isascii() and given_name.isprintable() and given_name and "\\" not in given_name:
            assert tags[name] == given_name[:256]


@pytest.mark.parametrize("name", HOSTILE)
def test_any_name_stays_one_label(name: str) -> None:
    text = to_openmetrics([Point("sluice_job", {"account": name, "user": "u"}, {"processes": 1}, 0)])
    text.encode()
    lines = text.split("\n")
    assert lines[-2:] == ["# EOF", ""] and len(lines) == 5
    label = r'(?:[^"\\\n]|\\["\\n])*'
    assert re.fullmatch(rf'sluice_job_processes\{{account="{label}",user="u"\}} 1', lines[2])


def test_what_is_no_number_is_left_out() -> None:
    point = Point("sluice_gpu", {}, {"up": 1, "power_watts": math.nan, "fan_ratio": math.inf}, 5)
    assert to_line(point) == "sluice_gpu up=1i 5"
    assert to_lines([Point("sluice_gpu", {}, {"power_watts": math.nan}, 5)]) == ""
    assert "nan" not in to_openmetrics([point]) and "inf" not in to_openmetrics([point])
    assert (
        to_line(Point("sluice_gpu", {}, {"energy_joules_total": 1 << 70}, 5))
        == f"sluice_gpu energy_joules_total={float(1 << 70)!r} 5"
    )


def test_the_same_lines_as_influxdb_client() -> None:
    """In a process of its own, as the package's models take memory and time."""
    code = """
from influxdb_client import Point as Theirs, WritePrecision
from sluice.metrics.points import Point, to_line
names = ["plain", "a b,c=d", "über=x y", "tab"]
for name in names:
    tags, fields = {"account": name, "user": "u v"}, {"processes": 3, "share_ratio": 0.25}
    ours = Point("sluice_job", tags, fields, 1700000000000000123, {"step": 'a"b\\\\c d'})
    theirs = Theirs("sluice_job").tag("account", name).tag("user", "u v")
    for key, value in {**ours.fields, **ours.identity}.items():
        theirs = theirs.field(key, value)
    theirs = theirs.time(ours.time_ns, WritePrecision.NS)
    assert to_line(ours) == theirs.to_line_protocol(), (to_line(ours), theirs.to_line_protocol())
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_table_keeps_its_own_rules() -> None:
    for measurement in MEASUREMENTS:
        assert re.fullmatch(r"sluice_[a-z]+", measurement.name)
        fields = [metric.field for metric in measurement.metrics]
        assert len(set(fields)) == len(fields) and fields
        for metric in measurement.metrics:
            assert re.fullmatch(r"[a-z][a-z0-9_]*[a-z0-9]", metric.field)
            assert metric.field.endswith("_total") == (metric.kind == "counter")
            assert not re.search(r"_(percent|mib|mb|ms|mw|khz|mhz)\b", metric.field), "base units only"
            assert metric.help and not metric.help.endswith(".") and "\n" not in metric.help
        assert not set(measurement.tags) & (set(fields) | set(measurement.identity))
    assert unknown("sluice_gpu", ["up", "nonsense"]) == ["nonsense"]
    assert "sluice_job" in BY_NAME
