"""Model loading: a causal LM from a local folder or a hub id, or the built-in `tiny`, generated from a seed.

A model that this engine would serve wrongly is refused: its KV must have one shape in all layers, and paged attention
must compute what the model's own attention computes.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kvferry.app.engines.embedded.attention import ATTENTION_NAME, KVShape, PagedBatch, PagedKVCache, Span
from kvferry.app.engines.embedded.tokenizer import TINY_FOLDER, Tokenizer, first_line, load_tokenizer
from kvferry.app.engines.identity import WEIGHT_SUFFIXES, ContentDigest, DigestCache, revision_of
from kvferry.core.errors import StartError

log = logging.getLogger(__name__)

TINY = "tiny"
TINY_VOCAB_SIZE = 3 + 256
PAD_ID, EOS_ID = 0, 1
TINY_CONTEXT_TOKENS = 8192
TINY_CHAT_TOKENS = 512
"""`tiny` answers noise without an end: more than this for a chat without a limit would only keep its client waiting."""
TINY_SEED = 20
TINY_GAIN = 1.5
TINY_QUERY_KEY_GAIN = 1.5
"""Gains of `tiny`'s random weights over 1/sqrt(fan in): attention is peaked, so that wrong KV changes the output."""
PROBE_TOKENS = 24
PROBE_CHUNKS = (13, 10, 1)
PROBE_BLOCK_SIZE = 4
MAX_DEVIATION = {torch.float64: 0.01, torch.float32: 0.01, torch.bfloat16: 0.25, torch.float16: 0.25}
"""Limit of the deviation between two results, relative to that between different tokens: rounding stays below, a wrong
mask or wrong positions do not.
"""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A loaded model with the properties that the engine needs."""

    name: str
    module: PreTrainedModel
    tokenizer: Tokenizer
    device: torch.device
    dtype: torch.dtype
    vocab_size: int
    context_tokens: int
    eos_token_ids: frozenset[int]
    chat_tokens: int | None
    """Most tokens of a chat's answer if the call sets no limit: `max_new_tokens` of the generation config, if any."""
    revision: str | None
    """Identity of the weights: the hub's commit, a digest of local files, `tiny`'s seed; None if unknown."""


def load_model(name: str, device: str = "auto", dtype: str = "auto", state_dir: Path | None = None) -> LoadedModel:
    """Load `tiny`, a folder or a hub id for inference.

    With a `state_dir`, where digests are cached, the files of a local model are read concurrently to compute its
    revision.

    Raises:
        StartError: the model cannot be served.
    """
    where = resolve_device(device)
    reads_files = state_dir is not None and name != TINY and os.path.exists(name)
    with ContentDigest(Path(name), DigestCache(state_dir)) if reads_files else nullcontext() as content:
        module = _tiny(dtype) if name == TINY else _pretrained(name, dtype)
        torch.nn.Module.to(module, where)
        module.train(False)
        module.requires_grad_(False)
        config = module.config.get_text_config()
        context_tokens = getattr(config, "max_position_embeddings", None)
        if not isinstance(context_tokens, int):
            raise refusal(name, "its config lacks the context length (max_position_embeddings)")
        generation = module.generation_config
        return LoadedModel(
            name=name,
            module=module,
            tokenizer=load_tokenizer(str(TINY_FOLDER) if name == TINY else name),
            device=where,
            dtype=module.dtype,
            vocab_size=config.vocab_size,
            context_tokens=context_tokens,
            eos_token_ids=frozenset(_as_ids(generation.eos_token_id if generation else None)),
            chat_tokens=generation.max_new_tokens if generation else None,
            revision=_revision(name, module, content),
        )


def _revision(name: str, module: PreTrainedModel, content: ContentDigest | None) -> str | None:
    if name == TINY:
        return f"seed-{TINY_SEED}"
    if getattr(module, "_hf_peft_config_loaded", False):
        # The folder holds an adapter, whose base weights are elsewhere.
        return None
    return revision_of(name, content, module.config, secrets.token_hex(8))


