"""Requests that are computed without offloading: something that their KV depends on is not in vLLM's block hashes.

Inside one process such a request shares vLLM's own cache with others as before. docs/security.md lists the fields of
vLLM's requests, and whether the hashes have them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Unhashed(StrEnum):
    """What block hashes leave out."""

    PROMPT_EMBEDS = "prompt_embeds"
    """Which tokens of the prompt are embeddings."""
    MULTIMODAL = "multimodal"
    """The content of images, audio or video, which a client may have named by an id of its own."""
    DIFFUSION = "diffusion"
    """The length of the canvas in which a diffusion model has computed an answer, which each request may set."""


@dataclass(frozen=True, slots=True)
class KeyRules:
    """Facts about the engine on which it depends whether the block hashes of a request identify its KV."""

    hashes_embeddings: bool
    """Whether hashes have which tokens are embeddings."""
    trusts_mm_ids: bool
    """Whether clients give each image, audio or video an id of its own, if they give it one."""
    has_multimodal_model: bool
    has_diffusion_model: bool
    keeps_blocks: bool
    """Whether blocks may outlive the process or reach other engines."""

    def unhashed(self, request: Any) -> Unhashed | None:
        """Return what the hashes of a vLLM `Request` leave out, None if they identify its KV.

        An id that a client has chosen cannot be distinguished from a hash of the content, since vLLM hashes it together
        with processor options. A streaming session may receive multimodal input later.
        """
        if request.prompt_embeds is not None and not self.hashes_embeddings:
            return Unhashed.PROMPT_EMBEDS
        if self.has_diffusion_model and self.keeps_blocks:
            # Of all requests, as one may find blocks of another's answer on the device.
            return Unhashed.DIFFUSION
        may_be_multimodal = request.mm_features or (request.resumable and self.has_multimodal_model)
        if may_be_multimodal and not self.trusts_mm_ids and self.keeps_blocks:
            return Unhashed.MULTIMODAL
        return None
