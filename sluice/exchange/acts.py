"""What the web process asks of root's helper, `sluice actd`, over a local socket: one line, and one line as answer.

A request carries the proof that its user sent, which the helper verifies itself: nothing that the web process says
about who calls, or what that user may do, is believed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from sluice.base.errors import SluiceError

VERSION = 1
SOCKET = Path("/run/sluice-act/socket")
MOST_SCRIPT = (4 << 20) - 1024
"""Bytes of a job's script: max_script_size of slurm.conf, less what is added to it."""
MOST_POLICY = 1 << 20
"""Characters of a policy file."""
MOST_BODY = 2 * MOST_SCRIPT + (64 << 10)
"""Bytes of the JSON that has one: line ends and quotes take two each."""
MOST_REQUEST = MOST_BODY + (64 << 10)
MOST_ANSWER = 4 << 20
MOST_KEY = 128
"""Characters of an idempotency key."""

ProofKind = Literal["sluice", "slurm", "oidc"]
KINDS: tuple[ProofKind, ...] = get_args(ProofKind)


@dataclass(frozen=True, slots=True)
class Proof:
    """What a caller itself sent to show who it is: a token of Sluice or of Slurm, or an OIDC identity token."""

    kind: ProofKind
    text: str = field(repr=False)


class ActError(SluiceError):
    """What was asked was not done; `status` is that of HTTP."""

    def __init__(self, status: int, what: str, *, remedy: str = "", retry_after: int | None = None) -> None:
        super().__init__(what, remedy=remedy, usage=400 <= status < 500)
        self.status = status
        self.retry_after = retry_after


@dataclass(frozen=True, slots=True)
class Request:
    """One request. `key`: the same key with the same words is done once."""

    do: str
    proof: Proof
    words: dict[str, Any]
    request_id: str = ""
    key: str | None = None
    address: str = ""


def render_request(request: Request) -> bytes:
    """Its line. Raises ActError for text that is none."""
    document = {
        "version": VERSION,
        "do": request.do,
        "proof": {"kind": request.proof.kind, "text": request.proof.text},
        "words": request.words,
        "request_id": request.request_id,
        "key": request.key,
        "address": request.address,
    }
    try:
        line = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
    except UnicodeEncodeError as error:
        raise ActError(400, "a text is not Unicode", remedy="send UTF-8") from error
    if len(line) > MOST_REQUEST:
        raise ActError(413, f"a request of {len(line)} bytes", remedy="send a shorter script")
    return line


def parse_request(line: bytes) -> Request:
    """A request, of which only the form is known. Raises ActError."""
    bad = ActError(400, f"not a request of version {VERSION}", remedy="install one version of Sluice, restart both")
    try:
        document = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise bad from error
    names = {"version", "do", "proof", "words", "request_id", "key", "address"}
    if not isinstance(document, dict) or set(document) != names or document["version"] != VERSION:
        raise bad
    proof, words, key = document["proof"], document["words"], document["key"]
    texts = [document[name] for name in ("do", "request_id", "address")]
    if not isinstance(proof, dict) or set(proof) != {"kind", "text"} or not isinstance(words, dict):
        raise bad
    if not all(isinstance(text, str) and len(text) <= 128 for text in texts) or not isinstance(proof["text"], str):
        raise bad
    if proof["kind"] not in KINDS:
        raise bad
    if key is not None and not (isinstance(key, str) and is_key(key)):
        raise ActError(400, "Idempotency-Key: not a key", remedy=f"send 1 to {MOST_KEY} printable ASCII characters")
    return Request(texts[0], Proof(proof["kind"], proof["text"]), words, texts[1], key, texts[2])


def is_key(text: str) -> bool:
    """Whether an idempotency key may be this."""
    return 0 < len(text) <= MOST_KEY and text.isascii() and text.isprintable()


def render_answer(document: dict[str, Any]) -> bytes:
    """The line of what was done."""
    return json.dumps({"version": VERSION, "ok": document}).encode() + b"\n"


def render_error(error: ActError) -> bytes:
    """The line of what was not."""
    said = {"status": error.status, "what": error.what, "remedy": error.remedy, "retry_after": error.retry_after}
    return json.dumps({"version": VERSION, "error": said}).encode() + b"\n"


def parse_answer(line: bytes) -> dict[str, Any]:
    """What was done. Raises ActError with the helper's words, or with 503 for what is no answer."""
    try:
        document = json.loads(line)
        if document["version"] != VERSION:
            raise ValueError("another version")
        if "ok" in document:
            return dict(document["ok"])
        said = document["error"]
        raise ActError(
            int(said["status"]), str(said["what"]), remedy=str(said["remedy"]), retry_after=said["retry_after"]
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ActError(
            503, "sluice actd gave no answer; what was asked may have been done",
            remedy="ask again with the same Idempotency-Key: nothing is done twice", retry_after=2,
        ) from error  # fmt: skip
