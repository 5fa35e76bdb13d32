"""All kernels that are measured, by name."""

from zoo.bench.kernels.attention import ATTENTION
from zoo.bench.kernels.decoding import DECODING
from zoo.bench.kernels.delta_rule import DELTA_RULE
from zoo.bench.kernels.deltaformer import DELTAFORMER
from zoo.bench.kernels.kernel import Kernel
from zoo.bench.kernels.short_convolution import SHORT_CONVOLUTION

__all__ = ["KERNELS"]

KERNELS: dict[str, Kernel] = {
    kernel.name: kernel for kernel in (*DELTA_RULE, *DELTAFORMER, *ATTENTION, *SHORT_CONVOLUTION, *DECODING)
}
