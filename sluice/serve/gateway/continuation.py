"""A stream goes on where its replica ended: what was said so far, what another replica is asked, and how its answer
becomes the rest of the first one.

A Story has what was said, by token ids where the engine gives them, by text in any case. The other replica gets the
prompt and the story as one prompt; where only its engine knows how a chat becomes a prompt, it is asked for that first
(`/apply-template` of llama.cpp) or told to go on with the last message (`continue_final_message` of vLLM and SGLang).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from sluice.core.gate import MAX_AMOUNT
from sluice.exchange.serving import EngineName, Resume
from sluice.serve.gateway.body import N_PREDICT, Asked, dump
from sluice.serve.gateway.bounds import COMPACT, MOST_STORY, MOST_STORY_TOKENS
from sluice.serve.gateway.refusals import RefusalError
from sluice.serve.gateway.sse import document_of, event_of
from sluice.serve.gateway.usage import Usage, count_of

_CHAT_ONLY: Final = frozenset(
    (
        "messages", "max_completion_tokens", "add_generation_prompt", "continue_final_message", "chat_template_kwargs",
        "tools", "tool_choice", "parallel_tool_calls", "response_format", "logprobs", "top_logprobs",
        "reasoning_effort", "reasoning_format", "chat_template", "functions", "function_call", "modalities",
    )
)  # fmt: skip
_BOUND_OUTPUT: Final = (
    "grammar", "json_schema", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs",
    "structural_tag", "regex", "ebnf",
)  # fmt: skip
_SPECIAL: Final = frozenset(
    ("logprobs", "top_logprobs", "tools", "response_format", "echo", "suffix", "modalities", *_BOUND_OUTPUT)
)
_OF_A_STREAM: Final = frozenset(("stream", "stream_options", "max_completion_tokens", "min_tokens", N_PREDICT))
_IDS: Final = re.compile(rb',\s?"(?:token_ids|prompt_token_ids)":\s?(?:null|\[[0-9, ]*\])')
_USAGE: Final = re.compile(rb',\s?"usage":\s?\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}')
_MOST_ID: Final = 128
_DECODER: Final = json.JSONDecoder()


def why_not(asked: Asked) -> str:
    """Why a stream could not go on with another replica, whatever it says; empty: it could."""
    document = asked.document
    if asked.ability not in ("chat", "completions"):
        return f"/v1/{asked.ability} cannot"
    if asked.choices != 1:
        return "it has several choices"
    if asked.ability == "completions":
        if not isinstance(document.get("prompt"), str):
            return "its prompt is not one text"
    elif not isinstance(document.get("messages"), list):
        return "its messages are not a list"
    return "" if _SPECIAL.isdisjoint(document) else _why_not_said(document, asked.ability)


def is_plain(asked: Asked) -> bool:
    """Whether its length alone says how long it takes: no grammar, no tools whose calls come as a whole, no images."""
    if asked.choices != 1 or asked.document.get("text") or b'"data:' in asked.raw:  # `text`: /v1/responses' form
        return False
    return _SPECIAL.isdisjoint(asked.document) or not _why_not_said(asked.document, asked.ability)


def _why_not_said(document: dict[str, Any], ability: str) -> str:
    if document.get("logprobs") or document.get("top_logprobs"):
        return "it has logprobs"
    if document.get("tools") and document.get("tool_choice") != "none":
        return "it may call tools"
    kind = document.get("response_format")
    if (isinstance(kind, dict) and kind.get("type") not in (None, "text")) or any(map(document.get, _BOUND_OUTPUT)):
        return "its output is bound to a form"
    if ability == "completions" and (document.get("echo") or document.get("suffix")):
        return "it has echo or suffix"
    if ability == "chat" and document.get("modalities") not in (None, ["text"]):
        return "its output is not text alone"
    return ""


@dataclass(slots=True)
class Story:
    """What a stream has said so far."""

    id: str = ""
    created: int = 0
    model: str = ""
    text: str = ""
    ids: list[int] | None = field(default_factory=list)
    """Of the tokens; None: not known."""
    prompt_ids: list[int] | None = None
    tokens: int = 0
    """Of the text: parts in which it came, where neither ids nor usage say how many they are."""
    prompt_tokens: int | None = None
    finish: str | None = None
    blocked: str = ""
    """Why nobody can go on, for what it has said."""
    _counted: int = 0  # of the tokens, those of the replica that says the text now
    _events: list[bytes] = field(default_factory=list)
    _size: int = 0

    def keep(self, event: bytes) -> None:
        """An event of the stream. It is looked at when it must be."""
        self._events.append(event)
        self._size += len(event)
        if self._size > COMPACT:
            self.absorb()

    def absorb(self) -> None:
        """Take the text from what was kept."""
        events, self._events, self._size = self._events, [], 0
        said = []
        for event in events:
            document = document_of(event)
            if document is not None:
                said.append(self._take(document))
        if not self.blocked:
            self.text += "".join(said)
        if len(self.text) > MOST_STORY:
            self.text, self.blocked = "", f"it is longer than {MOST_STORY} characters"
        if self.ids is not None and len(self.ids) > MOST_STORY_TOKENS:
            self.ids, self.blocked = None, f"it is longer than {MOST_STORY_TOKENS} tokens"

    def goes_on(self) -> None:
        """What comes from now on is another replica's."""
        self.absorb()
        self._counted = 0

    def _take(self, document: dict[str, Any]) -> str:
        if not self.id:
            self.id = str(document.get("id", ""))
            created = document.get("created")
            self.created = created if isinstance(created, int) else 0
            self.model = str(document.get("model", ""))
        self._take_prompt(document)
        choices = document.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(choice, dict):
            return ""
        self._take_prompt(choice)
        if choice.get("finish_reason"):
            self.finish = str(choice["finish_reason"])
        delta = choice.get("delta")
        if isinstance(delta, dict):
            if any(
                delta.get(name) for name in ("tool_calls", "function_call", "reasoning_content", "reasoning", "audio")
            ):
                self.blocked = "it has called a tool, or has reasoned"
            said = delta.get("content")
        else:
            said = choice.get("text")
        said = said if isinstance(said, str) else ""
        self._count(document, choice, said)
        return said

    def _take_prompt(self, place: dict[str, Any]) -> None:
        """The first replica's: in the prompt of one that goes on is what was said before, too."""
        prompt = place.get("prompt_token_ids")
        if isinstance(prompt, list) and self.prompt_ids is None and self.ids is not None and not self.tokens:
            self.prompt_ids, self.prompt_tokens = prompt, len(prompt)

    def _count(self, document: dict[str, Any], choice: dict[str, Any], said: str) -> None:
        ids = choice.get("token_ids")
        if ids is None and isinstance(verbose := document.get("__verbose"), dict):
            ids = verbose.get("tokens")
            if self.prompt_tokens is None and "tokens_evaluated" in verbose:
                self.prompt_tokens = count_of(verbose["tokens_evaluated"])
        if isinstance(ids, list) and self.ids is not None:
            self.ids += ids
            self._add(len(ids))
        elif isinstance(usage := document.get("usage"), dict) and "completion_tokens" in usage:
            self._take_usage(Usage(usage))
        elif said:
            self.ids = None
            self._add(1)

    def _take_usage(self, usage: Usage) -> None:
        if usage.prompt and self.prompt_tokens is None and not self.tokens:
            self.prompt_tokens = usage.prompt
        more = usage.completion - self._counted
        if more > 0:
            self.ids = None
            self._add(more)

    def _add(self, more: int) -> None:
        self.tokens, self._counted = min(self.tokens + more, MAX_AMOUNT), self._counted + more


