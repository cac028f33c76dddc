#!/usr/bin/env python3
"""Writes docs/openapi.json of the endpoints. With --check: exits with 1 if the file is not what they are."""

import json
import sys
from pathlib import Path

from sluice.web.app import description

PATH = Path(__file__).parents[1] / "docs/openapi.json"

if __name__ == "__main__":
    made = json.dumps(description(), indent=1) + "\n"
    if sys.argv[1:] != ["--check"]:
        PATH.write_text(made)
    elif PATH.read_text() != made:
        sys.exit(f"{PATH}: not what the endpoints are; run tools/openapi_reference.py")
