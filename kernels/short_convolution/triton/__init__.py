"""The short convolution in Triton: kernels, and the functions that launch them. Imported at the first call."""
