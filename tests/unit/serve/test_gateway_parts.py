"""Parts of the gateway that are pure: events, bodies, heads, what goes on, figures."""

from __future__ import annotations

import json
import os
import random
from typing import Any

import pytest

from sluice.core.gate import MAX_AMOUNT
from sluice.serve.gateway import body, continuation, figures, heads
from sluice.serve.gateway.body import Asked
from sluice.serve.gateway.continuation import Rewriter, Story
from sluice.serve.gateway.refusals import RefusalError
from sluice.serve.gateway.repeated import SIZE, Repeated
from sluice.serve.gateway.sse import Events, Kind, TooLongError, document_of, event_of, kind_of
from tests.unit.serve.gateway_bed import chunk, role_chunk, usage_chunk

CHAT = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "x"}]}


def asked(document: dict[str, Any], ability: heads.Ability = "chat") -> Asked:
    return body.read(ability, json.dumps(document).encode())


@pytest.mark.parametrize("mark", [b"\n\n", b"\r\n\r\n", b"\r\r", b"\n\r\n"])
def test_events_are_the_same_whatever_pieces_they_come_in(mark: bytes) -> None:
    events = [
        b"data: {}" + mark,
        b": comment" + mark,
        b"event: a" + mark[: len(mark) // 2] + b"data: 5" + mark,
        b"x" * 50 + mark,
    ]
    data = b"".join(events)
    draw = random.Random(1)
    for _ in range(300):
        cutter, found, at = Events(), [], 0
        while at < len(data):
            size = draw.randrange(1, 12)
            found += cutter.feed(data[at : at + size])
            at += size
        assert b"".join(found) == data and cutter.rest == b""
        assert len(found) == 4 or mark == b"\r\n\r\n", found
    assert Events().feed(data + b"half") == events


def test_an_event_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice.serve.gateway.sse.MOST_EVENT", 100)
    cutter = Events()
    cutter.feed(b"x" * 100)
    with pytest.raises(TooLongError):
        cutter.feed(b"x")


@pytest.mark.parametrize(
    ("event", "kind"),
    [
        (chunk("a"), Kind.TEXT),
        (usage_chunk(1, 2), Kind.USAGE),
        (chunk("a", usage=None).replace(b": null}", b":null}"), Kind.TEXT),
        (b"data: [DONE]\n\n", Kind.DONE),
        (b"data:[DONE]\n\n", Kind.DONE),
        (b": waiting\n\n", Kind.OTHER),
        (b"event: a\ndata: {}\n\n", Kind.TEXT),
        (b'data: {"error": 1}\n\n', Kind.ERROR),
        (chunk('say "usage": {} and "error"'), Kind.TEXT),
    ],
)
def test_kinds_of_events(event: bytes, kind: Kind) -> None:
    assert kind_of(event) is kind


def test_the_body_stays_what_it_was_but_for_the_usage() -> None:
    raw = b' {"model": "m", "stream":true, "messages":[], "x": 1e400, "y": "\\ud800"}'
    one = body.read("chat", raw)
    assert one.body == b' {"stream_options":{"include_usage":true},' + raw[2:]
    assert json.loads(one.body)["stream_options"] == {"include_usage": True} and not one.shows_usage
    for same in ({"model": "m", "messages": []}, CHAT | {"stream_options": {"include_usage": True}}):
        raw = json.dumps(same).encode()
        assert body.read("chat", raw).body is raw
    other = asked(CHAT | {"stream_options": {"include_usage": False, "x": 1}})
    assert json.loads(other.body)["stream_options"] == {"include_usage": True, "x": 1} and not other.shows_usage
    raw = json.dumps({"model": "m", "input": "x", "stream": True}).encode()
    assert body.read("responses", raw).body is raw


def test_what_is_reserved() -> None:
    assert asked(CHAT | {"max_tokens": 10}).reserved(500) == asked(CHAT | {"max_tokens": 10}).prompt_tokens + 10
    assert asked(CHAT | {"max_tokens": 10, "max_completion_tokens": 20, "n": 3}).reserved(500) - 60 < 40
    assert asked(CHAT).reserved(500) > 500
    listed = asked({"model": "m", "prompt": ["a", "b"], "max_tokens": 7}, "completions")
    assert listed.choices == 2 and listed.reserved(0) >= 14
    # llama.cpp's own name of the bound, which it prefers, and of n; below 0 it is as if nothing bounded the answer
    assert asked(CHAT | {"max_tokens": 10, "n_predict": 900}).most_tokens == 900
    assert asked({"model": "m", "prompt": "a", "n_predict": 900}, "completions").reserved(1) > 900
    assert asked({"model": "m", "input": "a", "n_predict": 900}, "responses").reserved(1) > 900
    assert asked(CHAT | {"max_tokens": 10, "n_predict": -1}).reserved(500) > 500
    assert asked(CHAT | {"n_cmpl": 4}).choices == 4
    for wrong in (1e6, "900", True):
        with pytest.raises(RefusalError, match="n_predict"):
            asked(CHAT | {"n_predict": wrong})
    # the gate refuses what is more as a mistake of its caller
    assert asked(CHAT | {"max_tokens": 1 << 30, "n": 128}).reserved(1) == MAX_AMOUNT
    image = {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 4_000_000}}],
    }
    assert asked(CHAT | {"messages": [image]}).prompt_tokens < 2000


