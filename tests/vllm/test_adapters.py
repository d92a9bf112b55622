"""LoRA adapters are identified by the content of their files; ambiguous ones are not stored."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file

from kvferry.app.engines.identity import DigestCache
from kvferry.app.engines.vllm.requests import SUFFIX_BYTES, Adapters, VllmRequest
from tests.harness.waiting import DEADLINE_S, wait_until
from tests.vllm.engines import InProcess, in_process, transfer_config
from tests.vllm.workload import BLOCK, random_tokens
from vllm.lora.request import LoRARequest

RNG = random.Random(71)
PROMPTS = [random_tokens(RNG, 4 * BLOCK + 5) for _ in range(24)]
"""More than the device holds, and none begins like another."""
LAYERS, HIDDEN, RANK = 4, 128, 8
UNCACHED = DigestCache(None)


def write_adapter(folder: Path, seed: int) -> Path:
    """A small adapter that changes keys and values."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(LAYERS):
        for module in ("k_proj", "v_proj"):
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            weights[f"{name}.lora_A.weight"] = torch.randn(RANK, HIDDEN, generator=generator)
            weights[f"{name}.lora_B.weight"] = torch.randn(HIDDEN, RANK, generator=generator) / RANK
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": ["k_proj", "v_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def lora(path: Path | str, name: str = "one", number: int = 1, load_inplace: bool = False) -> LoRARequest:
    return LoRARequest(name, number, str(path), load_inplace=load_inplace)


def held_of(engine: InProcess, lora: str | None) -> int:
    """How much of the first prompt is held, for requests with or without an adapter."""
    with httpx.Client(base_url=engine.connector._the_core().admin_url, timeout=DEADLINE_S) as admin:
        answer = admin.post("/admin/v1/lookup", json={"token_ids": PROMPTS[0], "lora": lora}).raise_for_status()
        return int(answer.json()["anywhere"])


class Hashes:
    """A request of so many full blocks with an adapter, as kvferry sees its hashes."""

    def __init__(self, adapters: Adapters, request: LoRARequest, blocks: int = 2) -> None:
        live: Any = SimpleNamespace(
            request_id="one-1",
            cache_salt=None,
            lora_request=request,
            priority=0,
            num_preemptions=0,
            skip_reading_prefix_cache=False,
            session_id=None,
            block_hashes=[bytes([number]) * 32 for number in range(blocks)],
        )
        self.theirs: list[bytes] = live.block_hashes
        self._ours = VllmRequest(live, adapters)

    def now(self) -> list[bytes]:
        return list(self._ours.block_hashes)

    def known(self) -> list[bytes]:
        """The hashes, once the adapter's files have been read."""
        wait_until(lambda: bool(self.now()), "the adapter is known", 20.0)
        return self.now()


@pytest.fixture
def adapters() -> Adapters:
    return Adapters("a start", 4, UNCACHED)


def test_adapter_with_other_weights_after_restart_has_other_hashes(tmp_path: Path) -> None:
    write_adapter(tmp_path / "a", seed=1)
    first = Hashes(Adapters("a start", 4, UNCACHED), lora(tmp_path / "a")).known()
    assert first == Hashes(Adapters("another", 4, UNCACHED), lora(tmp_path / "a")).known()
    write_adapter(tmp_path / "a", seed=2)
    second = Hashes(Adapters("another", 4, UNCACHED), lora(tmp_path / "a")).known()
    assert not set(first) & set(second)


def test_hashes_with_adapter_are_extended_and_grow_with_vllms(tmp_path: Path, adapters: Adapters) -> None:
    found = Hashes(adapters, lora(write_adapter(tmp_path / "a", seed=1)))
    first = found.known()
    assert [ours[:32] for ours in first] == found.theirs
    assert {len(ours) for ours in first} == {32 + SUFFIX_BYTES}
    found.theirs.append(b"\x07" * 32)
    assert found.now()[:2] == first
    assert found.now()[2] == adapters.extended_hash(b"\x07" * 32)
    assert adapters.extended_hash(b"\x08" * 32) == b"\x08" * 32


def test_hashes_when_removed_by_vllm_are_removed(tmp_path: Path, adapters: Adapters) -> None:
    """A streaming session drops the token that it sampled last, and goes on with the client's next ones."""
    found = Hashes(adapters, lora(write_adapter(tmp_path / "a", seed=1)), blocks=3)
    first = found.known()
    found.theirs[2:] = [b"\x07" * 32, b"\x08" * 32]
    assert [ours[:32] for ours in found.now()] == found.theirs
    assert found.now()[:2] == first[:2]


