"""Causal attention for Hopper GPUs, in a window or over all keys, dense or packed, in half precision.

In Gluon, Triton's language in which a kernel says itself what lies in shared memory, what is on its way, and what it
waits for: products run while the weights before them are computed. The kernels of `zoo.kernels.attention.triton` do
the same without, on any GPU and for any dtype.
"""
