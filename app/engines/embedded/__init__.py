"""Built-in engine: a transformers causal LM over paged KV, small to read and complete enough to serve."""

from kvferry.app.engines.embedded.config import EngineConfig, EngineStartError
from kvferry.app.engines.embedded.engine import EmbeddedEngine, EngineBusyError, EngineInfo, InvalidRequestError
from kvferry.app.engines.embedded.loop import EngineStoppedError
from kvferry.app.engines.embedded.request import FinishReason, OutputDelta, Sampling
from kvferry.app.engines.embedded.stream import RequestStream

__all__ = [
    "EmbeddedEngine",
    "EngineBusyError",
    "EngineConfig",
    "EngineInfo",
    "EngineStartError",
    "EngineStoppedError",
    "FinishReason",
    "InvalidRequestError",
    "OutputDelta",
    "RequestStream",
    "Sampling",
]
