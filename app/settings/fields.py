"""All settings: name, type, limits, default, description, and whether a setting can change while kvferry runs.

To add a setting, add one field to `SettingFields`: an annotation with a type of `settings.types` and limits, a default
and a description; a number has its unit in its name. `MUTABLE` marks a setting that can change while
running: `OffloadService` applies it. A rule between settings is a condition in `settings.settings`.
The environment variable, error texts, `GET /admin/v1/config`, `kvferry config` and docs/settings.md (written by
`kvferry config docs`) are derived from the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated

from platformdirs import user_state_path
from pydantic import BeforeValidator, Field, SecretStr

from kvferry.app.settings import types
from kvferry.app.settings.errors import is_secret_field
from kvferry.app.settings.sources import SourcedSettings
from kvferry.app.settings.store_mode import StoreModeSetting
from kvferry.app.settings.tiers import TierSettings, read_tiers
from kvferry.core.cost_model import LoadDecision
from kvferry.core.policy import MAX_RETAIN_S, REQUEST_FIELDS_DEFAULT, Level, TierWait
from kvferry.core.pool.admission import MAX_THRESHOLD
from kvferry.core.pool.eviction.evictor import EVICTION_POLICIES

APP_NAME = "kvferry"
MAX_BLOCK_SIZE_TOKENS = 1024
MOST_RETAIN_S = 7 * 24 * 3600.0
RetainS = Annotated[float, Field(ge=0, le=MOST_RETAIN_S, allow_inf_nan=False), types.NUMBER]
MUTABLE = object()
"""Marks a setting that can change while kvferry runs."""
OFFERED: Mapping[str, tuple[str, ...]] = {"eviction_policy": tuple(EVICTION_POLICIES)}
"""Values of settings of which later versions may offer more."""


class Engine(StrEnum):
    """The engine that runs in this process."""

    EMBEDDED = "embedded"
    NONE = "none"


class Dtype(StrEnum):
    """Precision of the embedded engine's model."""

    AUTO = "auto"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"
    FLOAT64 = "float64"


class PoolKind(StrEnum):
    """Kind of memory of the host pool."""

    PINNED = "pinned"
    SHM = "shm"
    FILE = "file"


