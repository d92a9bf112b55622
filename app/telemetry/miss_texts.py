"""Why prompt tokens were computed: a sentence per cause, with what an operator can do, and at most three words.

The dictionaries are by cause, as in the fields of `MissedTokens`; a test keeps them complete. The command line and the
dashboard show the words in tables, and the sentence where one request is explained.
"""

from __future__ import annotations

CAUSES = {
    "new": "never computed before, or longer ago than metadata is kept",
    "other_fingerprint": "computed by an earlier process with another model or layout, whose pool was dropped at start",
    "gap": "held, but unusable without an earlier block that is not",
    "pin_limit": "held, but waiting requests had pinned all that they may; a larger KVFERRY_POOL_BYTES helps",
    "in_flight": "being stored, or on the way from a tier, at that moment",
    "tail": "the last token, tokens that fill no block and, with EAGLE or MTP, the last known block; always computed",
    "load_failed": "found, but the load failed; the log has the reason",
    "declined": "found, but computing was expected to be faster; KVFERRY_LOAD_DECISION=always loads anyway",
    "load_disabled": "loads are forbidden by the request's policy",
    "error": "computed without offloading after an unexpected error; the log has the traceback",
    "unexamined": "not examined: too many blocks were missing, or the prompt was never looked up",
}
EVICTED = {
    "capacity": "evicted to make space; a larger KVFERRY_POOL_BYTES would have kept them",
    "reset": "dropped by a reset",
    "operator": "dropped by an operator",
    "load_failed": "dropped after a failed load",
    "failed_verification": "dropped because their bytes did not match their checksum",
    "shrink": "evicted when the pool was made smaller",
    "tenant_limit": "evicted for later blocks of their tenant, which was at its limit (kvferry tenants list)",
}
NOT_STORED = {
    "prompt_only": "computed before as output, which offload_prompt_only excludes from storing",
    "token_cap": "computed before, but beyond that request's max_offload_tokens",
    "already_stored": "stored already",
    "in_flight": "computed before, while one of their blocks was being stored as part of another slot",
    "admission": "computed before, but not offered as often as KVFERRY_STORE_THRESHOLD asks",
    "no_space": "computed before, when no slot could be freed",
    "tenant_limit": "computed before, when their tenant was at its limit and none of its blocks could be evicted",
    "left_device": "computed before, but reused by the device before they could be stored",
    "disabled": "computed before by a request that its own fields, an override, a rule or a default forbid to store",
    "paused": "computed before, while KVFERRY_AUTO_PAUSE had paused storing, which cost more than it saved",
    "reset": "computed before, and being stored when a reset came",
    "failed": "computed before, but the store failed; the log has the reason",
    "part_of_slot": "computed before, without the rest of their slot (KVFERRY_BLOCKS_PER_SLOT)",
}
SHORT = {
    "causes": {
        "new": "not seen before",
        "other_fingerprint": "model has changed",
        "gap": "earlier block missing",
        "pin_limit": "too many waiting",
        "in_flight": "still being moved",
        "tail": "end of prompt",
        "load_failed": "load has failed",
        "declined": "computing was faster",
        "load_disabled": "loads are forbidden",
        "error": "after an error",
        "unexamined": "not looked at",
    },
    "evicted": {
        "capacity": "no room left",
        "reset": "dropped by reset",
        "operator": "dropped by operator",
        "load_failed": "dropped, load failed",
        "failed_verification": "checksum was wrong",
        "shrink": "pool made smaller",
        "tenant_limit": "tenant at limit",
    },
    "not_stored": {
        "prompt_only": "output, not prompt",
        "token_cap": "beyond token limit",
        "already_stored": "was stored already",
        "in_flight": "part being stored",
        "admission": "offered too rarely",
        "no_space": "no slot free",
        "tenant_limit": "tenant's blocks busy",
        "left_device": "left device early",
        "disabled": "storing is forbidden",
        "paused": "storing was paused",
        "reset": "reset while storing",
        "failed": "store has failed",
        "part_of_slot": "slot not full",
    },
}
"""By the field of `MissedTokens`, then by cause. No two are equal."""
