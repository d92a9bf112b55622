"""Tiny random models, written once a session, whose answers depend on every block of their KV.

With the usual initialization greedy answers are constant, and would hide whatever goes wrong with KV.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

VOCABULARY = 512
MAX_TOKENS = 8192
WINDOW = 256
_SPREAD = 1.5


def write_llama(folder: Path, layers: int = 4, hidden: int = 128, queries_per_kv: int = 1) -> Path:
    """One group of full attention, in which so many query heads share a head of keys and values."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 32 // queries_per_kv,
        head_dim=32,
        max_position_embeddings=MAX_TOKENS,
        tie_word_embeddings=False,
    )
    return _write(LlamaForCausalLM(_seeded(config)), folder)


def write_gemma(folder: Path, window: int = WINDOW, layers: str = "SSFSSF") -> Path:
    """Layers of sliding windows (S) and of full attention (F).

    By default two groups of sliding windows and one of full attention, which lie over each other in memory.
    """
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=len(layers),
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=MAX_TOKENS,
        sliding_window=window,
        layer_types=["full_attention" if layer == "F" else "sliding_attention" for layer in layers],
        query_pre_attn_scalar=32,
        tie_word_embeddings=False,
    )
    return _write(Gemma3ForCausalLM(_seeded(config)), folder)


def _seeded(config: LlamaConfig | Gemma3TextConfig) -> LlamaConfig | Gemma3TextConfig:
    torch.manual_seed(7)
    config.bos_token_id, config.eos_token_id, config.pad_token_id = 1, 2, 0
    return config


@torch.no_grad()
def _write(model: PreTrainedModel, folder: Path) -> Path:
    for name, weight in model.named_parameters():
        if "embed" in name:
            weight.normal_(0, 1)
        elif weight.dim() == 2:
            spread = _SPREAD * (_SPREAD if "q_proj" in name or "k_proj" in name else 1)
            weight.normal_(0, spread / weight.shape[1] ** 0.5)
    model.float().save_pretrained(folder)
    return folder
