"""Configuration of the embedded engine, and the error raised when it cannot start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvferry.app.settings.fields import MAX_BLOCK_SIZE_TOKENS
from kvferry.core.errors import StartError

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


class EngineStartError(StartError):
    """A setting, or the model it names, that this engine cannot serve; the message says which and what to do."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of the embedded engine, validated when created. Fields are named like the environment variables.

    `block_size` and `max_batched_tokens` are in tokens, `device_blocks` is the device's KV cache in blocks.
    `max_running` requests run at once, `max_waiting` more are accepted, `max_wait_s` bounds the expected wait of calls.
    `state_dir` caches digests of model files; None if nothing outlives the process, so that the files of a local model
    need not be read.
    """

    model: str = "tiny"
    device: str = "auto"
    dtype: str = "auto"
    device_blocks: int = 512
    block_size: int = 16
    max_batched_tokens: int = 2048
    max_running: int = 8
    max_waiting: int = 2048
    max_wait_s: int = 2
    state_dir: Path | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise EngineStartError(f"KVFERRY_DTYPE={self.dtype!r}: must be one of {', '.join(DTYPES)}")
        if not self.model:
            raise EngineStartError("KVFERRY_MODEL is empty; set `tiny`, a local folder or a hub id")
        for name in ("device_blocks", "block_size", "max_batched_tokens", "max_running"):
            if getattr(self, name) < 1:
                raise EngineStartError(f"KVFERRY_{name.upper()}={getattr(self, name)}: must be at least 1")
        if self.max_waiting < 0:
            raise EngineStartError(f"KVFERRY_MAX_WAITING={self.max_waiting}: must be at least 0")
        if self.max_wait_s < 1:
            raise EngineStartError(f"KVFERRY_MAX_WAIT_S={self.max_wait_s}: must be at least 1")
        if self.block_size > MAX_BLOCK_SIZE_TOKENS:
            raise EngineStartError(
                f"KVFERRY_BLOCK_SIZE={self.block_size}: must be at most {MAX_BLOCK_SIZE_TOKENS} tokens"
            )