def story_of(resume: dict[str, Any]) -> Story:
    """What a client has of a stream, as it says. Raises RefusalError."""
    text, name, created, tokens = (resume.get(key) for key in ("text", "id", "created", "tokens"))
    model = resume.get("model", "")
    if not (isinstance(text, str) and isinstance(name, str) and isinstance(model, str) and len(text) <= MOST_STORY):
        raise _wrong("text, id, model: not texts")
    if not (type(created) is int and type(tokens) is int and 0 <= created < 1 << 40 and 0 <= tokens <= len(text)):
        raise _wrong("created, tokens: not numbers, or more tokens than characters")
    if not name.isascii() or not name.isprintable() or len(name) > _MOST_ID or len(model) > 512:
        raise _wrong("id, model: too long, or not printable")
    finish = resume.get("finish_reason")
    if finish is not None and finish not in ("stop", "length", "content_filter"):
        raise _wrong("finish_reason: not one of text")
    return Story(name, created, model, text, None, None, tokens, None, finish)


def _wrong(what: str) -> RefusalError:
    return RefusalError(400, f"sluice_resume: {what}", remedy="send what the stream has said", param="sluice_resume")


Way = Literal["template", "message", "prompt", "count"]
"""How a replica is asked: for the prompt first, to go on with the last message or with a prompt, or how many tokens the
prompt has."""


