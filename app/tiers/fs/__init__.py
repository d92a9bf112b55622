"""File system tier: blocks as files in a folder, named by their keys."""

from kvferry.app.tiers.fs.tier import FileTier

__all__ = ["FileTier"]
