"""The process that calls a vendor's library: it may hang, crash or report an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from prolog_epilog.worker import Worker
from sluice.base.errors import SluiceError


def vendor_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, starts: float = 60.0) -> Worker:
    """A worker whose process runs `body` for each request."""
    (tmp_path / "fake_sampling.py").write_text(f"import sys, json, time, os\nfor line in sys.stdin:\n    {body}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return Worker("nvidia", timeout=3.0, module="fake_sampling", starts=starts)


def test_a_hanging_driver_is_given_up_and_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hang = "time.sleep(60) if not os.path.exists('well') else print(json.dumps({'ok': {'usage': []}}), flush=True)"
    worker = vendor_process(tmp_path, monkeypatch, hang, starts=0.4)
    with pytest.raises(SluiceError, match="the nvidia driver gives no answer"):
        worker.ask(do="sample", timeout=0.5)
    (tmp_path / "well").touch()
    assert worker.ask(do="sample", timeout=20.0) == {"usage": []}
    worker.close()


def test_a_driver_that_starts_slowly_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process is kept: the next one would start as slowly. Its late answer is not that of a later question."""
    slow = (
        "time.sleep(0 if os.path.exists('begun') else 2); open('begun', 'a').write(f'{os.getpid()}\\n');"
        "print(json.dumps({'ok': json.loads(line)}), flush=True)"
    )
    worker = vendor_process(tmp_path, monkeypatch, slow)
    for _ in range(2):
        with pytest.raises(SluiceError, match="gives no answer"):
            worker.ask(do="sample", number=1, timeout=0.5)
        assert worker.starting
    assert worker.ask(do="sample", number=2, timeout=20.0) == {"do": "sample", "number": 2}
    assert not worker.starting
    pids = (tmp_path / "begun").read_text().split()
    assert len(pids) == 2 and len(set(pids)) == 1
    worker.close()


def test_a_crash_and_an_error_of_the_library_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = vendor_process(tmp_path, monkeypatch, "os.abort()")
    with pytest.raises(SluiceError, match="ended the process"):
        worker.ask(do="sample", timeout=20.0)
    (tmp_path / "fake_sampling.py").write_text('print(\'{"error": "GPU is lost"}\', flush=True); input()\n')
    with pytest.raises(SluiceError, match="the nvidia driver: GPU is lost"):
        worker.ask(do="sample", timeout=20.0)
    worker.close()
