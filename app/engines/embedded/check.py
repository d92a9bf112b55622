"""Validation of a model before it serves: the shape of its KV, and whether paged attention computes correct results.

A model that this engine would serve wrongly is refused at start.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvferry.app.engines.embedded.attention import ATTENTION_NAME, PagedBatch, Span
from kvferry.app.engines.embedded.config import EngineStartError
from kvferry.app.engines.embedded.kv_cache import KVShape, PagedKVCache
from kvferry.app.engines.embedded.model import LoadedModel, refusal

PROBE_TOKENS = 24
PROBE_CHUNKS = (13, 10, 1)
PROBE_BLOCK_SIZE = 4
MAX_DEVIATION = {torch.float64: 0.01, torch.float32: 0.01, torch.bfloat16: 0.25, torch.float16: 0.25}
"""Limit of the deviation between two results, relative to that between different tokens: rounding stays below, a wrong
mask or wrong positions do not.
"""


class _ShapeProbe:
    """Computes attention within one row, and records the shape of each layer's keys and values."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
    ) -> Tensor:
        self.layers[layer] = (tuple(key.shape[1:]), tuple(value.shape[1:]))
        output = scaled_dot_product_attention(
            query[None],
            key.transpose(0, 1)[None],
            value.transpose(0, 1)[None],
            is_causal=True,
            scale=scale,
            enable_gqa=True,
        )
        return output[0].transpose(0, 1)


@torch.inference_mode()
def inspect_model(model: LoadedModel) -> KVShape:
    """Return the shape of the model's KV.

    Raises:
        EngineStartError: its layers are not all plain attention of one shape.
    """
    ids = (torch.arange(PROBE_TOKENS, device=model.device) * 7 + 3) % model.vocab_size
    probe = _ShapeProbe()
    try:
        _forward(model, ids, 0, probe)
    except EngineStartError as error:
        raise refusal(model.name, str(error)) from error
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise refusal(model.name, f"it does not run on plain attention ({type(error).__name__}: {error})") from error
    num_layers = int(model.module.config.get_text_config().num_hidden_layers)
    if sorted(probe.layers) != list(range(num_layers)):
        raise refusal(model.name, f"{len(probe.layers)} of its {num_layers} layers are plain attention")
    shapes = {shape for pair in probe.layers.values() for shape in pair}
    if len(shapes) != 1:
        raise refusal(model.name, f"its layers' keys and values differ in heads or size: {sorted(shapes)}")
    heads, head_dim = shapes.pop()
    shape = KVShape(num_layers, heads, head_dim, model.dtype)
    _compare(model, ids, shape)
    return shape


def _compare(model: LoadedModel, ids: Tensor, shape: KVShape) -> None:
    """Compare the model's own attention with paged attention, in chunks and scattered pages. Raises if they differ."""
    num_blocks = -(-PROBE_TOKENS // PROBE_BLOCK_SIZE)
    cache = PagedKVCache(shape, num_blocks, PROBE_BLOCK_SIZE, model.device)
    blocks = torch.arange(num_blocks, device=model.device).flip(0)
    paged, done = [], 0
    for num_new in PROBE_CHUNKS:
        at = torch.arange(done, done + num_new, device=model.device)
        span = Span(0, num_new, done + num_new, blocks[: -(-(done + num_new) // PROBE_BLOCK_SIZE)])
        batch = PagedBatch(cache, [span], blocks[at // PROBE_BLOCK_SIZE], at % PROBE_BLOCK_SIZE)
        paged.append(_forward(model, ids[done : done + num_new], done, batch))
        done += num_new
    model.module.set_attn_implementation("eager")
    try:
        own = model.module(input_ids=ids[None], use_cache=False).logits[0]
    finally:
        model.module.set_attn_implementation(ATTENTION_NAME)
    own = own.double()
    deviation = ((torch.cat(paged).double() - own).norm() / (own - own.mean(dim=0)).norm()).item()
    if not deviation <= MAX_DEVIATION[shape.dtype]:
        raise refusal(model.name, f"paged attention differs from its own attention by {deviation:.1%}")


def _forward(model: LoadedModel, ids: Tensor, start: int, paged: object) -> Tensor:
    positions = torch.arange(start, start + len(ids), device=model.device)
    output = model.module(input_ids=ids[None], position_ids=positions[None], use_cache=False, paged=paged)
    logits: Tensor = output.logits[0]
    return logits
