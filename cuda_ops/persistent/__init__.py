"""Pools that outlive their process: file format, slot headers, sealing, recovery and inspection."""
