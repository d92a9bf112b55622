"""Why a block is not in the pool: the names of what made it leave, and of what kept it from being stored."""

from __future__ import annotations

from enum import StrEnum


class EvictionReason(StrEnum):
    """Why a block left the pool."""

    CAPACITY = "capacity"
    RESET = "reset"
    OPERATOR = "operator"
    LOAD_FAILED = "load_failed"
    FAILED_VERIFICATION = "failed_verification"
    SHRINK = "shrink"


class SkipReason(StrEnum):
    """Why an offered block was not stored."""

    PROMPT_ONLY = "prompt_only"
    TOKEN_CAP = "token_cap"
    ALREADY_STORED = "already_stored"
    IN_FLIGHT = "in_flight"
    ADMISSION = "admission"
    NO_SPACE = "no_space"
    LEFT_DEVICE = "left_device"
    DISABLED = "disabled"
    RESET = "reset"


class NotStored(StrEnum):
    """Why a block that was considered for storing never came into the pool."""

    PROMPT_ONLY = "prompt_only"
    TOKEN_CAP = "token_cap"
    DISABLED = "disabled"
    ADMISSION = "admission"
    NO_SPACE = "no_space"
    LEFT_DEVICE = "left_device"
    FAILED = "failed"
    RESET = "reset"
    """A reset by match came while it was being stored."""
    IN_FLIGHT = "in_flight"
    """One of its blocks was being stored, as part of another slot."""
    PART_OF_SLOT = "part_of_slot"
    """It was computed, but not together with all the other blocks of its slot."""
