"""Built-in engine: a transformers causal LM over paged KV, small to read and complete enough to serve."""

from kvferry.app.engines.embedded.engine import EmbeddedEngine
from kvferry.app.engines.embedded.request import FinishReason, OutputDelta, RequestStream, Sampling

__all__ = [
    "EmbeddedEngine",
    "FinishReason",
    "OutputDelta",
    "RequestStream",
    "Sampling",
]
