"""Tiers below the host pool: opening, calling on threads, and the file system tier."""
