"""Clients of a gateway, by the `openai` package without its retries: `gateway_clients.py DO URL KEY MODEL CERTIFICATE`.

`stream` says each part of a stream as it comes, and at the end its finish_reason and completion tokens. `crowd` asks
again and again, each time by another connection, until its input ends, and says how often and what failed.
"""

from __future__ import annotations

import sys
import threading

import httpx
import openai


def stream(client: openai.OpenAI, model: str) -> None:
    """One, to its end."""
    asked = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "count"}], stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    for part in asked:
        for choice in part.choices:
            print(choice.delta.content or "", choice.finish_reason or "", flush=True)
        if part.usage:
            print("tokens", part.usage.completion_tokens, flush=True)


def crowd(client: openai.OpenAI, model: str) -> None:
    """Two at once."""
    over, asked, failed = threading.Event(), [0, 0], list[str]()

    def ask(number: int) -> None:
        while not over.is_set():
            asked[number] += 1
            try:
                said = client.chat.completions.create(model=model, messages=[{"role": "user", "content": "The sky is"}])
                assert said.choices[0].message.content == "blue"
            except Exception as error:
                failed.append(repr(error))
            if asked == [1, 1]:
                print("begun", flush=True)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(asked))]
    for one in threads:
        one.start()
    sys.stdin.read()
    over.set()
    for one in threads:
        one.join()
    print(sum(asked), failed, flush=True)


def main() -> None:
    """As the command line says."""
    do, url, key, model, certificate = sys.argv[1:]
    alone = httpx.Client(verify=certificate, limits=httpx.Limits(max_keepalive_connections=0))
    client = openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=60, http_client=alone)
    {"stream": stream, "crowd": crowd}[do](client, model)


if __name__ == "__main__":
    main()
