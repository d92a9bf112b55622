"""Offload decisions: which KV blocks to store, load and evict. No I/O, threads or clocks.

`core` handles keys, slots and jobs, never bytes. It imports no web framework, database, CUDA, vLLM or transformers.
Time is an argument (`now_s`), so that a simulator can drive it.
"""
