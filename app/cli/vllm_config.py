"""`kvferry vllm-config`: the value of vLLM's option `--kv-transfer-config`."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from kvferry.app.cli.console import ExitCode, Failed, print_json_line
from kvferry.app.cli.policy import parse_fields


def vllm_config(
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME=VALUE...", help="Other settings, such as pool_kind=shm.", show_default=False),
    ] = None,
    pool: Annotated[
        str | None, typer.Option("--pool", metavar="SIZE", help="Size of the host pool, such as 64GiB.")
    ] = None,
    tier: Annotated[
        list[str] | None,
        typer.Option(
            "--tier",
            metavar="JSON",
            help="A tier, fastest first; may be given again. Such as "
            '\'{"type": "fs", "path": "/mnt/kv", "max_bytes": "1TiB"}\'.',
        ),
    ] = None,
) -> None:
    """Print the value of vLLM's --kv-transfer-config, checked with the settings of the environment.

    What is not given here is read by vLLM's process from its environment, such as KVFERRY_POOL_BYTES.
    """
    from kvferry.app.engines.vllm.options import refuse_embedded_settings
    from kvferry.app.settings import Settings, Source
    from kvferry.app.settings.fields import SECRET_NAMES
    from kvferry.app.settings.sources import SettingOrigin, SettingSource, read_sources

    given: dict[str, Any] = parse_fields(settings or [])
    if pool is not None:
        given["pool_bytes"] = pool
    if tier:
        given["tiers"] = [_tier(text) for text in tier]
    if secrets := [name for name in given if name in SECRET_NAMES]:
        # Every user of the host can read the arguments of a process.
        advice = f"must not be on a command line; set KVFERRY_{secrets[0].upper()}_FILE for vLLM"
        raise Failed(f"{', '.join(secrets)}: {advice}", ExitCode.USAGE)
    arguments = SettingSource(Settings, SettingOrigin(Source.CONNECTOR, "argument"), given.items())
    refuse_embedded_settings(Settings(_sources=[arguments, *read_sources(Settings, {}, None)]))
    print_json_line(
        {
            "kv_connector": "KVFerryConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": given,
        }
    )


def _tier(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise typer.BadParameter(f"--tier {text[:80]}: is not JSON: {error}; quote it for the shell") from error
