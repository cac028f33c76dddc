"""What EC2 says of spot machines through EventBridge, in an SQS queue of the pool's own: that they are at risk
(rebalance recommendations, which no call of EC2 shows), and that they are taken back.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

AT_RISK, TAKEN_BACK = "EC2 Instance Rebalance Recommendation", "EC2 Spot Instance Interruption Warning"
_HIDDEN_S = 120  # from other readers, until the next list is asked for
_AT_ONCE = 10
_MOST_READS = 20  # what is left is there for the next list


@dataclass(frozen=True, slots=True)
class Warned:
    """Of one machine: the kinds of its events."""

    kinds: frozenset[str] = frozenset()

    @property
    def notice(self) -> str:
        """Why it ends soon."""
        return TAKEN_BACK if TAKEN_BACK in self.kinds else ""

    @property
    def at_risk(self) -> str:
        """Why it may."""
        return AT_RISK if AT_RISK in self.kinds else ""


def event_of(body: str) -> tuple[str, str] | None:
    """The machine and the kind of an event; None for messages of others."""
    try:
        event = json.loads(body)
        machine, kind = event["detail"]["instance-id"], event["detail-type"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return (machine, kind) if isinstance(machine, str) and kind in (AT_RISK, TAKEN_BACK) else None


class Events:
    """The queue. Not thread-safe: it is read by one list at a time."""

    def __init__(self, sqs: Any, queue: str) -> None:
        self._sqs, self._queue = sqs, queue
        self._handled: list[str] = []
        self._known: dict[str, Warned] = {}

    def forget(self) -> None:
        """Delete what the last read has found: by now the fleet has what it says in its journal. A message that stays
        is found again, and says the same. Raises boto3's exceptions.
        """
        handled, self._handled = self._handled, []
        for first in range(0, len(handled), _AT_ONCE):
            handles = enumerate(handled[first : first + _AT_ONCE])
            entries = [{"Id": str(at), "ReceiptHandle": handle} for at, handle in handles]
            self._sqs.delete_message_batch(QueueUrl=self._queue, Entries=entries)

    def read(self, machines: Collection[str]) -> dict[str, Warned]:
        """What has been said of these machines. Raises boto3's exceptions."""
        handles = []  # those of a read that fails stay in the queue: nobody knows yet what they say
        for _ in range(_MOST_READS):
            messages = self._receive()
            for one in messages:
                handles.append(one["ReceiptHandle"])
                if (event := event_of(one["Body"])) is not None:
                    machine, kind = event
                    self._known[machine] = Warned(self._known.get(machine, Warned()).kinds | {kind})
            if not messages:
                break
        self._known = {machine: one for machine, one in self._known.items() if machine in machines}
        self._handled = handles
        return self._known

    def _receive(self) -> list[dict[str, Any]]:
        answer = self._sqs.receive_message(
            QueueUrl=self._queue, MaxNumberOfMessages=_AT_ONCE, VisibilityTimeout=_HIDDEN_S, WaitTimeSeconds=0
        )
        found: list[dict[str, Any]] = answer.get("Messages", [])
        return found
