"""kvferry: moves KV-cache blocks of LLM engines to host memory and back, and decides which."""
