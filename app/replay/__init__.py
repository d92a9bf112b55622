"""Replay of a recorded trace against a running engine, to measure what serves the prompt tokens."""
