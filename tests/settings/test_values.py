"""How values are read: whatever is written the documented way comes back, and nothing else does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from kvferry.app.settings import Settings
from kvferry.app.settings import types as values

UNITS = {"": 1, "B": 1, "kB": 1000, "MB": 1000**2, "GB": 1000**3, "TB": 1000**4} | {
    f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", start=1)
}


@given(st.integers(1, 10_000), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " "]), st.booleans())
def test_sizes(number: int, unit: str, gap: str, lower: bool) -> None:
    text = f"{number}{gap}{unit}"
    assert values.parse_size(text.lower() if lower else text) == number * UNITS[unit]


@given(st.decimals(min_value="0.01", max_value=5000, places=2), st.sampled_from(["MiB", "GiB", "GB", "TB"]))
def test_sizes_with_decimals_are_exact(number: object, unit: str) -> None:
    hundredths = round(float(str(number)) * 100)
    assert values.parse_size(f"{number}{unit}") == hundredths * UNITS[unit] // 100


@given(st.integers(1, values.MAX_INT64))
def test_a_size_written_in_its_unit_reads_the_same(num_bytes: int) -> None:
    assert values.parse_size(num_bytes) == values.parse_size(values.format_size(num_bytes)) == num_bytes


@given(st.text(max_size=12))
def test_text_is_a_size_or_refused(text: str) -> None:
    try:
        read: int | str = values.parse_size(text)
    except ValueError as error:
        read = str(error)
    if isinstance(read, int):
        assert 1 <= read <= values.MAX_INT64
    else:
        assert read.startswith("must be a size such as 8GiB")


@given(st.integers() | st.floats() | st.booleans() | st.text(max_size=25) | st.none() | st.lists(st.integers()))
def test_a_cap_is_a_count_or_unlimited_or_refused(value: object) -> None:
    try:
        cap: int | str | None = TypeAdapter(values.Cap).validate_python(value)
    except ValueError as error:
        cap = str(error)
    if isinstance(cap, str):
        assert "unlimited" in cap
    else:
        assert cap is None or (type(cap) is int and cap >= 0)
        assert type(value) is not bool
        assert not isinstance(value, float)


@pytest.mark.parametrize(("text", "cap"), [("unlimited", None), ("UNLIMITED", None), ("0", 0), ("4096", 4096)])
def test_caps(text: str, cap: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_MAX_OFFLOAD_TOKENS", text)
    assert Settings().max_offload_tokens == cap
    assert Settings().request_policy().max_offload_tokens == cap


@pytest.mark.parametrize("text", ["store,load", "store, load", '["store", "load"]', "store,load,store"])
def test_lists_of_names(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_REQUEST_FIELDS", text)
    assert Settings().request_fields == ("store", "load")


def test_no_request_fields_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_REQUEST_FIELDS", "[]")
    assert Settings().request_fields == ()


@pytest.mark.parametrize("word", ["true", "True", "1", "yes", "on"])
def test_truth(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_OFFLOAD_PROMPT_ONLY", word)
    assert Settings().offload_prompt_only is True


@given(st.sampled_from(["block_size", "device_blocks", "max_running"]), st.integers(1, 1024))
def test_values_shown_by_describe_can_be_set_again(name: str, number: int) -> None:
    settings = Settings(**{name: number, "max_batched_tokens": 2048}, _env_file=None)
    shown = {view.name: view.value for view in settings.describe() if view.value is not None}
    again = Settings(**shown, _env_file=None)
    assert [(view.name, view.value) for view in again.describe()] == [(v.name, v.value) for v in settings.describe()]


def test_limit_of_tenants_when_unlimited_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_TENANT_MAX_BYTES", "unlimited")
    settings = Settings(_env_file=None)
    assert (settings.tenant_max_bytes, settings.source("tenant_max_bytes")) == (None, "env")
    assert settings.change({"log_level": "debug"}).tenant_max_bytes is None
    monkeypatch.setenv("KVFERRY_TENANT_MAX_BYTES", "8GiB")
    assert Settings(_env_file=None).tenant_max_bytes == 8 << 30
