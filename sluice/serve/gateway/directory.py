"""What a worker knows of services, replicas, limits and accounts, as its parent has told it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final

from sluice.exchange.serving import (
    ACCOUNTS,
    LIMITS,
    REPLICAS,
    SERVICES,
    AccountRow,
    LimitRow,
    ReplicaRow,
    ServiceRow,
    State,
    row,
)
from sluice.serve.gateway.heads import Ability
from sluice.serve.gateway.refusals import RefusalError

_ANY: Final = "*"


def subject(kind: str, name: str) -> int:
    """The number by which the gate knows a key, user, tenant or service. Never 0."""
    return int.from_bytes(blake2b(f"{kind}/{name}".encode(), digest_size=8).digest(), "little") or 1


@dataclass(slots=True)
class Directory:
    """The rows."""

    services: dict[str, ServiceRow] = field(default_factory=dict)
    replicas: dict[int, ReplicaRow] = field(default_factory=dict)
    """By their launches, as numbers: the names that the gate has for them."""
    of_service: dict[str, dict[int, ReplicaRow]] = field(default_factory=dict)
    limits: dict[tuple[str, str], LimitRow] = field(default_factory=dict)
    accounts: dict[str, tuple[str, ...]] = field(default_factory=dict)
    complete: bool = False

    def take(self, sections: Mapping[str, Any]) -> None:
        """Replace some sections, as the parent sends them."""
        if SERVICES in sections:
            self.services = {name: row(ServiceRow, one) for name, one in sections[SERVICES].items()}
        if REPLICAS in sections:
            self.replicas = {int(launch, 16): row(ReplicaRow, one) for launch, one in sections[REPLICAS].items()}
            self.of_service = {}
            for number, one in self.replicas.items():
                self.of_service.setdefault(one.service, {})[number] = one
        if LIMITS in sections:
            rows = [row(LimitRow, one) for one in sections[LIMITS].values()]
            self.limits = {(one.kind, one.name): one for one in rows}
        if ACCOUNTS in sections:
            rows_ = [row(AccountRow, one) for one in sections[ACCOUNTS].values()]
            self.accounts = {one.user: one.tenants for one in rows_}
        self.complete = True

    def check_complete(self) -> None:
        """Raises RefusalError where the parent has said nothing yet."""
        if not self.complete:
            raise RefusalError(
                503, "this gateway has not heard of its services yet", remedy="try again", retry_after=1.0
            )

    def limit(self, kind: str, name: str) -> LimitRow | None:
        """What applies to one key, user, tenant or service."""
        return self.limits.get((kind, name)) or self.limits.get((kind, _ANY))

    def tenant(self, user: str, chosen: bytes | None) -> str:
        """Who pays for a user's request. Raises RefusalError."""
        tenants = self.accounts.get(user, ())
        if not tenants:
            raise RefusalError(403, f"user {user}: of no tenant", remedy="ask an admin for a tenant", code="no_tenant")
        if chosen is None:
            return tenants[0]
        name = chosen.decode("latin-1")
        if name not in tenants:
            raise RefusalError(
                403, f"header sluice-tenant: {name[:80]!a} is not one of {user}'s tenants",
                remedy=f"send one of {', '.join(tenants[:20])}, or none", code="tenant_not_allowed",
            )  # fmt: skip
        return name

    def callable_by(self, tenant: str) -> list[ServiceRow]:
        """The services that a tenant may call."""
        return [one for one in self.services.values() if may_call(one, tenant)]

    def service(self, name: str, tenant: str) -> ServiceRow:
        """A service that the tenant may call. Raises RefusalError, the same for one that is not there."""
        found = self.services.get(name)
        if found is None or not may_call(found, tenant):
            raise RefusalError(
                404, f"model {name[:80]!a}: not there, or not for tenant {tenant}", remedy="GET /v1/models lists them",
                code="model_not_found", param="model",
            )  # fmt: skip
        return found

    def check_ability(self, service: ServiceRow, ability: Ability, path: str) -> None:
        """Raises RefusalError where the service's engine cannot do it, as far as a replica has said."""
        known = None
        for one in self.of_service.get(service.name, {}).values():
            if one.state is not State.STARTING:
                if getattr(one.abilities, ability):
                    return
                known = known or one.abilities
        if known is not None:
            can = [name for name in ("chat", "completions", "embeddings", "responses") if getattr(known, name)]
            raise RefusalError(
                400, f"model {service.name}: does not serve {path}", remedy=f"it serves {', '.join(can) or 'nothing'}",
                code="unsupported_endpoint", param="model",
            )  # fmt: skip


def may_call(service: ServiceRow, tenant: str) -> bool:
    """Whether a tenant may call it."""
    return _ANY in service.callers or tenant in service.callers
