"""Exports of the pool's blocks to a folder or an object store, and imports from there into a running pool."""
