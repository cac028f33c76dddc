#!/usr/bin/env python3
"""Writes docs/openapi.json, which tests/unit/web/test_access.py compares with the endpoints."""

import json
from pathlib import Path

from sluice.web.app import description

(Path(__file__).parents[1] / "docs/openapi.json").write_text(json.dumps(description(), indent=1) + "\n")
