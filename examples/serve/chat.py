"""Ask a service's model, and print its answer as it comes: `python chat.py MODEL QUESTION`.

The address and the key are in $OPENAI_BASE_URL and $OPENAI_API_KEY.
"""

import sys

from openai import OpenAI


def main() -> None:
    """One question, one answer."""
    model, question = sys.argv[1:3]
    client = OpenAI()
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=400,
        stream=True,
        stream_options={"include_usage": True},
        extra_headers={"Sluice-Deadline": "900"},  # seconds to wait for a replica where there is none
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        elif chunk.usage:
            print(f"\n[{chunk.usage.prompt_tokens} + {chunk.usage.completion_tokens} tokens]")


if __name__ == "__main__":
    main()
