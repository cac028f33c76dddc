"""What the daemons of several controllers tell each other."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from sluice.exchange.serving import PeerNote
from sluice.serve.replicad import daemon


def test_a_controller_that_does_not_answer_holds_up_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conf = tmp_path / "slurm.conf"
    conf.write_text("ClusterName=c\nSlurmUser=root\nSlurmctldHost=ctl1\nSlurmctldHost=ctl2\nSlurmctldHost=ctl3\n")
    stopping, release, enough = threading.Event(), threading.Event(), threading.Event()
    told: list[str] = []

    def tell(place: tuple[str, int], *_: Any) -> PeerNote:
        told.append(place[0])
        if place[0] == "ctl2":
            release.wait()
        if told.count("ctl3") == 3:
            enough.set()
        return PeerNote(place[0], False, (), (), ())

    monkeypatch.setattr(daemon, "tell", tell)
    made = daemon.Replicad(daemon.Settings(conf, tmp_path, host="ctl1"), stopping)
    telling = threading.Thread(target=made._tell_peers)
    telling.start()
    try:
        assert enough.wait(60), told
        assert told.count("ctl2") == 1, "it is asked once at a time"
        assert told.count("ctl1") < 3, "this is itself"
    finally:
        stopping.set()
        release.set()
        telling.join()
