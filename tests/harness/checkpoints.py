"""Small random models of several architectures, saved the way a user's are."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SMALL = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": None,
    "initializer_range": 0.3,
}
ARCHITECTURES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 21, "num_key_value_heads": 4}),
}


def save_checkpoints(folder: Path) -> dict[str, str]:
    """Save one of each, the Llama with a byte-level tokenizer."""
    torch.manual_seed(7)
    for name, (model, config, extra) in ARCHITECTURES.items():
        model(config(**{**SMALL, **extra})).save_pretrained(folder / name)
    byte_tokenizer().save_pretrained(folder / "llama")
    return {name: str(folder / name) for name in ARCHITECTURES}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE without merges: an id a byte, as GPT-2 spells bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 1, "</s>": 2, "<unk>": 0, **{letter: 3 + i for i, letter in enumerate(alphabet)}}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
