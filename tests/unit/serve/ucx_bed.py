"""Tests with UCX: by its own TCP, over the loopback interface, which needs no adapter."""

from __future__ import annotations

import os

import pytest

from sluice.serve.replica.ucx import why_not

OVER_TCP = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}


def _missing() -> str:
    before = {name: os.environ.get(name) for name in OVER_TCP}
    os.environ.update(OVER_TCP)
    try:
        return why_not("ucx")
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


MISSING = _missing()
needs_ucx = pytest.mark.skipif(bool(MISSING), reason=f"no UCX: {MISSING}")
