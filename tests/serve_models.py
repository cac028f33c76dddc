"""Tiny models for llama.cpp whose output is known, made in a moment: `python -m tests.serve_models FOLDER`.

`counting`: attention and MLP are computed, but their output projections are zero, so that the next word depends on the
last one alone: " six" is followed by " seven", up to WORDS words, and then the stream ends. All that is no word is
followed by " one". Every logit but the right one is far away, so that sampled text is the same as greedy text.
Each stream is known word by word: `counted(after, number)`.

`random`: weights from a seed, so that each word depends on the whole prompt: a text that was continued without all of
its prompt is another text. It never ends by itself.

`make_projector`: a vision encoder with weights from a seed for either, so that a text depends on the image, too.

Prompts of completions begin with a space: the words are tokens with their space before them. The chat template puts
the last message of the user after the assistant's mark: a chat of "six" is answered by " seven eight ...".
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

import gguf
import numpy as np

Name = Literal["counting", "random"]
WORDS = 1999
WIDTH = 64
HEADS = 4
_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
_TENS = "zero ten twenty thirty forty fifty sixty seventy eighty ninety".split()
_MARKS = ("<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<|end|>")
_UNKNOWN, _BEGIN, _END = 0, 1, 2
FIRST_WORD = 3 + 256 + len(_MARKS)
"""Token of " one"."""
_END_OF_TURN = FIRST_WORD - 1
TEMPLATE = (
    "{%- for message in messages %}{{ '<|' + message['role'] + '|> ' + (message['content'] or '') }}"
    "{%- if not loop.last or add_generation_prompt %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|assistant|> ' }}"
    "{%- set last = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{%- if last %}{{ last[-1]['content'] }}{% endif %}{% endif %}"
)
PLAIN_TEMPLATE = (
    "{%- if tools %}{{ '<|system|> <tools>' }}{%- for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "{{ '</tools><|end|>' }}{%- endif %}"
    "{%- for message in messages %}{{ '<|' + message['role'] + '|> ' + (message['content'] or '') }}"
    "{%- for call in message['tool_calls'] or [] %}"
    "{{ '<tool_call>\\n{\"name\": \"' + call['function']['name'] + '\", \"arguments\": ' }}"
    "{{ (call['function']['arguments'] | tojson) + '}\\n</tool_call>' }}{% endfor %}{{ '<|end|>' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""As most have it, with tools; llama.cpp has grammars accept what begins the assistant's turn. Chats are answered
" one two ..."."""


