"""Which blocks a service finds again: those of identical weights in any folder, and none of other weights."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.harness.checkpoints import SMALL
from tests.harness.embedded import reference_answer, reference_model
from tests.harness.service_process import Served, serving
from tests.harness.waiting import wait_until

PROMPTS = [[(7 * n + 3 * i) % 250 + 3 for i in range(163)] for n in range(4)]
OUTPUT = 4


def write_model(folder: Path) -> Path:
    """A model whose attention weights are more than 1 MiB from both ends of its file."""
    torch.manual_seed(11)
    LlamaForCausalLM(LlamaConfig(**{**SMALL, "intermediate_size": 4096})).save_pretrained(folder)
    return folder


def change_one_byte(folder: Path) -> None:
    """Change one weight of the values, with size and time of the file kept."""
    weights = folder / "model.safetensors"
    about, data = weights.stat(), bytearray(weights.read_bytes())
    header_bytes = int.from_bytes(data[:8], "little")
    tensor = json.loads(data[8 : 8 + header_bytes])["model.layers.0.self_attn.v_proj.weight"]
    at = 8 + header_bytes + tensor["data_offsets"][0] + 3
    assert 1 << 20 < at < len(data) - (1 << 20)
    # The byte of sign and exponent.
    data[at] ^= 0x02
    weights.write_bytes(data)
    os.utime(weights, ns=(about.st_atime_ns, about.st_mtime_ns))


def answers(served: Served, model: Path, name: str) -> tuple[list[list[int]], list[Any]]:
    """Answers to the prompts, and where their tokens came from."""
    found = [
        served.complete(prompt, f"{name}-{number}", model=str(model), max_tokens=OUTPUT)["choices"][0]["token_ids"]
        for number, prompt in enumerate(PROMPTS)
    ]
    served.settle()
    wait_until(lambda: served.stats()["tiers"]["disk"]["open_jobs"] == 0, "the tier is idle")
    return found, [served.get(f"/admin/v1/requests/{name}-{n}")["prompt_tokens"] for n in range(len(PROMPTS))]


@pytest.mark.long
def test_blocks_are_found_by_identical_weights_and_no_others(tmp_path: Path) -> None:
    first = write_model(tmp_path / "first")
    copy = Path(shutil.copytree(first, tmp_path / "copy"))
    os.utime(copy / "model.safetensors", (1000, 1000))
    other = Path(shutil.copytree(first, tmp_path / "other"))
    change_one_byte(other)
    models = {str(model): reference_model(str(model)) for model in (first, other)}
    truth = {name: [reference_answer(model, prompt, OUTPUT) for prompt in PROMPTS] for name, model in models.items()}
    assert truth[str(first)] != truth[str(other)]
    tiers = [{"type": "fs", "name": "disk", "path": str(tmp_path / "tier"), "max_bytes": "1GiB"}]
    kept = {"pool_kind": "file", "pool_path": tmp_path / "pool", "engine_name": "same", "pool_bytes": "32MiB"}
    settings = {"dtype": "float64", "load_decision": "always", "tiers": json.dumps(tiers), **kept}
    with serving(tmp_path, model=first, **settings) as served:
        assert answers(served, first, "a")[0] == truth[str(first)]
        assert served.stop() == 0
    with serving(tmp_path, model=copy, **settings) as served:
        assert served.stats()["recovery"]["recovered"] > 0
        assert served.http.post("/admin/v1/reset", json={"tiers": ["host"]}).status_code == 200
        found, places = answers(served, copy, "b")
        assert found == truth[str(first)]
        assert sum(place["tier_hit"].get("disk", 0) for place in places) > 0
        assert served.stop() == 0
    with serving(tmp_path, model=other, **settings) as served:
        assert "revision was 'files-" in served.stats()["recovery"]["foreign"]
        found, places = answers(served, other, "c")
        assert found == truth[str(other)]
        assert [place["recomputed"] for place in places] == [len(prompt) for prompt in PROMPTS]
