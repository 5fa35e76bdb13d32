"""Reading from caches in Triton: the kernel, and the function that launches it. Imported at the first call."""
