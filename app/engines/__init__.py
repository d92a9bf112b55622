"""The engines that kvferry attaches to: one of its own (`embedded`) and, out of tree, vLLM."""
