"""`zoo bench`: kernels of one operation side by side."""
