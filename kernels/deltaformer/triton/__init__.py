"""The Triton kernels of the write."""
