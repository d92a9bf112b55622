"""What core should answer, found the slow and obvious way: the longest hit in the pool, and a request's policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from math import lcm
from typing import TYPE_CHECKING

from kvferry.core.groups import Group
from kvferry.core.keys import RequestFilter, RequestIdentity
from kvferry.core.policy import Override, RequestPolicy
from kvferry.core.rules import Rule, Span
from tests.harness.toy_compute import first_needed
from tests.harness.toy_tokens import ToyRequest

if TYPE_CHECKING:
    from tests.harness.toy_engine import ToyEngine


NO_LIMIT = 10**9


def key_of(request: ToyRequest, group: Group, slot: int) -> bytes:
    """The key of a request's slot of this number; its last block names it."""
    return request.hash_at((slot + 1) * group.slot_tokens) + bytes([group.index])


def needed_slots(group: Group, first_token: int, end: int) -> range:
    """The slots that a hit from `first_token` to `end` reads."""
    first_block = max(first_needed(group, end), first_token // group.spec.block_size)
    return range(first_block // group.slot_blocks, -(-end // group.slot_tokens))


def longest_hit(
    engine: ToyEngine, request: ToyRequest, first_token: int, known_end: int = 0
) -> tuple[int, list[bytes]]:
    """Where the longest hit behind `first_token` ends, and the keys of all that it reads.

    `known_end` is the end of a prefix that was known earlier.
    """
    cap, skipped = engine.ledger.policies.of(request, engine.now_s).max_load_tokens, engine.layout.skipped_tokens
    limit = min(request.num_tokens - 1, NO_LIMIT if cap is None else cap)
    if skipped:
        held_end, _ = _longest_held(engine, request, first_token, limit, engine.layout.full_groups or engine.groups)
        limit = min(limit, max(known_end, held_end) - skipped)
    return _longest_held(engine, request, first_token, limit, engine.groups)


def _longest_held(
    engine: ToyEngine, request: ToyRequest, first_token: int, limit: int, groups: Sequence[Group]
) -> tuple[int, list[bytes]]:
    step = engine.layout.alignment_tokens
    index = engine.manager.index
    if first_token % step:
        return first_token, []
    for end in range(limit // step * step, first_token, -step):
        lasts = [(group, slot) for group in groups for slot in needed_slots(group, first_token, end)[-1:]]
        if any(
            (slot + 1) * group.slot_tokens > request.num_hashed or index.get(key_of(request, group, slot)) is None
            for group, slot in lasts
        ):
            continue
        slots = [(group, slot) for group in groups for slot in needed_slots(group, first_token, end)]
        keys = [key_of(request, group, slot) for group, slot in slots]
        if all(index.get(key) is not None for key in keys):
            return end, keys
    return first_token, []


def find_boundary(engine: ToyEngine, request: ToyRequest, hit_end: int) -> int:
    """Where a request leaves what others computed, as far as pool or device have it; 0 where that is within its hit."""
    full = engine.layout.full_groups
    end = request.num_tokens - 1
    for group in full:
        slot = hit_end // group.slot_tokens
        while (block_end := (slot + 1) * group.slot_tokens) <= min(end, request.num_hashed) and (
            engine.manager.index.get(key_of(request, group, slot)) is not None
            or (group.index, request.hash_at(block_end)) in engine.device.cached
        ):
            slot += 1
        end = min(end, slot * group.slot_tokens)
    end -= engine.layout.skipped_tokens
    end -= end % lcm(*(group.slot_tokens for group in engine.groups))
    return end if end > hit_end and len(full) < len(engine.groups) else 0


def boundary_slots(group: Group, resumable: int, whole: int) -> set[int]:
    """The slots of a sliding window's group that a hit of `resumable` tokens reads, of the first `whole` tokens."""
    return set(range(first_needed(group, resumable) // group.slot_blocks, whole // group.slot_tokens))


def matches(match: RequestFilter, origin: RequestIdentity) -> bool:
    """Whether a reset by match means what this request stored, or what an unknown one did."""
    names = [origin.request_id, *origin.aliases]
    return not origin.request_id or (
        (match.request is None or any(fnmatchcase(name, match.request) for name in names))
        and (match.tenant is None or fnmatchcase(origin.tenant or "", match.tenant))
        and (match.lora is None or fnmatchcase(origin.lora or "", match.lora))
    )


class PolicyOracle:
    """What operators and requests asked for, and what that comes to."""

    def __init__(self, settings: RequestPolicy) -> None:
        self.settings = settings
        self.runtime: dict[str, object] = {}
        self.rules: dict[str, Rule] = {}
        self.overrides: dict[str, Override] = {}

    def of(self, request: ToyRequest, now_s: float) -> RequestPolicy:
        """Override, then what the request sent, then the first rule, then runtime defaults, then settings."""
        sent = {k: v for k, v in (request.kv_transfer_params or {}).items() if _is_valid(k, v)}
        rules = sorted((rule.order, name) for name, rule in self.rules.items() if _rule_matches(rule, request))
        fields = {**self.runtime, **(self.rules[rules[0][1]].policy if rules else {}), **sent}
        for name in (request.request_id, *request.aliases):
            override = self.overrides.get(name)
            if override is not None and override.expires_s > now_s:
                fields.update(override.patch)
                break
        return replace(self.settings, **fields)

    def expire(self, now_s: float) -> None:
        """Core lets go of overrides in every step, and they do not come back if the clock does."""
        self.overrides = {name: one for name, one in self.overrides.items() if one.expires_s > now_s}

    def is_settled(self, request: ToyRequest, now_s: float) -> bool:
        """Whether none of its overrides ran out since the last step: core may or may not have noticed."""
        names = (request.request_id, *request.aliases)
        return all(self.overrides[name].expires_s > now_s for name in names if name in self.overrides)

    def storable_tokens(self, request: ToyRequest, now_s: float) -> int:
        """How many tokens from the start may be stored, of those that there are and of those to come."""
        policy = self.of(request, now_s)
        limit = request.num_prompt_tokens if policy.offload_prompt_only else NO_LIMIT
        if policy.max_offload_tokens is not None:
            limit = min(limit, policy.max_offload_tokens)
        return limit if policy.store else 0


def _rule_matches(rule: Rule, request: ToyRequest) -> bool:
    asked = RequestFilter(rule.match.request, rule.match.tenant, rule.match.lora)
    origin = RequestIdentity(request.request_id, request.tenant, request.lora, request.aliases)
    span = rule.match.prompt_tokens or Span()
    in_span = (span.min or 0) <= request.num_arrived_tokens <= (10**9 if span.max is None else span.max)
    priority = rule.match.priority
    if priority is not None and request.priority is None:
        in_span = in_span and (priority.min, priority.max) == (None, None)
    elif priority is not None:
        in_span = in_span and (priority.min is None or priority.min <= request.priority)
        in_span = in_span and (priority.max is None or request.priority <= priority.max)
    return in_span and matches(asked, origin)


def _is_valid(name: str, value: object) -> bool:
    if name == "max_offload_tokens":
        return type(value) is int and value >= 0
    return name in ("offload_prompt_only", "store", "load") and type(value) is bool
