"""One token of a layer with the delta rule in Triton: the kernel and its launch. Imported at the first call."""
