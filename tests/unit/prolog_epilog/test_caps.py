"""Tenants' caps, from the compiled policy."""

from __future__ import annotations

from pathlib import Path

import pytest

from policy.compiled import CompiledPolicy, Tenant
from prolog_epilog.caps import Caps
from sluice.base.errors import SluiceError
from tests.unit.prolog_epilog.examples import MIB


def test_caps_follow_the_policy_and_the_last_good_one_stays(tmp_path: Path) -> None:
    path = tmp_path / "sluice.policy"
    caps = Caps(path)
    assert caps.of("physics") is None  # no policy, no caps
    tenants = [Tenant(account="physics", gpu_memory_mib_per_gpu=100), Tenant(account="atoms")]
    CompiledPolicy(generated_s=0, source="test", tenants=tenants).write(path)
    assert (caps.of("physics"), caps.of("atoms"), caps.of("other")) == (100 * MIB, None, None)
    path.write_text("damaged")
    assert caps.of("physics") == 100 * MIB and caps.problem is not None
    path.unlink()
    assert caps.of("physics") == 100 * MIB
    path.write_text("damaged from the start")
    with pytest.raises(SluiceError, match="checksum"):
        Caps(path).of("physics")
