"""The process that calls a vendor's library: it may hang, crash or report an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from prolog_epilog.worker import Worker
from sluice.base.errors import SluiceError


def vendor_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> Worker:
    """A worker whose process runs `body` for each request."""
    (tmp_path / "fake_sampling.py").write_text(f"import sys, json, time, os\nfor line in sys.stdin:\n    {body}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return Worker("nvidia", timeout=3.0, module="fake_sampling")


def test_a_hanging_driver_is_given_up_and_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hang = "time.sleep(60) if not os.path.exists('well') else print(json.dumps({'ok': {'usage': []}}), flush=True)"
    worker = vendor_process(tmp_path, monkeypatch, hang)
    with pytest.raises(SluiceError, match="the nvidia driver gives no answer"):
        worker.ask(do="sample", timeout=0.5)
    (tmp_path / "well").touch()
    assert worker.ask(do="sample", timeout=20.0) == {"usage": []}
    worker.close()


def test_a_crash_and_an_error_of_the_library_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = vendor_process(tmp_path, monkeypatch, "os.abort()")
    with pytest.raises(SluiceError, match="ended the process"):
        worker.ask(do="sample", timeout=20.0)
    (tmp_path / "fake_sampling.py").write_text('print(\'{"error": "GPU is lost"}\', flush=True); input()\n')
    with pytest.raises(SluiceError, match="the nvidia driver: GPU is lost"):
        worker.ask(do="sample", timeout=20.0)
    worker.close()