def test_prompts_with_one_begin_have_numbers_in_common() -> None:
    def numbers(text: str, salt: bytes = b"tenant") -> list[int]:
        return asked(CHAT | {"messages": [{"role": "user", "content": text}]}).prefix(salt)

    first, second = numbers("a" * 20_000), numbers("a" * 15_000 + "b" * 5000)
    same = sum(x == y for x, y in zip(first, second, strict=False))
    assert 0 < same < len(first) <= 16 and first[:same] == second[:same]
    assert set(first).isdisjoint(numbers("a" * 20_000, b"other")) and numbers("a") == []


def story(*events: bytes) -> Story:
    made = Story()
    for event in events:
        made.keep(event)
    made.absorb()
    return made


def test_a_story_has_what_was_said() -> None:
    one = story(role_chunk(), chunk("It"), chunk(" is"), chunk(finish="stop"))
    assert (one.text, one.tokens, one.finish, one.id, one.created, one.ids) == (
        "It is",
        2,
        "stop",
        "chatcmpl-1",
        100,
        None,
    )
    tool = chunk("a").replace(b'"content"', b'"reasoning_content"')
    assert story(tool).blocked
    large = story(*[chunk("x" * 10_000)] * 500)
    assert large.blocked and not large.text


def test_token_ids_of_vllm_are_asked_for_kept_and_hidden() -> None:
    one = asked(CHAT | {"max_tokens": 10})
    assert continuation.has_ids(one, "vllm") and not continuation.has_ids(one, "llama.cpp")
    assert json.loads(continuation.with_ids(one, "vllm"))["return_token_ids"] is True
    first = (
        b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":'
        b'{"role":"assistant","content":""},"logprobs":null,"finish_reason":null,"token_ids":null}],"prompt_token_ids":[5,6,7]}\n\n'
    )
    second = (
        b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":'
        b'{"content":"a,\\"token_ids\\":[1]"},"logprobs":null,"finish_reason":null,"token_ids":[11,12]}]}\n\n'
    )
    kept = story(first, second)
    assert (kept.prompt_ids, kept.ids, kept.tokens) == ([5, 6, 7], [11, 12], 2)
    for event in (first, second):
        document = document_of(continuation.without_ids(event))
        wanted = document_of(event)
        assert document is not None and wanted is not None
        wanted.pop("prompt_token_ids", None)
        wanted["choices"][0].pop("token_ids")
        assert document == wanted
    plan = continuation.plan(one, kept, "vllm", "tokens")
    assert plan is not None and plan.path == "/v1/completions"
    sent = json.loads(plan.body)
    assert (sent["prompt"], sent["max_tokens"], sent["stream"]) == (
        [5, 6, 7, 11, 12],
        8,
        True,
    ) and "messages" not in sent
    rest = Rewriter(kept, "chat")
    choice = b'{"index":0,"text":" b","finish_reason":null}'
    text = b'data: {"id":"cmpl","object":"text_completion","created":9,"model":"m","choices":[%b]}\n\n' % choice
    made = document_of(rest.text(text))
    assert made is not None and made["object"] == "chat.completion.chunk" and made["id"] == "c"
    assert made["choices"][0]["delta"] == {"content": " b"}
    usage = rest.usage({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9}})[
        "usage"
    ]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (3, 6, 9)


def test_sglang_says_token_ids_in_completions_alone() -> None:
    """As SGLang 0.5.23 writes them; it refuses a chat that streams and asks for them."""
    one = asked({"model": "m", "stream": True, "prompt": "six"}, "completions")
    assert continuation.has_ids(one, "sglang") and not continuation.has_ids(asked(CHAT), "sglang")
    first = (
        b'data: {"id":"c","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":" a",'
        b'"logprobs":null,"finish_reason":null,"matched_stop":null,"token_ids":[9],"prompt_token_ids":[6,7]}],"usage":null}\n\n'
    )
    hidden = first.replace(b',"token_ids":[9],"prompt_token_ids":[6,7]', b"")
    assert continuation.without_ids(first) == hidden
    plan = continuation.plan(one, story(first), "sglang", "tokens")
    assert plan is not None and json.loads(plan.body)["prompt"] == [6, 7, 9]


