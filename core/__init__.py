"""What to carry, where to, and who must go: the decisions of kvferry, free of bytes, threads and clocks.

`core` moves names (keys, slots, jobs) and never bytes. It imports neither a web framework nor a database, CUDA,
vLLM or transformers; it starts no thread and reads no clock (`now_s` is an argument), so that a simulator can own it.
"""
