"""Notices on the standard error of a job's processes."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from prolog_epilog import job_output


@pytest.fixture(autouse=True)
def _busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that waits for a processor has a minute to write; one that waits for a file has not."""
    monkeypatch.setattr(job_output, "_MORE_S", 60.0)


def test_a_notice_reaches_a_processs_standard_error() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.PIPE) as program:
        assert job_output.write_line([program.pid], "job 7: too much")
        program.communicate(b"\n")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.PIPE) as program:
        job_output.write_line([2**22 + 1, program.pid], "again")  # the first has ended
        assert b"sluice: again" in program.communicate(b"\n")[1]


def test_a_notice_is_written_with_the_processs_own_rights(tmp_path: Path) -> None:
    """A file that it opened for reading is not written, though root could."""
    precious = tmp_path / "precious"
    precious.write_text("as it was")
    command = [sys.executable, "-c", "input()"]
    with precious.open() as file, subprocess.Popen(command, stdin=subprocess.PIPE, stderr=file) as program:
        assert not job_output.write_line([program.pid], "job 7: too much")
        program.communicate(b"\n")
    assert precious.read_text() == "as it was"


def test_a_full_pipe_does_not_hold_the_watchdog_up() -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    try:
        while True:
            os.write(write, b"x" * 65536)
    except BlockingIOError:
        os.set_blocking(write, True)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=write) as program:
        began = time.monotonic()
        assert not job_output.write_line([program.pid], "too much")
        assert time.monotonic() - began < 5
        program.kill()
    os.close(read)
    os.close(write)


def test_a_job_is_ended_when_its_line_is_written() -> None:
    """slurmstepd reads nothing more of a step whose last process has ended."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=write) as program:
        writers = job_output.begin([[([program.pid], "job 7: too much")]])
        try:
            assert next(job_output.done(writers, 60.0)).written == [True]
            assert os.read(read, 4096) == b"\nsluice: job 7: too much\n"
        finally:
            job_output.finish(writers)
            program.kill()
    os.close(read)
    os.close(write)


def test_a_line_waits_for_a_processor_and_not_for_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy node the child has not run when its time is over, and the job's end came without a reason."""
    write = job_output._write_lines

    def busy(answers: int, lines: Sequence[job_output.Line]) -> None:
        end = time.process_time() + 0.2
        while time.process_time() < end:
            pass
        write(answers, lines)

    def hangs(answers: int, lines: Sequence[job_output.Line]) -> None:
        time.sleep(30)

    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.PIPE) as program:
        lines = [[([program.pid], "job 7: too much")]]
        monkeypatch.setattr(job_output, "_write_lines", hangs)
        began = time.monotonic()
        assert job_output.write_all(lines, 0.05) == [[False]]
        assert time.monotonic() - began < 20
        monkeypatch.setattr(job_output, "_write_lines", busy)
        assert job_output.write_all(lines, 0.05) == [[True]]
        assert b"sluice: job 7: too much" in program.communicate(b"\n")[1]


def test_a_child_that_never_has_done_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def spins(answers: int, lines: Sequence[job_output.Line]) -> None:
        while True:
            pass

    monkeypatch.setattr(job_output, "_MORE_S", 0.3)
    monkeypatch.setattr(job_output, "_write_lines", spins)
    began = time.monotonic()
    assert job_output.write_all([[([os.getpid()], "job 7: too much")]], 0.05) == [[False]]
    assert time.monotonic() - began < 20


def test_a_job_is_ended_without_its_line_where_no_process_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room() -> int:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", no_room)
    files = len(os.listdir("/proc/self/fd"))
    writers = job_output.begin([[([os.getpid()], "job 7: too much")]])
    assert list(job_output.done(writers, 60.0)) == writers and writers[0].written == [False]
    job_output.finish(writers)
    assert len(os.listdir("/proc/self/fd")) == files
