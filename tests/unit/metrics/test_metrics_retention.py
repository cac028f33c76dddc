"""Retention set at an InfluxDB 2, and databases that do not let it be set."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import parse_qs, urlparse

import pytest

from policy.monitoring import NodeMetrics
from sluice.base.errors import SluiceError
from sluice.controllerd.daemon import Site
from sluice.controllerd.metrics.cluster import ClusterMetrics, Retention
from sluice.metrics.influx import set_retention
from tests.unit.controllerd.http_server import HttpServer


class Influx(HttpServer):
    """The part of InfluxDB 2's interface that buckets need."""

    def __init__(self) -> None:
        self.rules: list[dict[str, Any]] = []
        self.tokens: list[str] = []
        self.changes = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def _answer(self, status: int, document: Any) -> None:
                outer.tokens.append(self.headers.get("Authorization", ""))
                body = json.dumps(document).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self) -> None:
                name = parse_qs(urlparse(self.path).query).get("name", [""])[0]
                bucket = {"id": "0001", "orgID": "0002", "name": "sluice", "retentionRules": outer.rules}
                self._answer(200, {"buckets": [bucket] if name == "sluice" else []})

            def do_PATCH(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.rules = asked["retentionRules"]
                outer.changes += 1
                self._answer(200, {"id": "0001", "name": "sluice", "retentionRules": outer.rules})

            def log_message(self, format: str, *args: object) -> None:
                pass

        super().__init__(Handler)


@pytest.fixture
def influx() -> Iterator[Influx]:
    one = Influx()
    yield one
    one.close()


def test_days_become_a_rule_of_the_bucket_once(influx: Influx) -> None:
    assert "keeps 30 days now" in set_retention(influx.url, "org", "sluice", "secret", 30)
    assert [rule["everySeconds"] for rule in influx.rules] == [30 * 86400]
    assert set_retention(influx.url, "org", "sluice", "secret", 30) == "keeps 30 days" and influx.changes == 1
    assert set(influx.tokens) == {"Token secret"}


def test_a_bucket_that_is_not_there(influx: Influx) -> None:
    with pytest.raises(SluiceError, match="no bucket 'other'"):
        set_retention(influx.url, "org", "other", "secret", 30)


def test_a_database_without_buckets() -> None:
    with pytest.raises(SluiceError, match="set it at the database"):
        set_retention("http://127.0.0.1:1", "org", "sluice", "secret", 30)


def test_the_duty_tells_once_and_again_when_the_days_change(influx: Influx, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    token.chmod(0o600)
    at: dict[str, Any] = {"url": influx.url, "token_file": str(token), "token_without_tls": True}
    metrics = SimpleNamespace(settings=NodeMetrics(**at, retention_days=7))
    duty = Retention(cast(ClusterMetrics, metrics))
    duty.run(cast(Site, None))
    duty.run(cast(Site, None))
    asked = len(influx.tokens)
    assert influx.changes == 1 and asked == 2
    metrics.settings = NodeMetrics(**at, retention_days=8)
    duty.run(cast(Site, None))
    assert influx.changes == 2 and influx.rules[0]["everySeconds"] == 8 * 86400
    metrics.settings = NodeMetrics()
    duty.run(cast(Site, None))
    assert influx.changes == 2
