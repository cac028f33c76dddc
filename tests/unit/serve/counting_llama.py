"""Writes a Llama that counts, as Hugging Face's files: after word i comes word i + 1. Needs PyTorch and transformers.

As `tests/serve_models.py` does for llama.cpp: attention and MLP run, their output projections are zero.
"""

from __future__ import annotations

import sys
from pathlib import Path

WORDS = 512
TEMPLATE = (
    "{% for one in messages %}{{ one.role }} {{ one.content }} {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


def write(folder: Path) -> None:
    """The model and its tokenizer: a word is a token, `w5` follows `w4`, and `w0` follows `assistant`."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    special = ["<s>", "</s>", "<unk>", "user", "assistant"]
    words = special + [f"w{number}" for number in range(WORDS - len(special))]
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=WORDS, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=1024, bos_token_id=0, eos_token_id=1, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(WORDS))
        model.lm_head.weight.copy_(torch.roll(torch.eye(WORDS), 1, 0))
    model.save_pretrained(folder)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
