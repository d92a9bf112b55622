"""Demonstration: one seeded workload on an engine twice, without and with offloading, and what each pass measured."""
