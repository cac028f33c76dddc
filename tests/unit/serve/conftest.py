"""The tiny models, made once."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By name: `counting` and `random` of tests/serve_models.py."""
    pytest.importorskip("gguf", reason="needs the package gguf (pip install -e '.[dev]')")
    pytest.importorskip("xllamacpp", reason="needs the package xllamacpp (pip install -e '.[dev]')")
    from tests.serve_models import make_model

    folder = tmp_path_factory.mktemp("models")
    return {"counting": make_model(folder / "counting.gguf", "counting"),
            "random": make_model(folder / "random.gguf", "random")}  # fmt: skip
