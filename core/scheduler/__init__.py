"""Which blocks are stored and loaded for which request, one engine step at a time."""
