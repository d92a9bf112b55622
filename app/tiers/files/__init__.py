"""The file system tier: blocks as files in a folder, each named by what it holds."""

from kvferry.app.tiers.files.tier import FileTier

__all__ = ["FileTier"]
