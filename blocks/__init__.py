"""Blocks: a mixer and an MLP with their norms on a residual stream; the norms and the MLPs."""