def word(number: int) -> str:
    """The word of a number from 1 to WORDS: one, twenty-one, one-hundred-two."""
    if number < 20:
        return _ONES[number]
    if number < 100:
        return _TENS[number // 10] + (f"-{_ONES[number % 10]}" if number % 10 else "")
    size, name = (100, "hundred") if number < 1000 else (1000, "thousand")
    return f"{word(number // size)}-{name}" + (f"-{word(number % size)}" if number % size else "")


def counted(after: int, number: int) -> str:
    """What the model `counting` says after the word of `after` (0: after what is no word), at most `number` words."""
    return "".join(f" {word(one)}" for one in range(after + 1, min(after + number, WORDS) + 1))


def make_model(
    path: Path, name: Name, *, layers: int = 2, feed: int = 128, width: int = WIDTH, seed: int = 18,
    template: str = TEMPLATE, says: str = "",
) -> Path:  # fmt: skip
    """Write the model; `layers`, `feed` (width of the MLP) and `width` make it slower. `says`: of `counting`, a
    text that follows all that is no word, as one token, and ends the stream.
    """
    pieces = [*_pieces(), *([(says, gguf.TokenType.USER_DEFINED)] if says else [])]
    draw = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(f"sluice-{name}")
    writer.add_context_length(32768)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(feed)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(width // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(pieces))
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([text for text, _ in pieces])
    writer.add_token_scores([0.0] * len(pieces))
    writer.add_token_types([kind for _, kind in pieces])
    writer.add_unk_token_id(_UNKNOWN)
    writer.add_bos_token_id(_BEGIN)
    writer.add_eos_token_id(_END)
    writer.add_eot_token_id(_END_OF_TURN)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(template)

    def add(tensor: str, value: np.ndarray) -> None:
        writer.add_tensor(tensor, np.ascontiguousarray(value, dtype=np.float32))

    def random(rows: int, columns: int, scale: float) -> np.ndarray:
        return draw.standard_normal((rows, columns)) * scale / np.sqrt(columns)

    embedding = draw.choice([-1.0, 1.0], size=(len(pieces), width))
    output = np.zeros((len(pieces), width))
    counting = name == "counting"
    if counting:
        output[FIRST_WORD + 1 : FIRST_WORD + WORDS] = embedding[FIRST_WORD : FIRST_WORD + WORDS - 1]
        output[_END] = embedding[FIRST_WORD + WORDS - 1]
        # All that is no word has one and the same embedding, which " one" follows.
        embedding[:FIRST_WORD] = embedding[0]
        output[FIRST_WORD] = embedding[0]
        # Where a grammar forbids words: the end of JSON's objects and texts first, and no byte that is not ASCII.
        for place, byte in enumerate(bytes(range(128)) + b'"}'):
            output[3 + byte] = embedding[0] * (place + 1) / 1000
        output[3 + 128 : 3 + 256] = -embedding[0]
        if says:
            output[-1] = 2 * embedding[0]
            output[_END] += 2 * embedding[-1]
        output *= 8.0
    else:
        output[FIRST_WORD : FIRST_WORD + WORDS] = random(WORDS, width, 16.0)
    add("token_embd.weight", embedding)
    for layer in range(layers):
        block = f"blk.{layer}"
        out = 0.0 if counting else 2.0
        add(f"{block}.attn_norm.weight", np.ones(width))
        for part in ("q", "k", "v"):
            add(f"{block}.attn_{part}.weight", random(width, width, 1.0 if counting else 2.0))
        add(f"{block}.attn_output.weight", random(width, width, out))
        add(f"{block}.ffn_norm.weight", np.ones(width))
        add(f"{block}.ffn_gate.weight", random(feed, width, 1.0))
        add(f"{block}.ffn_up.weight", random(feed, width, 1.0))
        add(f"{block}.ffn_down.weight", random(width, feed, out))
    add("output_norm.weight", np.ones(width))
    add("output.weight", output)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def make_projector(path: Path, *, seed: int = 18) -> Path:
    """Write a vision encoder as Gemma 3's (SigLIP, one layer): an image is four tokens of a model of `WIDTH`."""
    draw = np.random.default_rng(seed)
    side, patch, width, feed = 32, 4, 32, 64
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_type("mmproj")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type("gemma3")
    writer.add_vision_image_size(side)
    writer.add_vision_patch_size(patch)
    writer.add_vision_embedding_length(width)
    writer.add_vision_feed_forward_length(feed)
    writer.add_vision_block_count(1)
    writer.add_vision_head_count(2)
    writer.add_vision_projection_dim(WIDTH)
    writer.add_vision_attention_layernorm_eps(1e-6)
    writer.add_vision_image_mean([0.5, 0.5, 0.5])
    writer.add_vision_image_std([0.5, 0.5, 0.5])
    writer.add_vision_use_gelu(True)

    def add(tensor: str, *shape: int, ones: bool = False) -> None:
        value = np.ones(shape) if ones else draw.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))
        writer.add_tensor(tensor, np.ascontiguousarray(value, dtype=np.float32))

    add("v.patch_embd.weight", width, 3, patch, patch)
    add("v.patch_embd.bias", width)
    add("v.position_embd.weight", (side // patch) ** 2, width)
    for part in ("attn_q", "attn_k", "attn_v", "attn_out"):
        add(f"v.blk.0.{part}.weight", width, width)
        add(f"v.blk.0.{part}.bias", width)
    for part, rows, columns in (("ffn_up", feed, width), ("ffn_down", width, feed)):
        add(f"v.blk.0.{part}.weight", rows, columns)
        add(f"v.blk.0.{part}.bias", rows)
    for norm in ("v.blk.0.ln1", "v.blk.0.ln2", "v.post_ln"):
        add(f"{norm}.weight", width, ones=True)
        add(f"{norm}.bias", width)
    add("mm.input_projection.weight", width, WIDTH)
    add("mm.soft_emb_norm.weight", width, ones=True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _pieces() -> list[tuple[str, int]]:
    """Texts and kinds of all tokens. Words are tokens of the user's kind, which are found before all others."""
    kinds = gguf.TokenType
    return [
        ("<unk>", kinds.UNKNOWN),
        ("<s>", kinds.CONTROL),
        ("</s>", kinds.CONTROL),
        *((f"<0x{byte:02X}>", kinds.BYTE) for byte in range(256)),
        *((mark, kinds.CONTROL) for mark in _MARKS),
        *((f" {word(number)}", kinds.USER_DEFINED) for number in range(1, WORDS + 1)),
    ]


def main() -> None:
    """Write both models into the folder of the command line."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("counting", "random"):
        print(make_model(folder / f"{name}.gguf", name))


if __name__ == "__main__":
    main()