@dataclass(slots=True)
class Plan:
    """What a replica is asked to go on with a story."""

    way: Way
    path: str
    body: bytes


def plan(asked: Asked, story: Story, engine: EngineName, resume: Resume) -> Plan | None:
    """How another replica goes on; None where its engine cannot."""
    if resume == "none":
        return None
    document = _shortened(asked, story)
    left = None if asked.most_tokens is None else max(asked.most_tokens - story.tokens, 1)
    ids = story.ids if resume == "tokens" else None
    if asked.ability == "completions":
        prompt: Any = document["prompt"] + story.text
        if ids is not None and engine == "llama.cpp":
            prompt = [document["prompt"], *ids]
        elif ids is not None and story.prompt_ids is not None:
            prompt = story.prompt_ids + ids
        return _of_prompt(document, prompt, left)
    if ids is not None and story.prompt_ids is not None and engine != "llama.cpp":
        return _of_prompt(document, story.prompt_ids + ids, left)
    if engine == "llama.cpp":
        return Plan("template", "/apply-template", dump({**document, "stream": False}))
    messages = [*document["messages"]]
    last = messages[-1] if messages else None
    goes_on = document.get("continue_final_message") is True
    if goes_on and isinstance(last, dict) and last.get("role") == "assistant" and isinstance(last.get("content"), str):
        messages[-1] = {**last, "content": last["content"] + story.text}
    else:
        messages.append({"role": "assistant", "content": story.text})
    document |= {"messages": messages, "add_generation_prompt": False, "continue_final_message": True}
    if has_counts(asked, engine):
        document |= _counts(document)
    for name in ("max_completion_tokens", "max_tokens"):
        if document.get(name) is not None:
            document[name] = left
    return Plan("message", "/v1/chat/completions", dump(document))


