"""The REST API for programs: `Client` and `AsyncClient`; `sluice.client.models` has the types of what they give."""

from sluice.client.calls import AsyncClient, Client
from sluice.client.follow import Change
from sluice.client.transport import ApiError

__all__ = ["ApiError", "AsyncClient", "Change", "Client"]
