"""The settings themselves: every name, its default, its meaning, and whether it may change while kvferry runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from platformdirs import user_state_path
from pydantic import BeforeValidator, Field, ModelWrapValidatorHandler, PrivateAttr, SecretStr, ValidationError
from pydantic import model_validator as validates_model
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from app.settings import review, values
from app.settings.kinds import Dtype, Engine, LogFormat, LogLevel, PoolKind
from app.settings.layers import Layer, LayerSource, Names, read_layers
from app.settings.origin import DEFAULT, RUNTIME, Given, Place, Source
from app.settings.problems import NeedsRestart
from app.settings.tiers import TierSettings, read_tiers
from app.settings.view import SettingView, place_words, plain
from core.admission import MAX_THRESHOLD
from core.engine import StoreMode
from core.policy import REQUEST_FIELDS_DEFAULT, Level, RequestPolicy
from core.rates import LoadDecision

APP_NAME = "kvferry"
ENV_FILE = ".env"
LAYERS = "_layers"


class _Mutable:
    """Marks a setting that may change while running."""


MUTABLE = _Mutable()


def _read(reader: Callable[[Any], Any]) -> BeforeValidator:
    return BeforeValidator(reader)


class Settings(BaseSettings):
    """All settings of one kvferry process, checked; frozen.

    `Settings(**given)` reads every layer: `given` (what an embedding engine was told, lower-case names), then the
    environment, `.env`, and the TOML file. `_env_file=None` leaves `.env` out. Raises `BadSettings`.
    """

    model_config = SettingsConfigDict(frozen=True, extra="forbid", validate_default=False)

    host: Annotated[str, _read(values.host)] = Field(
        default="127.0.0.1",
        description="Where the admin API listens. Without a token only loopback addresses are accepted.",
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
        "By default made from the fingerprint of model and layout.",
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
    block_size: Annotated[int, _read(values.whole(1))] = Field(default=16, description="Tokens a block.")
    max_batched_tokens: Annotated[int, _read(values.whole(1))] = Field(
        default=2048, description="Token budget of one engine step."
    )
    max_running: Annotated[int, _read(values.whole(1))] = Field(default=8, description="Requests that run at once.")
    pool_bytes: Annotated[int, _read(values.size), MUTABLE] = Field(
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
    request_fields: Annotated[tuple[str, ...], _read(values.policy_fields)] = Field(
        default=REQUEST_FIELDS_DEFAULT, description="Policy fields that a request's own `kv_transfer_params` may set."
    )
    load_decision: Annotated[LoadDecision, _read(values.choice(LoadDecision)), MUTABLE] = Field(
        default=LoadDecision.AUTO,
        description="`auto` loads a hit when that beats recomputing, by measured rates; `always` loads every hit.",
    )
    store_threshold: Annotated[int, _read(values.whole(1, MAX_THRESHOLD)), MUTABLE] = Field(
        default=1, description="Offers of a block before it is stored."
    )
    max_pinned_fraction: Annotated[float, _read(values.fraction), MUTABLE] = Field(
        default=0.25, description="How much of the pool operators may pin, as a fraction."
    )
    database_url: Annotated[SecretStr, _read(values.database_url)] = Field(
        default=SecretStr("sqlite:///{STATE_DIR}/kvferry.db"),
        description="Metadata and history: SQLite or PostgreSQL. `{STATE_DIR}` stands for the state folder.",
    )
    state_dir: Annotated[Path, _read(values.folder)] = Field(
        default_factory=lambda: user_state_path(APP_NAME),
        description="Folder of the database and the discovery file. By default the platform's folder for such state.",
    )
    eviction_history_rows: Annotated[int, _read(values.whole(0)), MUTABLE] = Field(
        default=1_000_000, description="How many rows of eviction history are kept."
    )
    eviction_history_days: Annotated[int, _read(values.whole(0)), MUTABLE] = Field(
        default=30, description="For how many days eviction history is kept."
    )
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

    _given: dict[str, Given] = PrivateAttr(default_factory=dict)
    _notices: tuple[str, ...] = PrivateAttr(default=())

    POLICY_SETTINGS: ClassVar[Mapping[str, str]] = {
        "offload_prompt_only": "offload_prompt_only",
        "max_offload_tokens": "max_offload_tokens",
        "level": "offload_level",
    }
    """Which setting is the default of which field of a request policy."""

    def __init__(
        self, *, _env_file: str | Path | None = ENV_FILE, _layers: Sequence[Layer] | None = None, **given: Any
    ) -> None:
        # All layers are read here, `.env` too: pydantic-settings would pass over the lines that it cannot parse.
        env_files = [] if _env_file is None else [Path(_env_file)]
        layers = read_layers(self.names(), given, env_files) if _layers is None else _layers
        through: dict[str, Any] = {LAYERS: layers}
        super().__init__(_env_file=None, **through)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """One source a layer, the strongest first."""
        layers = init_settings.init_kwargs[LAYERS] if isinstance(init_settings, InitSettingsSource) else ()
        return tuple(LayerSource(settings_cls, layer) for layer in ({LAYERS: layers}, *layers))

    @classmethod
    def names(cls) -> Names:
        """The names of all settings, and of the secret ones."""
        secrets = [name for name, field in cls.model_fields.items() if "SecretStr" in str(field.annotation)]
        return Names(tuple(cls.model_fields), secrets)

    @classmethod
    def mutable_names(cls) -> tuple[str, ...]:
        """The settings that may change while kvferry runs."""
        return tuple(name for name, field in cls.model_fields.items() if MUTABLE in field.metadata)

    @validates_model(mode="wrap")
    @classmethod
    def _check(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Read what every layer gave; raise all that is wrong with it at once."""
        if not isinstance(data, dict) or LAYERS not in data:
            return handler(data)  # not read from layers yet; `__init__` does
        names = cls.names()
        given = {name: item for name, item in data.items() if name != LAYERS}
        report = review.Report(names)
        readable = report.take(given)
        try:
            settings = handler(readable)
        except ValidationError as error:
            report.take_errors(error)
            settings = handler({name: value for name, value in readable.items() if name not in report.problems})
        report.take_rules(settings)
        report.raise_if_bad()
        settings._given = report.known
        settings._notices = review.notices(given)
        return settings

    @property
    def notices(self) -> tuple[str, ...]:
        """What deserves a warning at start, though it does no harm."""
        return self._notices

    def source(self, name: str) -> Source:
        """Which layer a setting's value came from."""
        return self._place(name).source

    def _place(self, name: str) -> Place:
        return self._given[name].place if name in self._given else DEFAULT

    def describe(self) -> list[SettingView]:
        """Every setting with its value and where that came from, safe to show."""
        secrets = self.names().secrets
        mutable = self.mutable_names()
        return [
            SettingView(
                name=name,
                value=plain(name, getattr(self, name)),
                default=plain(name, field.get_default(call_default_factory=True, validated_data={})),
                source=self.source(name),
                place=place_words(self._place(name), self._given[name].spelled if name in self._given else name),
                description=field.description or "",
                mutable=name in mutable,
                secret=name in secrets,
            )
            for name, field in type(self).model_fields.items()
        ]

    def change(self, patch: Mapping[str, object], mutable: Sequence[str] | None = None) -> Self:
        """These settings with some changed while running, all that may change or those of them that are `mutable`.

        Raises `BadSettings` for unknown names and bad values, else `NeedsRestart` for settings that cannot change now.
        """
        names = self.names()
        mutable = self.mutable_names() if mutable is None else mutable
        fixed = [name for name in patch if name in names.settings and name not in mutable]
        changed = {name: Given(value, RUNTIME, name) for name, value in patch.items() if name not in fixed}
        kept = {name: Given(getattr(self, name), given.place, given.spelled) for name, given in self._given.items()}
        settings = type(self)(_layers=[changed, kept])
        if fixed:
            raise NeedsRestart(fixed, mutable)
        settings._notices = self._notices
        return settings

    def resolved_database_url(self) -> str:
        """The database URL with its password and with the state folder in its place. Not for logs."""
        return self.database_url.get_secret_value().replace("{STATE_DIR}", str(self.state_dir))

    def request_policy(self) -> RequestPolicy:
        """The default request policy."""
        return RequestPolicy(**{field: getattr(self, name) for field, name in self.POLICY_SETTINGS.items()})

    def request_policy_sources(self) -> dict[str, str]:
        """Which layer settled each of the policy fields that settings can set."""
        return {field: self.source(name).value for field, name in self.POLICY_SETTINGS.items()}
