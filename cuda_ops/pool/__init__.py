"""Host memory of the pool: extents, backing, preparation, limits, and the processors near it."""
