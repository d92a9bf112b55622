"""Eviction: policies, the queues they pick from, and the history of keys that are missing."""
