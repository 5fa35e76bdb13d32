"""A matrix times one row in Triton: the kernel, and the function that launches it. Imported at the first call."""
