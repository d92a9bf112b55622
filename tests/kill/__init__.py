"""Processes with a kept pool that are killed at any moment, and what their successors find."""
