"""The policy's traces section: where the spans of jobs go, and what of them may leave. Read by controllers."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from policy.monitoring import Text
from policy.units import Mib, Seconds

HEADERS_FILE = "/etc/sluice/traces.headers"
_ENDPOINT = re.compile(
    r"https?://(?:[A-Za-z0-9.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):\d{1,5}(?:/[A-Za-z0-9._~/-]{0,200})?"
)


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    endpoint: str = ""
    """A receiver of OTLP, e.g. an OpenTelemetry collector; empty: nothing is sent. Example:
    `https://collector.site:4318`."""
    protocol: Literal["http", "grpc"] = "http"
    """OTLP over HTTP (`/v1/traces` where the endpoint has no path), or over gRPC."""
    headers_file: Text = HEADERS_FILE
    """The file, on each controller, with a line `NAME: VALUE` for each header that the receiver wants, e.g. a token;
    SlurmUser, its owner, alone may read it."""
    ca_file: Text = ""
    """Certificates by which the receiver is known; empty: those of the system. Example: `/etc/ssl/site.pem`."""
    headers_without_tls: bool = False
    """Send the headers to a `http://` receiver, where anybody on the way can read them. Example: `true`."""
    private: list[Literal["jobs", "users", "accounts", "nodes"]] = []
    """What may leave although slurm.conf's PrivateData has it: with PrivateData=jobs nothing is sent without `jobs`;
    user names, accounts and QOS, and names of nodes are left out. Example: `[jobs, accounts]`."""
    sample: Annotated[float, Field(ge=0, le=1)] = 1.0
    """The part of all traces that is sent, chosen by trace ID; 1: all. Example: `0.1`."""


class Traces(_Settings):
    """The spans of jobs."""

    model_config = ConfigDict(extra="forbid")

    settle: Annotated[Seconds, Field(ge=1, le=3600)] = 30
    """How long after a job's end its spans are sent: its nodes report until then. Example: `1m`."""
    spool: Annotated[Mib, Field(ge=1, le=1 << 20)] = 256
    """Disk space on the controller for spans that the receiver has not accepted yet. Example: `1G`."""

    @field_validator("endpoint")
    @classmethod
    def _url(cls, value: str) -> str:
        if value and (not _ENDPOINT.fullmatch(value) or not 0 < int(value.split("/")[2].rpartition(":")[2]) < 65536):
            raise ValueError("want http://HOST:PORT or https://HOST:PORT, without user, password, query or spaces")
        return value.rstrip("/")

    @field_validator("headers_file", "ca_file")
    @classmethod
    def _absolute(cls, value: str) -> str:
        if value and not value.startswith("/"):
            raise ValueError("want an absolute path")
        return value


class NodeTraces(_Settings):
    """The section as controllers read it; seconds, MiB."""

    model_config = ConfigDict(extra="ignore")

    settle: Annotated[int, Field(ge=1, le=3600)] = 30
    spool: Annotated[int, Field(ge=1, le=1 << 20)] = 256

    def hidden(self, private_data: str) -> frozenset[str]:
        """The words of slurm.conf's PrivateData that keep something from leaving; with `jobs`, all."""
        words = {word.strip() for word in private_data.lower().split(",")}
        if "all" in words:
            words = {"jobs", "users", "accounts", "nodes"}
        return frozenset(words - set(self.private))


def compile_traces(traces: Traces | None) -> NodeTraces:
    """What controllers read of the section."""
    return NodeTraces(**traces.model_dump()) if traces is not None else NodeTraces()
