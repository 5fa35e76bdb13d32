"""Causal attention in Triton, in a window or over all keys, dense or packed."""
