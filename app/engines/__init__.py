"""Engines that kvferry attaches to: the built-in `embedded` engine and stock vLLM."""