def resolve_device(device: str) -> torch.device:
    """Return the device that KVFERRY_DEVICE names. Raises `StartError` if it is missing."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    where = torch.device(device)
    if where.type == "cuda" and (where.index or 0) >= torch.cuda.device_count():
        raise StartError(
            f"KVFERRY_DEVICE={device}: torch sees {torch.cuda.device_count()} CUDA devices here; use cpu or auto"
        )
    return where


def inspect_config(name: str, dtype: str) -> KVShape | None:
    """Return the shape of a model's KV by its configuration, without its weights.

    None if that is not known: a hub id whose configuration is not on this machine, or one that lacks the sizes.

    Raises:
        StartError: the model cannot be served.
    """
    if name == TINY:
        config: Any = tiny_config()
    elif Path(name).is_dir():
        with _loading(name):
            config = AutoConfig.from_pretrained(name)
            if not any(path.suffix in WEIGHT_SUFFIXES for path in Path(name).iterdir()):
                raise FileNotFoundError(f"it has no file of weights ({', '.join(WEIGHT_SUFFIXES)})")
    else:
        try:
            config = AutoConfig.from_pretrained(name, local_files_only=True)
        except (OSError, ValueError):
            return None
    refuse_by_config(name, config)
    return _kv_shape(config, getattr(config, "dtype", None) if dtype == "auto" else getattr(torch, dtype))


def _kv_shape(config: Any, dtype: torch.dtype | None) -> KVShape | None:
    """Return the shape of the KV that a configuration describes; None if it lacks the sizes."""
    text = config.get_text_config()
    num_layers, num_heads = getattr(text, "num_hidden_layers", None), getattr(text, "num_attention_heads", None)
    if not (num_layers and num_heads):
        return None
    num_kv_heads = 1 if getattr(text, "multi_query", False) else getattr(text, "num_key_value_heads", None) or num_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // num_heads
    return KVShape(num_layers, num_kv_heads, head_dim, dtype or torch.float32)


def _pretrained(name: str, dtype: str) -> PreTrainedModel:
    with _loading(name):
        config = AutoConfig.from_pretrained(name)
        refuse_by_config(name, config)
        module: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            name,
            config=config,
            dtype="auto" if dtype == "auto" else getattr(torch, dtype),
            attn_implementation=ATTENTION_NAME,
        )
        return module


@contextmanager
def _loading(name: str) -> Iterator[None]:
    """Raise `StartError` for what transformers raises while it loads a model."""
    try:
        yield
    except StartError:
        raise
    except (OSError, ValueError, KeyError, TypeError, ImportError, RuntimeError) as error:
        if ATTENTION_NAME in str(error):
            raise refusal(name, "its attention cannot be replaced by paged attention") from error
        reason = first_line(error).rstrip(".")
        raise StartError(
            f"KVFERRY_MODEL={name} does not load: {reason}. Name `{TINY}`, a local folder of a causal LM, or a hub id"
        ) from error


def refuse_by_config(name: str, config: Any) -> None:
    """Refuse, before weights are read, a model whose config shows that it is not plain causal attention."""
    text = config.get_text_config()
    layer_types = set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    rope_types = set(_rope_types(getattr(text, "rope_parameters", None))) & {"dynamic", "longrope"}
    for is_refused, reason in (
        (getattr(config, "is_encoder_decoder", False), "it is an encoder-decoder model"),
        (getattr(text, "kv_lora_rank", None), "it caches a compressed latent instead of keys and values (MLA)"),
        (layer_types, f"it has layers of types {', '.join(sorted(layer_types))}"),
        (getattr(text, "attn_logit_softcapping", None), "it caps attention scores (attn_logit_softcapping)"),
        (rope_types, f"its positions depend on the batch (rope type {', '.join(sorted(rope_types))})"),
        (getattr(text, "is_causal", True) is False, "it is not causal"),
    ):
        if is_refused:
            raise refusal(name, reason)


def refusal(name: str, reason: str) -> StartError:
    """Return the error for a model that this engine does not serve."""
    return StartError(
        f"KVFERRY_MODEL={name} cannot be served: {reason}. This engine serves decoder-only models with plain or "
        "sliding-window "
        "attention in every layer, such as Llama, Qwen and Mistral"
    )


def _rope_types(parameters: Any) -> Iterable[str]:
    if isinstance(parameters, dict):
        if "rope_type" in parameters:
            yield str(parameters["rope_type"])
        for nested in parameters.values():
            yield from _rope_types(nested)


def _as_ids(value: int | list[int] | None) -> list[int]:
    return [] if value is None else [value] if isinstance(value, int) else list(value)


def tiny_config() -> LlamaConfig:
    """Return the configuration of `tiny`."""
    return LlamaConfig(
        vocab_size=TINY_VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=TINY_CONTEXT_TOKENS,
        tie_word_embeddings=False,
        pad_token_id=PAD_ID,
        bos_token_id=None,
        eos_token_id=EOS_ID,
    )


def _tiny(dtype: str) -> PreTrainedModel:
    """Return an untrained byte-level Llama with the same weights, rounded, in every dtype."""
    config = tiny_config()
    config._attn_implementation = ATTENTION_NAME
    module: PreTrainedModel = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    module.generation_config.max_new_tokens = TINY_CHAT_TOKENS
    generator = torch.Generator().manual_seed(TINY_SEED)
    with torch.no_grad():
        for name, weight in sorted(module.named_parameters()):
            if weight.ndim < 2:
                weight.fill_(1.0)
                continue
            gain = 1.0 if "embed" in name else TINY_GAIN / math.sqrt(weight.shape[1])
            if "q_proj" in name or "k_proj" in name:
                gain *= TINY_QUERY_KEY_GAIN
            weight.copy_(torch.randn(weight.shape, generator=generator) * gain)
    torch.nn.Module.to(module, torch.float32 if dtype == "auto" else getattr(torch, dtype))
    return module


def inspect_model(model: LoadedModel) -> KVShape:
    """Return the shape of the model's KV.

    Raises:
        StartError: paged attention does not compute what the model's own attention computes.
    """
    shape = _kv_shape(model.module.config, model.dtype)
    if shape is None:
        raise refusal(model.name, "its config lacks the numbers of layers and heads")
    try:
        deviation = _deviation(model, shape)
    except StartError as error:
        raise refusal(model.name, str(error)) from error
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        raise refusal(model.name, f"it does not run on plain attention ({type(error).__name__}: {error})") from error
    if not deviation <= MAX_DEVIATION[shape.dtype]:
        raise refusal(model.name, f"paged attention differs from its own attention by {deviation:.1%}")
    return shape


@torch.inference_mode()
def _deviation(model: LoadedModel, shape: KVShape) -> float:
    """Return how far paged attention, in chunks and scattered pages, is from the model's own."""
    ids = (torch.arange(PROBE_TOKENS, device=model.device) * 7 + 3) % model.vocab_size
    num_blocks = -(-PROBE_TOKENS // PROBE_BLOCK_SIZE)
    cache = PagedKVCache(shape, num_blocks, PROBE_BLOCK_SIZE, model.device)
    blocks = torch.arange(num_blocks, device=model.device).flip(0)
    paged, done = [], 0
    for num_new in PROBE_CHUNKS:
        at = torch.arange(done, done + num_new, device=model.device)
        span = Span(0, num_new, done + num_new, blocks[: -(-(done + num_new) // PROBE_BLOCK_SIZE)])
        batch = PagedBatch(cache, [span], blocks[at // PROBE_BLOCK_SIZE], at % PROBE_BLOCK_SIZE)
        chunk = ids[done : done + num_new]
        paged.append(
            model.module(input_ids=chunk[None], position_ids=at[None], use_cache=False, paged=batch.attend).logits[0]
        )
        done += num_new
    num_attending = int(cache.tensor.transpose(0, 1).flatten(1).any(dim=1).sum())
    if num_attending < shape.num_layers:
        raise StartError(f"{num_attending} of its {shape.num_layers} layers are plain attention")
    model.module.set_attn_implementation("eager")
    try:
        own = model.module(input_ids=ids[None], use_cache=False).logits[0].double()
    finally:
        model.module.set_attn_implementation(ATTENTION_NAME)
    return float((torch.cat(paged).double() - own).norm() / (own - own.mean(dim=0)).norm())