def plan_of_template(asked: Asked, story: Story, answer: bytes, resume: Resume) -> Plan | None:
    """After the answer of `/apply-template`; None where it is none."""
    try:
        prompt = json.loads(answer)["prompt"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if not isinstance(prompt, str):
        return None
    left = None if asked.most_tokens is None else max(asked.most_tokens - story.tokens, 1)
    whole: Any = [prompt, *story.ids] if resume == "tokens" and story.ids else prompt + story.text
    return _of_prompt(_shortened(asked, story), whole, left)


def _shortened(asked: Asked, story: Story) -> dict[str, Any]:
    """What was asked, with llama.cpp's own bound of the rest, and without `verbose`: its numbers are of the rest."""
    document = {name: value for name, value in asked.document.items() if name != "verbose"}
    most = document.get(N_PREDICT)
    if type(most) is int and most > 0:
        document[N_PREDICT] = max(most - story.tokens, 1)
    return document


def _of_prompt(document: dict[str, Any], prompt: Any, left: int | None) -> Plan:
    made = {name: value for name, value in document.items() if name not in _CHAT_ONLY}
    made["prompt"] = prompt
    if left is not None:
        made["max_tokens"] = left
    return Plan("prompt", "/v1/completions", dump(made))


def plan_of_count(asked: Asked) -> Plan:
    """How a replica says how many tokens the prompt has: in the usage of an answer of one more."""
    document = {name: value for name, value in asked.document.items() if name not in _OF_A_STREAM}
    path = "/v1/chat/completions" if asked.ability == "chat" else "/v1/completions"
    return Plan("count", path, dump({**document, "max_tokens": 1}))


def has_ids(asked: Asked, engine: EngineName) -> bool:
    """Whether an engine gives token ids in such a stream. llama.cpp and SGLang do not in a chat: there it is the text
    that goes on, after the prompt that the engine makes of the chat."""
    if asked.document.get("return_token_ids") or asked.document.get("verbose"):
        return False  # the client has asked, and wants to see them
    return engine == "vllm" or (engine in ("llama.cpp", "sglang") and asked.ability == "completions")


def with_ids(asked: Asked, engine: EngineName) -> bytes:
    """The body that asks for token ids, too."""
    extra = b'"return_tokens":true,"verbose":true,' if engine == "llama.cpp" else b'"return_token_ids":true,'
    at = asked.body.index(b"{") + 1
    return b"".join((asked.body[:at], extra, asked.body[at:]))


def has_counts(asked: Asked, engine: EngineName) -> bool:
    """Whether an engine that gives no token ids in such a stream says with each part of the text how many they are: one
    part may be several."""
    options = asked.document.get("stream_options")
    seen = isinstance(options, dict) and options.get("continuous_usage_stats")
    return engine == "sglang" and asked.ability == "chat" and not seen


def with_counts(asked: Asked) -> bytes:
    """The body that asks for them, too."""
    return dump(asked.document | _counts(asked.document))


def _counts(document: dict[str, Any]) -> dict[str, Any]:
    return {"stream_options": {**(document.get("stream_options") or {}), "continuous_usage_stats": True}}


def without_counts(event: bytes) -> bytes:
    """A part of the text as it would be if nobody had asked for them."""
    return _USAGE.sub(b"", event)


def without_ids(event: bytes) -> bytes:
    """An event as it would be if nobody had asked for token ids."""
    if b'"token_ids"' in event or b'"prompt_token_ids"' in event:
        event = _IDS.sub(b"", event)
    at = event.find(b',"__verbose":')
    if at < 0:
        return event
    try:
        text = event[at + 13 :].decode()
        _, end = _DECODER.raw_decode(text)
    except ValueError:
        return event
    return event[:at] + text[end:].encode()


class Rewriter:
    """Makes the events of the replica that goes on the rest of the first one's."""

    __slots__ = ("_ability", "_before", "_story", "owed")

    def __init__(self, story: Story, ability: str) -> None:
        self._story = story
        self._ability = ability
        self._before = story.tokens
        self.owed: dict[str, Any] | None = None
        """The chunk with the usage, of an engine that has it in the last part of the text."""

    def text(self, event: bytes) -> bytes:
        """A part of the answer; empty: nothing of it is left."""
        document = document_of(event)
        choices = None if document is None else document.get("choices")
        if document is None or not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            return b""
        choice = choices[0]
        delta = choice.get("delta")
        said = delta.get("content") if isinstance(delta, dict) else choice.get("text")
        finish = choice.get("finish_reason")
        if not said and finish is None:
            return b""
        document.pop("__verbose", None)
        usage = document.get("usage")
        if isinstance(usage, dict):
            document["usage"] = self.whole(usage)
        if self._ability == "chat":
            if "usage" in document:
                self.owed = {**document, "object": "chat.completion.chunk", "choices": []}
                self._name(self.owed)
                del document["usage"]
            document["object"] = "chat.completion.chunk"
            document["choices"] = [
                {"index": 0, "delta": {"content": said} if said else {}, "logprobs": None, "finish_reason": finish}
            ]
        self._name(document)
        return event_of(document)

    def usage(self, document: dict[str, Any]) -> dict[str, Any]:
        """The chunk with the usage, of the whole stream."""
        self.owed = None
        usage = document.get("usage")
        if isinstance(usage, dict):
            document["usage"] = self.whole(usage)
        if self._ability == "chat":
            document["object"] = "chat.completion.chunk"
        document.pop("__verbose", None)
        self._name(document)
        return document

    def whole(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The usage of all replicas together: what was said before is in the last one's prompt."""
        prompt, completion = (count_of(usage.get(name)) for name in ("prompt_tokens", "completion_tokens"))
        known = self._story.prompt_tokens
        said = self._before if known is None else max(prompt - known, 0)
        prompt = max(prompt - said, 0)
        completion += said
        return {**usage, "prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _name(self, document: dict[str, Any]) -> None:
        story = self._story
        document["id"], document["created"] = story.id, story.created
        if story.model:
            document["model"] = story.model


def full(asked: Asked, story: Story) -> bytes:
    """The event after which a stream has all tokens that were asked for."""
    said: dict[str, Any] = {"delta": {}} if asked.ability == "chat" else {"text": ""}
    return event_of(_named(asked, story) | {"choices": [{"index": 0, **said, "finish_reason": "length"}]})


def ending(asked: Asked, story: Story, prompt_tokens: int) -> list[bytes]:
    """The rest of a stream of which only the end did not come: its usage, where the client wants it."""
    if not asked.shows_usage:
        return []
    total = prompt_tokens + story.tokens
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": story.tokens, "total_tokens": total}
    return [event_of(_named(asked, story) | {"choices": [], "usage": usage})]


def _named(asked: Asked, story: Story) -> dict[str, Any]:
    kind = "chat.completion.chunk" if asked.ability == "chat" else "text_completion"
    return {"id": story.id, "object": kind, "created": story.created, "model": story.model}