class LogLevel(StrEnum):
    """Lowest level that is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    CRITICAL = "critical"


class LogFormat(StrEnum):
    """Format of log lines."""

    TEXT = "text"
    JSON = "json"


class TraceExport(StrEnum):
    """Where traces of requests are sent."""

    OFF = "off"
    OTLP = "otlp"


class SettingFields(SourcedSettings):
    """Fields of all settings; `Settings` reads them."""

    host: types.Host = Field(
        default="127.0.0.1",
        description="Where the admin API listens. Without a token only loopback addresses are accepted; on others a "
        "token has at least 16 characters.",
    )
    port: Annotated[int, Field(ge=0, le=65535), types.WHOLE] = Field(
        default=8787, description="Port of the admin API; 0 takes a free one."
    )
    metrics_host: types.Host | None = Field(
        default=None,
        description="Where `/metrics` listens by METRICS_PORT; by default on HOST. The tokens of the API hold there "
        "too.",
    )
    metrics_port: Annotated[int | None, Field(ge=0, le=65535), types.WHOLE] = Field(
        default=None,
        description="Port of an address with `/metrics` and nothing else, besides the admin API; 0 takes a free one.",
    )
    admin_token: types.Tokens | None = Field(
        default=None, description="Bearer token that may do everything, or two, separated by a comma."
    )
    read_token: types.Tokens | None = Field(
        default=None, description="Bearer token that may only read, or two, separated by a comma."
    )
    engine_api_key: types.Token | None = Field(
        default=None,
        description="API key that `replay` and `demo` send to the engine's URL.",
    )
    engine_name: types.Name | None = Field(
        default=None,
        description="Names this engine's pool, rows and discovery file. By default made from the fingerprint of model "
        "and layout, with a number appended where another process has that name; a name set here that another process "
        "has refuses to start.",
    )
    engine: Annotated[Engine, types.AnyCase] = Field(
        default=Engine.EMBEDDED, description="`embedded`, or `none` for the admin API and the pool only."
    )
    model: types.Word = Field(
        default="tiny",
        description="Model of the embedded engine: `tiny` is built in and untrained; else a local folder or a hub id.",
    )
    device: types.Device = Field(
        default="auto", description="Where the model runs: `auto`, `cpu`, `cuda` or `cuda:<index>`."
    )
    dtype: Annotated[Dtype, types.AnyCase] = Field(
        default=Dtype.AUTO, description="Precision of the model: `auto`, `float16`, `bfloat16`, `float32` or `float64`."
    )
    device_blocks: Annotated[int, Field(ge=1, le=types.MAX_INT32), types.WHOLE] = Field(
        default=512, description="Size of the device's KV cache in blocks."
    )
    block_size: Annotated[int, Field(ge=1, le=MAX_BLOCK_SIZE_TOKENS), types.WHOLE] = Field(
        default=16, description="Tokens a block."
    )
    max_batched_tokens: Annotated[int, Field(ge=1, le=types.MAX_INT32), types.WHOLE] = Field(
        default=2048, description="Token budget of one engine step."
    )
    max_running: Annotated[int, Field(ge=1, le=types.MAX_INT32), types.WHOLE] = Field(
        default=8, description="Requests that run at once."
    )
    max_waiting: Annotated[int, Field(ge=0, le=types.MAX_INT32), types.WHOLE] = Field(
        default=2048,
        description="Requests that `/v1` accepts beyond those that run; a call that would exceed it is answered with "
        "429.",
    )
    pool_bytes: Annotated[types.Size, MUTABLE] = Field(
        default=1 << 30,
        description="Size of the host pool, all ranks together, rounded down to whole extents: an eighth of the pool "
        "as it started, but at most 1 GiB.",
    )
    tenant_max_bytes: Annotated[types.SizeCap, MUTABLE] = Field(
        default=None,
        description="How much of this engine's pool the blocks of a tenant (cache salt) without a limit of its own "
        "may take. At its limit a tenant loses its own coldest blocks. See docs/policies.md.",
    )
    pool_kind: Annotated[PoolKind, types.AnyCase] = Field(
        default=PoolKind.PINNED,
        description="`pinned`, or `shm` or `file`, which outlive the process, so that a restart begins warm.",
    )
    pool_path: types.FolderPath | None = Field(
        default=None, description="Folder of the pool's file; only with `POOL_KIND=file`."
    )
    blocks_per_slot: Annotated[int, Field(ge=1, le=types.MAX_INT32), types.WHOLE] = Field(
        default=1, description="Blocks that one slot holds."
    )
    kernel_below_bytes: types.Size | None = Field(
        default=None,
        description="On CUDA, a block with smaller pieces (one in each layer) is copied by a kernel on the GPU, any "
        "other by the GPU's copy engines. By default measured at the first start on a device; 1 never uses the "
        "kernel.",
    )
    store_mode: Annotated[StoreModeSetting, types.AnyCase, MUTABLE] = Field(
        default=StoreModeSetting.AUTO,
        description="`eager` offers blocks as they fill, `lazy` those about to leave the device. `auto` is lazy where "
        "the pool is smaller than four times the device's KV cache, decided at start and when `auto` is set. See "
        "docs/tuning.md.",
    )
    eviction_policy: Annotated[types.Word, types.offered(EVICTION_POLICIES), MUTABLE] = Field(
        default="lru", description="Which blocks leave a full pool first. See docs/tuning.md."
    )
    offload_prompt_only: types.Flag = Field(
        default=True, description="Default request policy: store only blocks wholly inside the prompt."
    )
    max_offload_tokens: types.Cap = Field(
        default=None,
        description="Default request policy: store only blocks wholly inside the first N tokens; 0 stores nothing, "
        "`unlimited` everything.",
    )
    offload_level: Annotated[Level, types.AnyCase] = Field(
        default=Level.BLOCK,
        description="Default request policy: tiers get new blocks only (`block`) or all of a request's (`request`).",
    )
    max_load_tokens: types.Cap = Field(
        default=None,
        description="Default request policy: load at most the first N tokens; 0 loads nothing, `unlimited` every hit.",
    )
    tier_wait: types.Wait = Field(
        default=TierWait(),
        description="Default request policy: how long a request that could run waits for tiers. `best_effort`: not at "
        "all; `timeout`: as long as computing the tokens would take; `timeout:SECONDS`; `wait_complete`.",
    )
    retain_s: RetainS = Field(
        default=0.0,
        description="Default request policy: seconds for which a request's blocks are not evicted after it has ended, "
        "unless its session's next request comes first. See docs/policies.md.",
    )
    max_retain_s: Annotated[RetainS, MUTABLE] = Field(
        default=MAX_RETAIN_S, description="Longest `retain_s` of a policy, and longest lease of a session, in seconds."
    )
    request_fields: types.PolicyFields = Field(
        default=REQUEST_FIELDS_DEFAULT, description="Policy fields that a request's own `kv_transfer_params` may set."
    )
    trust_mm_uuids: types.Flag = Field(
        default=False,
        description="Inside vLLM: offload prompts with images, audio or video also to a kept pool and to tiers. Only "
        "where clients cannot give one id (`multi_modal_uuids`) to two such inputs. See docs/security.md.",
    )
    load_decision: Annotated[LoadDecision, types.AnyCase, MUTABLE] = Field(
        default=LoadDecision.AUTO,
        description="`auto` loads a hit when that beats recomputing, by measured rates; `always` loads every hit.",
    )
    store_threshold: Annotated[int, Field(ge=1, le=MAX_THRESHOLD), types.WHOLE, MUTABLE] = Field(
        default=1, description="Offers of a block before it is stored."
    )
    auto_pause: Annotated[types.Flag, MUTABLE] = Field(
        default=False,
        description="Pause storing while offloading costs more time than it saves; loads go on. See docs/balance.md.",
    )
    what_if: Annotated[types.Flag, MUTABLE] = Field(
        default=True,
        description="Count the hit rate at each cache size. See docs/what-if.md.",
    )
    explain_bytes: Annotated[types.SizeOrZero, MUTABLE] = Field(
        default=0,
        description="Memory for the token ids of recent prompts and answers, by which `kvferry breaks` shows what "
        "makes prompts miss; 0 keeps none. See docs/history.md and docs/security.md.",
    )
    max_pinned_fraction: Annotated[float, Field(ge=0, le=1), types.NUMBER, MUTABLE] = Field(
        default=0.25,
        description="Fraction of the pool that operators may pin, and leases may keep of what that leaves.",
    )
    database_url: types.DatabaseUrl = Field(
        default=SecretStr("sqlite:///{STATE_DIR}/kvferry.db"),
        description="Metadata and history: SQLite or PostgreSQL.",
    )
    state_dir: types.FolderPath = Field(
        default_factory=lambda: user_state_path(APP_NAME),
        description="Folder of the database, a discovery file and the digests of model files.",
    )
    eviction_history_rows: Annotated[int, Field(ge=0, le=types.MAX_EXACT), types.WHOLE, MUTABLE] = Field(
        default=1_000_000, description="How many rows of eviction history are kept."
    )
    eviction_history_days: Annotated[int, Field(ge=0, le=types.MAX_EXACT), types.WHOLE, MUTABLE] = Field(
        default=30, description="For how many days eviction history is kept."
    )
    tiers: Annotated[tuple[TierSettings, ...], BeforeValidator(read_tiers)] = Field(
        default=(),
        description="JSON list of the tiers below the pool, the fastest first. See docs/tiers.md.",
    )
    log_level: Annotated[LogLevel, types.AnyCase, MUTABLE] = Field(
        default=LogLevel.INFO, description="`debug`, `info`, `warning`, `error` or `critical`."
    )
    log_format: Annotated[LogFormat, types.AnyCase] = Field(
        default=LogFormat.TEXT, description="`text`, or `json` with one object a line."
    )
    traces: Annotated[TraceExport, types.AnyCase] = Field(
        default=TraceExport.OFF,
        description="`otlp` sends OpenTelemetry spans of sampled requests to the collector that the standard `OTEL_*` "
        "variables name; needs `pip install 'kvferry[otel]'`. See docs/tracing.md.",
    )


SETTING_NAMES = tuple(SettingFields.model_fields)
SECRET_NAMES = tuple(name for name, field in SettingFields.model_fields.items() if is_secret_field(field))
"""Settings of which a file can have the value."""
MUTABLE_NAMES = tuple(name for name, field in SettingFields.model_fields.items() if MUTABLE in field.metadata)
_TITLES = {
    "host": "Addresses and tokens",
    "engine_name": "Engine",
    "pool_bytes": "Pool",
    "offload_prompt_only": "Policy of requests",
    "load_decision": "Deciding and measuring",
    "database_url": "Database and state folder",
    "tiers": "Tiers",
    "log_level": "Logs and traces",
}
"""Titles of sections, by their first setting."""

SECTIONS: dict[str, str] = {}
"""Titles of the sections of docs/settings.md, by setting."""
for _name in SETTING_NAMES:
    SECTIONS[_name] = _TITLES.get(_name) or next(reversed(SECTIONS.values()))
