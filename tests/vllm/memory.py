"""Memory of KV caches that goes and comes back, as in vLLM's sleep mode."""

from __future__ import annotations

from collections.abc import Mapping

import torch


class Moving:
    """The memory below tensors, which are the same objects all the time."""

    def __init__(self, caches: Mapping[str, torch.Tensor]) -> None:
        storages = (cache.untyped_storage() for cache in caches.values())
        self._storages = {storage.data_ptr(): storage for storage in storages}
        self._sizes = {address: storage.nbytes() for address, storage in self._storages.items()}
        self._blockers: list[torch.Tensor] = []

    def addresses(self) -> set[int]:
        return {storage.data_ptr() for storage in self._storages.values()}

    def free(self) -> None:
        """Take the memory away, and keep its place occupied."""
        for address, storage in self._storages.items():
            storage.resize_(0)
            self._blockers.append(torch.zeros(self._sizes[address], dtype=torch.uint8))

    def allocate(self) -> None:
        """Bring the memory back, with zeros in it and elsewhere."""
        for address, storage in self._storages.items():
            storage.resize_(self._sizes[address])
        self.clear()

    def clear(self) -> None:
        """Forget what is in the memory."""
        for storage in self._storages.values():
            torch.empty(0, dtype=torch.uint8).set_(storage).zero_()
