"""Causal language models: `train lm`."""