def test_numbers_of_an_engine_are_no_more_than_the_gate_takes() -> None:
    usage = {"prompt_tokens": 1 << 80, "completion_tokens": 1 << 80}
    kept = story(chunk("a", usage=usage))
    kept.goes_on()
    kept.keep(chunk("b", usage=usage))
    kept.absorb()
    assert (kept.prompt_tokens, kept.tokens) == (MAX_AMOUNT, MAX_AMOUNT)
    for wrong in (-1, "9", True, None, []):
        kept = story(chunk("a", usage={"prompt_tokens": wrong, "completion_tokens": wrong}))
        assert (kept.prompt_tokens, kept.tokens) == (None, 0)
    verbose = {"tokens": [1], "tokens_evaluated": 1 << 80}
    assert story(chunk("a", __verbose=verbose)).prompt_tokens == MAX_AMOUNT


def test_each_token_counts_once_however_its_part_says_so() -> None:
    """Parts with ids, with a usage so far and with neither, in one stream."""

    def so_far(text: str, completion: int) -> bytes:
        return chunk(text, usage={"prompt_tokens": 1, "completion_tokens": completion})

    def by_ids(text: str, *ids: int) -> bytes:
        choice = {"index": 0, "delta": {"content": text}, "token_ids": ids, "finish_reason": None}
        return event_of({"id": "1", "created": 1, "model": "m", "choices": [choice]})

    assert story(*[chunk("a")] * 4, so_far("b", 5)).tokens == 5
    assert story(by_ids("ab", 1, 2), so_far("c", 3)).tokens == 3
    assert story(so_far("ab", 2), chunk("c"), so_far("d", 4)).tokens == 4
    assert story(*(so_far("a", number) for number in (9, 0, 9, 3, 10))).tokens == 10, "it counts back"
    assert story(chunk("ab", usage={"completion_tokens": 2})).tokens == 2
    assert story(so_far("a", 1 << 80), chunk("b")).tokens == MAX_AMOUNT


def test_token_ids_without_text_do_not_fill_the_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(continuation, "MOST_STORY_TOKENS", 100)
    choice = {"index": 0, "delta": {"content": ""}, "token_ids": [1] * 60, "finish_reason": None}
    event = event_of({"id": "1", "created": 1, "model": "m", "choices": [choice]})
    assert story(event).ids == [1] * 60
    more = story(event, event, event)
    assert more.ids is None and "longer than 100 tokens" in more.blocked


def test_what_llama_cpp_says_next_to_its_text_is_hidden() -> None:
    shown = b'data: {"choices":[{"text":" a","index":0,"logprobs":null,"finish_reason":null}],"id":"c"'
    more = (
        b',"__verbose":{"content":" }\\"{ a","tokens":[270],"tokens_predicted":1,"tokens_evaluated":2,"x":{"y":[{}]}}'
    )
    timings = b',"timings":{"n":1}}\n\n'
    assert continuation.without_ids(shown + more + timings) == shown + timings
    assert continuation.without_ids(shown + timings) == shown + timings
    kept = story(shown + more + timings)
    assert (kept.text, kept.ids, kept.tokens, kept.prompt_tokens) == (" a", [270], 1, 2)
    plan = continuation.plan(
        asked({"model": "m", "stream": True, "prompt": "six"}, "completions"), kept, "llama.cpp", "tokens"
    )
    assert plan is not None and json.loads(plan.body)["prompt"] == ["six", 270]


def test_a_stream_that_goes_on_gets_no_more_tokens_by_llama_cpps_name() -> None:
    kept = story(chunk("It"), chunk(" is"))
    one = asked({"model": "m", "stream": True, "prompt": "six", "n_predict": 9}, "completions")
    plan = continuation.plan(one, kept, "llama.cpp", "text")
    assert plan is not None and json.loads(plan.body)["n_predict"] == 7
    made = continuation.plan_of_template(asked(CHAT | {"n_predict": 9}), kept, b'{"prompt": "x"}', "text")
    assert made is not None and json.loads(made.body)["n_predict"] == 7
    loud = continuation.plan_of_template(asked(CHAT | {"verbose": True}), kept, b'{"prompt": "x"}', "text")
    assert loud is not None and "verbose" not in json.loads(loud.body), "its numbers would be taken for the bill's"
    endless = continuation.plan_of_template(asked(CHAT | {"n_predict": -1}), kept, b'{"prompt": "x"}', "text")
    assert endless is not None and json.loads(endless.body)["n_predict"] == -1


