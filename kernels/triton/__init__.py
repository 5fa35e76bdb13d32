"""Parts of Triton kernels that several operations share."""
