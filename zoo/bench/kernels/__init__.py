"""`zoo bench kernels`: this library's kernels beside their references, their peers, and what the hardware allows."""
