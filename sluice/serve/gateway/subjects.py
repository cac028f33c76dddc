"""Whose limits a request counts against, and what its client reads where one of them refuses it."""

from __future__ import annotations

from typing import Final, NamedTuple

from sluice.core.gate import Kind, Reason, Refused
from sluice.exchange.serving import NO_LIMIT, Limit
from sluice.serve.gateway.directory import Directory
from sluice.serve.gateway.parts import nobody_answers
from sluice.serve.gateway.refusals import RefusalError

_WHO: Final = {Kind.KEY: "key", Kind.USER: "user", Kind.TENANT: "tenant", Kind.SERVICE: "model"}
_WHAT: Final = {
    Reason.REQUESTS: "requests a minute", Reason.TOKENS: "tokens a minute", Reason.CONCURRENT: "requests at once",
    Reason.QUEUED: "requests that wait", Reason.NO_REPLICAS: "replicas",
}  # fmt: skip


class Subjects(NamedTuple):
    """Their names."""

    key: str
    user: str
    tenant: str
    service: str

    def of(self, kind: Kind) -> tuple[str, str]:
        """One of them, as limits have it."""
        name = kind.name.lower()
        return name, getattr(self, name)

    def limited(self, directory: Directory) -> list[tuple[str, str]]:
        """Those that have limits."""
        rows = [(one, directory.limit(*one)) for one in zip(self._fields, self, strict=True)]
        return [one for one, row in rows if row is not None and row.limit != NO_LIMIT]

    def limit(self, kind: Kind, directory: Directory) -> Limit:
        """The policy's, of one of them."""
        row = directory.limit(*self.of(kind))
        return NO_LIMIT if row is None else row.limit


def over_limit(
    subjects: Subjects, refused: Refused, policy: Limit, reserved: int, part_after: float | None
) -> RefusalError:
    """What the client reads. `policy`: the limit of which the gate has a part or all; `reserved`: the request's tokens;
    `part_after`: seconds until this gateway has a larger part of the limit, None: not known."""
    if refused.what is Reason.FULL:
        return RefusalError(503, "this gateway is full", remedy="try again", retry_after=1.0, code="busy")
    if refused.what is Reason.NO_PART:
        return nobody_answers()
    who, what = f"{_WHO[refused.kind]} {subjects.of(refused.kind)[1]}", _WHAT[refused.what]
    if refused.never and not _fits(refused.what, policy, reserved):
        return RefusalError(
            400, f"{who}: this request may take more than the limit of {refused.limit} {what}",
            remedy="ask for fewer tokens (max_tokens), or send a shorter prompt", code="larger_than_limit",
        )  # fmt: skip
    after = refused.retry_after_us / 1e6 if refused.retry_after_us else None
    if refused.part and refused.what in (Reason.REQUESTS, Reason.TOKENS):
        after = part_after
    remedy = f"try again in {after:.1f} s" if after is not None else "try again when others have ended"
    if refused.never:
        remedy = "try again when a controller answers for the limits: this gateway has a share of the whole"
    return RefusalError(
        429, f"{who}: over the limit of {refused.limit} {what}", remedy=remedy, code="rate_limit_exceeded",
        retry_after=after,
    )  # fmt: skip


def _fits(what: Reason, policy: Limit, reserved: int) -> bool:
    """Whether the policy's limit would let it in, of which a gateway has a share while nobody answers."""
    whole, amount = {
        Reason.REQUESTS: (policy.requests_per_minute, 1), Reason.TOKENS: (policy.tokens_per_minute, reserved),
        Reason.CONCURRENT: (policy.concurrent, 1),
    }[what]  # fmt: skip
    return whole is None or amount <= whole
