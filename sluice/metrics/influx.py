"""Writing to a database by InfluxDB 2's interface, through influxdb-client."""

from __future__ import annotations

import gzip
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from sluice.base.errors import SluiceError
from sluice.base.private import read_private
from sluice.base.text import one_line

_TIMEOUT_MS = (5_000, 30_000)  # to connect, to answer; influxdb-client counts in ms
_MAX_TOKEN = 4096


class RejectedError(SluiceError):
    """The database refuses these lines; sent again, they would be refused again."""


class TooLargeError(SluiceError):
    """The database wants smaller requests."""


def read_token(path: Path) -> str:
    """The token; empty without a file. Raises SluiceError for one that others may read, or that is not a token."""
    try:
        data = read_private(path, _MAX_TOKEN + 1).strip()
    except FileNotFoundError:
        return ""
    if len(data) > _MAX_TOKEN or not data.isascii() or any(byte <= 32 or byte == 127 for byte in data):
        raise SluiceError(f"{path}: not a token", remedy=f"write one word of at most {_MAX_TOKEN} characters")
    return data.decode()


def token_for(url: str, path: Path, *, without_tls: bool) -> str:
    """The token to send to a database (`read_token`). Raises SluiceError where it would go over plain HTTP unasked.

    Loopback is no exception: on a node a tenant can listen on the port of a database that is down.
    """
    token = read_token(path)
    if token and not url.startswith("https://") and not without_tls:
        raise SluiceError(
            f"monitoring.url {url}: the token in {path} is not sent over plain HTTP",
            remedy="use https://, or set monitoring.token_without_tls",
        )
    return token


def _rest() -> tuple[Any, Any, Any]:
    """influxdb-client's HTTP layer (configuration, client, exception) without its generated models.

    The package imports some 350 modules of models that a writer never uses: 30 MB, and most of a second of a core. An
    empty package object in its place lets the few that are needed be imported alone.
    """
    name = "influxdb_client"
    if name not in sys.modules:
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            raise SluiceError(
                "the Python package influxdb-client is not installed", remedy="pip install influxdb-client"
            )
        shell = types.ModuleType(name)
        shell.__path__ = list(spec.submodule_search_locations)
        shell.__spec__ = spec
        sys.modules[name] = shell
    try:
        from influxdb_client._sync.rest import RESTClientObject
        from influxdb_client.configuration import Configuration
        from influxdb_client.rest import ApiException
    except ImportError:  # another version with another structure
        _forget_parts()
        from influxdb_client._sync.rest import RESTClientObject
        from influxdb_client.configuration import Configuration
        from influxdb_client.rest import ApiException
    return Configuration, RESTClientObject, ApiException


def _forget_parts() -> None:
    """Let the package be imported again, as a whole."""
    name = "influxdb_client"
    if not hasattr(sys.modules.get(name), "InfluxDBClient"):
        for loaded in [one for one in sys.modules if one == name or one.startswith(f"{name}.")]:
            del sys.modules[loaded]


class Database:
    """A database to write to. `token` is only sent, and stored nowhere."""

    def __init__(self, url: str, organization: str, bucket: str, token: str, ca_file: str = "") -> None:
        configuration_type, client_type, self._error = _rest()
        configuration = configuration_type()
        configuration.host = url
        configuration.ssl_ca_cert = ca_file or None
        self._client = client_type(configuration, retries=False)
        self.url = url
        self._write = f"{url}/api/v2/write?{urlencode({'org': organization, 'bucket': bucket, 'precision': 'ns'})}"
        self._headers = {
            "Content-Type": "text/plain; charset=utf-8",
            "Content-Encoding": "gzip",
            "Accept": "application/json",
            "User-Agent": "sluice",
            **({"Authorization": f"Token {token}"} if token else {}),
        }

    def write(self, lines: bytes) -> None:
        """Write lines of line protocol, times in ns.

        Raises RejectedError, TooLargeError, or SluiceError for what may work later.
        """
        from urllib3.exceptions import HTTPError

        try:
            self._client.request(
                "POST",
                self._write,
                headers=self._headers,
                body=gzip.compress(lines, 1, mtime=0),
                _request_timeout=_TIMEOUT_MS,
            )
        except self._error as error:
            said = one_line(str(error.reason or "") + " " + str(error.body or ""), limit=200)
            what = f"{self.url}: {error.status} {said}"
            if error.status == 413:
                raise TooLargeError(what) from error
            if error.status in (400, 422):
                raise RejectedError(what) from error
            raise SluiceError(what, remedy="see monitoring: url, organization, bucket, token_file") from error
        except (HTTPError, OSError) as error:
            raise SluiceError(
                f"{self.url}: {one_line(str(error), limit=200)}", remedy="check that the database runs"
            ) from error


def set_retention(url: str, organization: str, bucket: str, token: str, days: int, ca_file: str = "") -> str:
    """Have a database keep a bucket for `days`; a text with old and new value. Raises SluiceError."""
    _forget_parts()
    from influxdb_client import BucketRetentionRules, InfluxDBClient
    from influxdb_client.rest import ApiException
    from urllib3.exceptions import HTTPError

    seconds = days * 86400
    try:
        with InfluxDBClient(url, token, org=organization, timeout=10_000, ssl_ca_cert=ca_file or None) as client:
            buckets = client.buckets_api()
            found = buckets.find_bucket_by_name(bucket)
            if found is None:
                raise SluiceError(
                    f"{url}: no bucket {bucket!r}", remedy="create it, or name another in monitoring.bucket"
                )
            before = [rule.every_seconds for rule in found.retention_rules or []]
            if before == [seconds]:
                return f"keeps {days} days"
            found.retention_rules = [BucketRetentionRules(type="expire", every_seconds=seconds)]
            buckets.update_bucket(bucket=found)
            return f"kept {', '.join(str(one) for one in before) or 'unlimited'} s, keeps {days} days now"
    except (ApiException, HTTPError, OSError, ValueError, AttributeError) as error:
        raise SluiceError(
            f"{url}: its retention cannot be set from here: {one_line(str(error), limit=120)}",
            remedy="set it at the database, e.g. victoria-metrics -retentionPeriod",
        ) from error
