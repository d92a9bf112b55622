"""Built-in engine: a transformers causal LM over paged KV, small to read and complete enough to serve."""

from kvferry.app.engines.embedded.engine import EmbeddedEngine, EngineBusyError, EngineConfig, InvalidRequestError
from kvferry.app.engines.embedded.loop import EngineStoppedError
from kvferry.app.engines.embedded.request import FinishReason, OutputDelta, RequestStream, Sampling

__all__ = [
    "EmbeddedEngine",
    "EngineBusyError",
    "EngineConfig",
    "EngineStoppedError",
    "FinishReason",
    "InvalidRequestError",
    "OutputDelta",
    "RequestStream",
    "Sampling",
]
