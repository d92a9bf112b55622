"""Benefit and cost of `offload_prompt_only`: multi-turn conversations whose answers begin with thinking.

Run: python -m bench.prompt_only [--seeds 3] [--conversations 24]

A chat template may strip the thinking of earlier turns from the next prompt, as most do, or keep it. Where it strips
it, no block of an answer is ever asked for again: its prefix has the thinking in it. The real scheduler and manager run
under the tests' toy engine, whose blocks hold numbers instead of KV, so all figures are counts, and the same for the
same seed. Only a block's length in bytes is made up, as that of an 8B model. All settings see the same conversations.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass, field

from bench.report import environment, spread
from kvferry.core.cost_model import LoadDecision, LoadOrCompute
from kvferry.core.groups import GroupSpec
from kvferry.core.policy import RequestPolicy
from kvferry.core.stats import Snapshot
from tests.harness.toy_engine import Habits, ToyEngine, ToyRequest

BLOCK_SIZE = 16
BLOCK_BYTES = BLOCK_SIZE * 128 * 1024
DEVICE_BLOCKS = 1200
TURNS = 6
SYSTEM_TOKENS = 256
USER_TOKENS = (32, 200)
THINKING_TOKENS = (200, 800)
ANSWER_TOKENS = (50, 200)
PAUSE_STEPS = (50, 800)
MAX_RUNNING = 4
POOL_SLOTS = (600, 1200, 2400, 10_000)


@dataclass
class Conversation:
    """The history of a conversation, and the step from which the next turn may come."""

    number: int
    rng: random.Random
    strips: bool
    history: list[int] = field(default_factory=list)
    turn: int = 0
    ready_at: int = 0
    thinking: int = 0

    def next_turn(self) -> ToyRequest:
        """Return a request whose prompt is the history followed by a new message."""
        self.turn += 1
        said = self.rng.randint(*USER_TOKENS)
        # Tokens of a user's message are numbers that occur in no other conversation.
        base = 10**6 * (self.number + 1) + 10**4 * self.turn
        self.history += range(base, base + said)
        self.thinking = self.rng.randint(*THINKING_TOKENS)
        num_outputs = self.thinking + self.rng.randint(*ANSWER_TOKENS)
        name = f"c{self.number}-{self.turn}"
        prompt = list(self.history)
        return ToyRequest(name, prompt, len(prompt), num_outputs, hash_block_size=BLOCK_SIZE)

    def ended(self, request: ToyRequest, step: int) -> None:
        """Append the part of the answer that the next prompt will contain."""
        outputs = request.tokens[request.num_prompt_tokens :]
        self.history += outputs[self.thinking :] if self.strips else outputs
        self.ready_at = step + self.rng.randint(*PAUSE_STEPS)


def talk(seed: int, num_conversations: int, num_slots: int, strips: bool, prompt_only: bool) -> Snapshot:
    """Run all conversations to their ends, and return the counters."""
    rng = random.Random(seed)
    engine = ToyEngine(
        num_slots,
        DEVICE_BLOCKS,
        specs=[GroupSpec(BLOCK_SIZE, BLOCK_BYTES)],
        settings=RequestPolicy(offload_prompt_only=prompt_only),
        cost_model=LoadOrCompute(LoadDecision.ALWAYS),
        habits=Habits(max_running=MAX_RUNNING, allocates_ahead=False),
    )
    system = list(range(SYSTEM_TOKENS))
    waiting = [
        Conversation(number, random.Random(rng.random()), strips, list(system), ready_at=rng.randint(0, 2000))
        for number in range(num_conversations)
    ]
    running: list[tuple[Conversation, ToyRequest]] = []
    step = 0
    while waiting or running:
        step += 1
        for one in [one for one in waiting if one.ready_at <= step]:
            waiting.remove(one)
            running.append((one, one.next_turn()))
            engine.add(running[-1][1])
        engine.step(budget=512, copy=True)
        for one, request in [pair for pair in running if pair[1].state == "finished"]:
            running.remove((one, request))
            one.ended(request, step)
            if one.turn < TURNS:
                waiting.append(one)
    engine.run()
    return engine.offload.snapshot()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--conversations", type=int, default=24)
    options = parser.parse_args()
    print(environment("numpy"))
    print(
        f"{options.conversations} conversations of {TURNS} turns, {DEVICE_BLOCKS} device blocks of {BLOCK_SIZE} tokens;"
    )
    print(f"median (min-max) of {options.seeds} seeds; thousands of prompt tokens by what served them")
    print(
        "| thinking | pool slots | prompt-only | GiB written | from the host | from the device | computed | preempted |"
    )
    print("| --- | ---: | --- | --- | --- | --- | --- | --- |")
    for strips in (True, False):
        for num_slots in POOL_SLOTS:
            for prompt_only in (True, False):
                runs = [
                    talk(seed, options.conversations, num_slots, strips, prompt_only)
                    for seed in range(1, options.seeds + 1)
                ]
                prompts = [run.prompt_tokens for run in runs]
                cells = (
                    "stripped" if strips else "kept",
                    f"{num_slots:,}",
                    "on" if prompt_only else "off",
                    spread([run.store.bytes / 2**30 for run in runs], 1),
                    spread([prompt.host_hit / 1000 for prompt in prompts], 0),
                    spread([prompt.device_hit / 1000 for prompt in prompts], 0),
                    spread([prompt.recomputed / 1000 for prompt in prompts], 0),
                    spread([run.requests.preempted for run in runs], 0),
                )
                print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
