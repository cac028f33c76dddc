"""The policy's monitoring section: what is measured, how often, and where it goes. Read by nodes and controllers."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from policy.units import Mib, Seconds

TOKEN_FILE = "/etc/sluice/metrics.token"  # noqa: S105 - a file's name
_URL = re.compile(
    r"https?://(?:[A-Za-z0-9.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::\d{1,5})?(?:/[A-Za-z0-9._~/-]{0,200})?"
)
_LISTEN = re.compile(r"(?:[A-Za-z0-9.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):\d{1,5}")
Text = Annotated[str, Field(max_length=200, pattern=r"^[^\x00-\x1f\x7f]*$")]


class Monitoring(BaseModel):
    """What is measured, and where it goes."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    interval: Annotated[Seconds, Field(ge=1, le=60)] = 5
    """Time between two samples. Example: `5s`."""
    url: str = ""
    """A database that takes InfluxDB 2's line protocol, e.g. InfluxDB or VictoriaMetrics; empty: none. Example:
    `https://metrics.site:8086`."""
    organization: Text = ""
    """InfluxDB's organisation. Example: `site`."""
    bucket: Text = "sluice"
    """InfluxDB's bucket. Example: `sluice`."""
    token_file: Text = TOKEN_FILE
    """The file, on each node and controller, that holds the database's token; its owner alone may read it."""
    ca_file: Text = ""
    """Certificates by which the database is known; empty: those of the system. Example: `/etc/ssl/site.pem`."""
    token_without_tls: bool = False
    """Send the token to a `http://` database, where anybody on the way can read it. Example: `true`."""
    running: Annotated[Seconds, Field(ge=0, le=600)] = 60
    """Interval at which nodes report to the controllers' daemon what running jobs use, for `sluice top`
    and reports; from `5s` on, `0s`: none. Example: `30s`."""
    retention_days: Annotated[int, Field(ge=1, le=36500)] = 90
    """Days that samples are kept; set in databases that have such a setting (InfluxDB). Example: `30`."""
    job_ids: Literal["fields", "tags", "none"] = "fields"
    """How samples name jobs and steps: as values, so that the number of series stays bounded; as tags, so that queries
    can select by them; or not at all."""
    spool: Annotated[Mib, Field(ge=1, le=1 << 20)] = 256
    """Disk space on each node for samples that the database has not accepted yet. Example: `1G`."""
    prometheus: str = ""
    """Address where each node answers Prometheus at /metrics; empty: none. Example: `127.0.0.1:9835`."""
    prometheus_controller: str = ""
    """The same for the controllers. Example: `127.0.0.1:9836`."""

    @field_validator("url")
    @classmethod
    def _url(cls, value: str) -> str:
        if value and not _URL.fullmatch(value):
            raise ValueError("want http://HOST:PORT or https://HOST:PORT, without user, password, query or spaces")
        return value.rstrip("/")

    @field_validator("prometheus", "prometheus_controller")
    @classmethod
    def _listen(cls, value: str) -> str:
        if value and (not _LISTEN.fullmatch(value) or not 0 < int(value.rpartition(":")[2]) < 65536):
            raise ValueError("want ADDRESS:PORT, e.g. 127.0.0.1:9835")
        return value

    @field_validator("running")
    @classmethod
    def _running(cls, value: int) -> int:
        if 0 < value < 5:
            raise ValueError("want 5s or more, or 0s")
        return value

    @field_validator("token_file", "ca_file")
    @classmethod
    def _absolute(cls, value: str) -> str:
        if value and not value.startswith("/"):
            raise ValueError("want an absolute path")
        return value

    @model_validator(mode="after")
    def _bucket(self) -> Self:
        if self.url and not self.bucket:
            raise ValueError("a database needs a bucket")
        return self


class NodeMetrics(BaseModel):
    """The section as nodes read it; seconds, MiB. Without it nothing is sent, but the use of jobs is summed up."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    interval: Annotated[int, Field(ge=1, le=60)] = 5
    url: str = ""
    organization: str = ""
    bucket: str = "sluice"
    token_file: str = TOKEN_FILE
    ca_file: str = ""
    token_without_tls: bool = False
    running: Annotated[int, Field(ge=0, le=600)] = 60
    retention_days: Annotated[int, Field(ge=1, le=36500)] = 90
    job_ids: Literal["fields", "tags", "none"] = "fields"
    spool: Annotated[int, Field(ge=1, le=1 << 20)] = 256
    prometheus: str = ""
    prometheus_controller: str = ""


def compile_metrics(monitoring: Monitoring | None) -> NodeMetrics:
    """What nodes read of the section."""
    return NodeMetrics(**monitoring.model_dump()) if monitoring is not None else NodeMetrics()