def test_adapter_when_reloaded_with_other_weights_is_not_stored(
    tmp_path: Path, adapters: Adapters, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM's own cache still holds the blocks of the first weights, under the same hashes."""
    first = Hashes(adapters, lora(write_adapter(tmp_path / "a", seed=1)))
    assert first.known()
    write_adapter(tmp_path / "a", seed=2)
    second = Hashes(adapters, lora(tmp_path / "a", number=2))
    wait_until(lambda: "was loaded again" in caplog.text, "it is noticed", 20.0)
    assert first.now() == second.now() == []


def test_adapter_when_reloaded_with_the_same_weights_is_the_same(tmp_path: Path, adapters: Adapters) -> None:
    first = Hashes(adapters, lora(write_adapter(tmp_path / "a", seed=1))).known()
    assert Hashes(adapters, lora(tmp_path / "a", number=2)).known() == first


def test_adapter_when_loaded_in_place_is_not_stored(
    tmp_path: Path, adapters: Adapters, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_adapter(tmp_path / "a", seed=1)
    assert Hashes(adapters, lora(path)).known()
    assert Hashes(adapters, lora(path, load_inplace=True)).now() == []
    assert Hashes(adapters, lora(path)).now() == []
    assert "load other weights from another path" in caplog.text


def test_adapter_on_the_hub_is_the_same_for_this_engine_only(adapters: Adapters) -> None:
    first = Hashes(adapters, lora("somebody/adapter")).known()
    assert Hashes(adapters, lora("somebody/adapter")).known() == first
    other = Hashes(Adapters("another", 4, UNCACHED), lora("somebody/adapter")).known()
    assert not set(first) & set(other)


def test_adapter_when_unreadable_is_not_stored(
    tmp_path: Path, adapters: Adapters, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_adapter(tmp_path / "a", seed=1)
    weights = path / "adapter_model.safetensors"
    weights.unlink()
    weights.symlink_to(weights)
    found = Hashes(adapters, lora(path))
    wait_until(lambda: "its files cannot be read" in caplog.text, "it is said", 20.0)
    assert found.now() == []
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_adapter_beyond_the_limit_is_not_stored(caplog: pytest.LogCaptureFixture) -> None:
    adapters = Adapters("a start", 4, UNCACHED, max_adapters=2)
    found = [Hashes(adapters, lora(f"hub/{number}")) for number in range(4)]
    assert found[0].known()
    assert found[1].known()
    assert found[2].now() == found[3].now() == []
    assert [record.getMessage() for record in caplog.records] == [
        "further LoRA adapters are not offloaded, the limit is reached: 2"
    ]


def test_adapter_of_dropped_load_is_not_stored(tmp_path: Path, adapters: Adapters) -> None:
    path = write_adapter(tmp_path / "a", seed=1)
    live = Hashes(adapters, lora(path))
    first = live.known()
    for number in range(2, 40):
        assert Hashes(adapters, lora(path, number=number)).known() == first
    assert live.now() == []
    assert Hashes(adapters, lora(path)).known() == first
    assert len(adapters.find(lora(path)).loads) <= 16


# --- vLLM itself ------------------------------------------------------------------------------------------------------


def adapted(engine: InProcess, path: Path, number: int = 1) -> list[tuple[int, ...]]:
    """Answers with the adapter that is at a path, which always has one name."""
    asked: list[Any] = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = engine.llm.generate(
        asked, engine.sampling(8), use_tqdm=False, lora_request=lora(path, f"adapter-{number}", number)
    )
    return [tuple(output.outputs[0].token_ids) for output in outputs]


def test_blocks_are_loaded_for_their_own_adapter_only(llama: Path, tmp_path: Path) -> None:
    """Stored as they leave the device, where they go by vLLM's hashes alone."""
    options: dict[str, Any] = {"enable_lora": True, "max_lora_rank": RANK}
    kept = transfer_config(
        pool_kind="file",
        pool_path=str(tmp_path / "pool"),
        engine_name="adapted",
        load_decision="always",
        store_mode="lazy",
    )
    with in_process(llama, **options) as engine:
        first = adapted(engine, write_adapter(tmp_path / "first", seed=1))
        second = adapted(engine, write_adapter(tmp_path / "second", seed=2), 2)
    assert sum(one != other for one, other in zip(first, second, strict=True)) > len(PROMPTS) // 2
    path = write_adapter(tmp_path / "one", seed=1)
    for number in range(2):
        with in_process(llama, kept, **options) as engine:
            wait_until(
                lambda: engine.scheduler.device.adapters.find(lora(path, "adapter-1")).suffix(1) is not None,
                "it is known",
                20.0,
            )
            assert adapted(engine, path) == first
            assert (engine.settle().prompt_tokens.host_hit > 0) == (number > 0)
            assert adapted(engine, path) == first
            assert engine.settle().prompt_tokens.host_hit > 0
            assert engine.snapshot().load.failed == 0
            assert [held_of(engine, lora=name) for name in ("adapter-1", None)] == [4 * BLOCK, 0]
    write_adapter(path, seed=2)
    with in_process(llama, kept, **options) as engine:
        assert engine.snapshot().pool.unverified > 0
        wait_until(
            lambda: engine.scheduler.device.adapters.find(lora(path, "adapter-1")).suffix(1) is not None,
            "it is known",
            20.0,
        )
        assert adapted(engine, path) == second
        assert engine.settle().prompt_tokens.host_hit == 0
        assert adapted(engine, path) == second
        assert engine.settle().prompt_tokens.host_hit > 0