def test_a_chat_goes_on_by_its_last_message() -> None:
    kept = story(chunk("It"), chunk(" is"))
    plan = continuation.plan(asked(CHAT | {"max_completion_tokens": 9}), kept, "sglang", "text")
    assert plan is not None
    sent = json.loads(plan.body)
    assert sent["messages"][-1] == {"role": "assistant", "content": "It is"} and sent["max_completion_tokens"] == 7
    assert (
        sent["continue_final_message"] is True and sent["add_generation_prompt"] is False and "max_tokens" not in sent
    )
    begun = CHAT | {"messages": [{"role": "assistant", "content": "So: "}], "continue_final_message": True}
    plan = continuation.plan(asked(begun), kept, "vllm", "text")
    assert plan is not None and json.loads(plan.body)["messages"] == [{"role": "assistant", "content": "So: It is"}]
    assert continuation.plan(asked(CHAT), kept, "openai", "none") is None


def test_a_repeated_request_has_the_id_of_the_first_until_that_was_answered() -> None:
    table = Repeated(bytearray(SIZE))
    first, billed = table.name("key", b"k", {"a": 1, "b": 2})
    assert len(first) == 32 and not billed and (first, False) == table.name("key", b"k", {"b": 2, "a": 1})
    others = [("key2", b"k", {"a": 1, "b": 2}), ("key", b"l", {"a": 1, "b": 2}), ("key", b"k", {"a": 1})]
    assert len({first, *(table.name(*other)[0] for other in others)}) == 4
    table.bill(first)
    again = {table.name("key", b"k", {"a": 1, "b": 2}) for _ in range(5)}
    assert len(again) == 5 and all(billed and name != first for name, billed in again)


def test_nobody_chooses_keys_that_make_a_table_forget_a_bill() -> None:
    table = Repeated(bytearray(os.urandom(SIZE)))
    names = [f"{number << 20:016x}{number:016x}" for number in range(1, 101)]  # all were of one place
    for name in names:
        table.bill(name)
    assert sum(table.billed(name) for name in names) > 90
    made = [bytearray(SIZE), bytearray(SIZE)]
    for region in made:
        Repeated.create(region).bill(names[0])
        assert Repeated(region).billed(names[0]), "of another worker"
    assert made[0][-32:] != made[1][-32:]


def test_framing_that_two_could_read_in_two_ways_is_refused() -> None:
    host = {b"host": b"a"}
    assert heads.check_framing("1.1", host | {b"content-length": b"5"}) == 5
    assert heads.check_framing("1.1", host | {b"transfer-encoding": b"Chunked"}) is None
    for version, headers in (
        ("1.1", {}), ("2.0", host), ("1.1", host | {b"content-length": b"5 "}),
        ("1.1", host | {b"content-length": "\N{ARABIC-INDIC DIGIT THREE}".encode()}),
        ("1.0", host | {b"transfer-encoding": b"chunked"}), ("1.1", host | {b"transfer-encoding": b"gzip"}),
        ("1.1", host | {b"transfer-encoding": b"chunked", b"content-length": b"5"}),
    ):  # fmt: skip
        with pytest.raises(RefusalError) as error:
            heads.check_framing(version, headers)
        assert error.value.close


def test_nothing_of_a_client_is_in_a_head_for_a_replica() -> None:
    trace = b"00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01"
    assert b"traceparent: " + trace in heads.to_replica("/p", "m", "s", "1", 5, {b"traceparent": trace})
    for wrong in (trace + b"\r\nx: y", b"x", trace[:-1] + b"\xff"):
        assert b"traceparent" not in heads.to_replica("/p", "m", "s", "1", 5, {b"traceparent": wrong})


def test_figures_in_the_form_of_prometheus() -> None:
    one = figures.Figures()
    one.add("requests", 'a"b\\c\n', "ok")
    one.time("queue_seconds", "m", 0.02)
    one.time("queue_seconds", "m", 1e9)
    text = figures.render(one.counts, [("waiting", "What waits.", "m", 3.0)])
    assert 'sluice_gateway_requests_total{service="a\\"b\\\\c\\n",outcome="ok"} 1' in text
    assert 'sluice_gateway_queue_seconds_bucket{service="m",le="0.03"} 1' in text
    assert 'sluice_gateway_queue_seconds_bucket{service="m",le="+Inf"} 2' in text
    assert (
        'sluice_gateway_queue_seconds_count{service="m"} 2' in text and 'sluice_gateway_waiting{service="m"} 3' in text
    )
    for number in range(2000):
        one.add("requests", f"s{number}", "ok")
    assert len(one.counts) < 600


def test_an_event_is_what_its_document_was() -> None:
    assert document_of(event_of({"a": "ü\n"})) == {"a": "ü\n"}
    assert document_of(b'event: x\r\ndata: {"a":\r\ndata: 1}\r\n\r\n') == {"a": 1}
    assert document_of(b"data: [1]\n\n") is None and document_of(b"data: {\n\n") is None
