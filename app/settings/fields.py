"""Every setting there is: its name, its default, its meaning, and whether it may change while kvferry runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from platformdirs import user_state_path
from pydantic import BaseModel, BeforeValidator, Field, SecretStr

from kvferry.app.settings import values
from kvferry.app.settings.kinds import Dtype, Engine, LogFormat, LogLevel, PoolKind
from kvferry.app.settings.tiers import TierSettings, read_tiers
from kvferry.core.cost_model import LoadDecision
from kvferry.core.engine_api import StoreMode
from kvferry.core.policy import REQUEST_FIELDS_DEFAULT, Level
from kvferry.core.pool.admission import MAX_THRESHOLD

APP_NAME = "kvferry"
MAX_BLOCK_SIZE_TOKENS = 1024


class _Mutable:
    """Marks a setting that may change while running."""


MUTABLE = _Mutable()


def _read(reader: Callable[[Any], Any]) -> BeforeValidator:
    return BeforeValidator(reader)


def _bounds(minimum: float, maximum: float) -> Any:
    """Describe the bounds that the reader of a number checks, for the JSON Schema."""
    return Field(json_schema_extra={"minimum": minimum, "maximum": maximum})


class SettingFields(BaseModel):
    """What is set, whoever read it; `Settings` reads it."""

    host: Annotated[str, _read(values.host)] = Field(
        default="127.0.0.1",
        description="Where the admin API listens. Without a token only loopback addresses are accepted; on others a "
        "token has at least 16 characters.",
    )
    port: Annotated[int, _read(values.whole(0, 65535))] = Field(
        default=8787, description="Port of the admin API; 0 takes a free one."
    )
    admin_token: Annotated[SecretStr | None, _read(values.secret_token)] = Field(
        default=None, description="Bearer token that may do everything."
    )
    read_token: Annotated[SecretStr | None, _read(values.secret_token)] = Field(
        default=None, description="Bearer token that may only read."
    )
    engine_name: Annotated[str | None, _read(values.name)] = Field(
        default=None,
        description="Names this engine's pool, rows and discovery file; several engines may share a state folder. "
        "By default made from the fingerprint of model and layout, with a number appended where another process has "
        "that name on the same database; a name set here that another process has refuses to start.",
    )
    engine: Annotated[Engine, _read(values.choice(Engine))] = Field(
        default=Engine.EMBEDDED, description="`embedded`, or `none` for the admin API and the pool only."
    )
    model: Annotated[str, _read(values.word)] = Field(
        default="tiny",
        description="Model of the embedded engine: `tiny` is built in and untrained; else a local folder or a hub id.",
    )
    device: Annotated[str, _read(values.device)] = Field(
        default="auto", description="Where the model runs: `auto`, `cpu`, `cuda` or `cuda:<index>`."
    )
    dtype: Annotated[Dtype, _read(values.choice(Dtype))] = Field(
        default=Dtype.AUTO, description="Precision of the model: `auto`, `float16`, `bfloat16`, `float32` or `float64`."
    )
    device_blocks: Annotated[int, _read(values.whole(1))] = Field(
        default=512, description="Size of the device's KV cache in blocks."
    )
    block_size: Annotated[int, _read(values.whole(1, MAX_BLOCK_SIZE_TOKENS))] = Field(
        default=16, description="Tokens a block."
    )
    max_batched_tokens: Annotated[int, _read(values.whole(1))] = Field(
        default=2048, description="Token budget of one engine step."
    )
    max_running: Annotated[int, _read(values.whole(1))] = Field(default=8, description="Requests that run at once.")
    max_waiting: Annotated[int, _read(values.whole(0))] = Field(
        default=2048,
        description="Requests that `/v1` accepts beyond those that run. A call that would exceed it is answered with "
        "429 and `Retry-After`; its prompts are accepted all or none.",
    )
    max_wait_s: Annotated[int, _read(values.whole(1))] = Field(
        default=2,
        description="Seconds for which calls to `/v1` may be expected to wait, by the measured rate at which requests "
        "end. Calls beyond that are answered with 429 and `Retry-After`. One client address gets half of the room "
        "at most. However slow the engine is, 32 calls under way are accepted for each request that may run at once, "
        "and never fewer than 64.",
    )
    pool_bytes: Annotated[int, _read(values.size), _bounds(1, values.MAX_EXACT), MUTABLE] = Field(
        default=1 << 30,
        description="Size of the host pool: the total of this engine, all ranks together. It is rounded down to whole "
        "extents: an eighth of the pool as it started, but at most 1 GiB.",
    )
    pool_kind: Annotated[PoolKind, _read(values.choice(PoolKind))] = Field(
        default=PoolKind.PINNED,
        description="What the host pool is made of: `pinned`, `shm`, or `file` with its folder. The last two outlive "
        "the process, so that a restart begins warm.",
    )
    pool_path: Annotated[Path | None, _read(values.folder)] = Field(
        default=None, description="Folder of the pool's file; only with `POOL_KIND=file`."
    )
    blocks_per_slot: Annotated[int, _read(values.whole(1))] = Field(
        default=1, description="Blocks that one slot holds."
    )
    kernel_below_bytes: Annotated[int | None, _read(values.size)] = Field(
        default=None,
        description="On CUDA, blocks are copied by a kernel where the pieces that they lie in are smaller than this, "
        "and by the DMA engines else. By default measured at the first start on a device; 1 is never.",
    )
    store_mode: Annotated[StoreMode, _read(values.choice(StoreMode)), MUTABLE] = Field(
        default=StoreMode.EAGER,
        description="`eager` offers blocks as they fill, `lazy` those about to leave the device.",
    )
    eviction_policy: Annotated[str, _read(values.word), MUTABLE] = Field(
        default="lru", description="Which blocks leave a full pool first."
    )
    offload_prompt_only: Annotated[bool, _read(values.truth)] = Field(
        default=True, description="Default request policy: store only blocks wholly inside the prompt."
    )
    max_offload_tokens: Annotated[int | None, _read(values.cap)] = Field(
        default=None,
        description="Default request policy: store only blocks wholly inside the first N tokens; 0 stores nothing, "
        "`unlimited` everything.",
    )
    offload_level: Annotated[Level, _read(values.choice(Level))] = Field(
        default=Level.BLOCK,
        description="Default request policy: tiers get new blocks only (`block`) or all of a request's (`request`).",
    )
    max_load_tokens: Annotated[int | None, _read(values.cap)] = Field(
        default=None,
        description="Default request policy: load at most the first N tokens; 0 loads nothing, `unlimited` every hit.",
    )
    request_fields: Annotated[tuple[str, ...], _read(values.policy_fields)] = Field(
        default=REQUEST_FIELDS_DEFAULT, description="Policy fields that a request's own `kv_transfer_params` may set."
    )
    load_decision: Annotated[LoadDecision, _read(values.choice(LoadDecision)), MUTABLE] = Field(
        default=LoadDecision.AUTO,
        description="`auto` loads a hit when that beats recomputing, by measured rates; `always` loads every hit.",
    )
    store_threshold: Annotated[int, _read(values.whole(1, MAX_THRESHOLD)), _bounds(1, MAX_THRESHOLD), MUTABLE] = Field(
        default=1, description="Offers of a block before it is stored."
    )
    max_pinned_fraction: Annotated[float, _read(values.fraction), _bounds(0, 1), MUTABLE] = Field(
        default=0.25, description="How much of the pool operators may pin, as a fraction."
    )
    engine_api_key: Annotated[SecretStr | None, _read(values.secret_token)] = Field(
        default=None,
        description="API key that `replay` sends to the engine's URL; the service's tokens are sent to the service "
        "only.",
    )
    database_url: Annotated[SecretStr, _read(values.database_url)] = Field(
        default=SecretStr("sqlite:///{STATE_DIR}/kvferry.db"),
        description="Metadata and history: SQLite or PostgreSQL. `{STATE_DIR}` stands for the state folder.",
    )
    state_dir: Annotated[Path, _read(values.folder)] = Field(
        default_factory=lambda: user_state_path(APP_NAME),
        description="Folder of the database, the discovery file and the digests of model files. By default the "
        "platform's folder for such state.",
    )
    eviction_history_rows: Annotated[
        int, _read(values.whole(0, values.MAX_EXACT)), _bounds(0, values.MAX_EXACT), MUTABLE
    ] = Field(default=1_000_000, description="How many rows of eviction history are kept.")
    eviction_history_days: Annotated[
        int, _read(values.whole(0, values.MAX_EXACT)), _bounds(0, values.MAX_EXACT), MUTABLE
    ] = Field(default=30, description="For how many days eviction history is kept.")
    tiers: Annotated[tuple[TierSettings, ...], _read(read_tiers)] = Field(
        default=(),
        description="JSON list of the tiers below the pool, the fastest first: an object a tier, with its `type`, "
        "`name`, `max_bytes` and what else its type has. See docs/tiers.md.",
    )
    log_level: Annotated[LogLevel, _read(values.choice(LogLevel)), MUTABLE] = Field(
        default=LogLevel.INFO, description="`debug`, `info`, `warning`, `error` or `critical`."
    )
    log_format: Annotated[LogFormat, _read(values.choice(LogFormat))] = Field(
        default=LogFormat.TEXT, description="`text`, or `json` with one object a line."
    )
