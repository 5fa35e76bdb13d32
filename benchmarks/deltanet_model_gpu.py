"""A training step of the DeltaNet of 374M parameters on one CUDA GPU, beside FLA's where it is installed.

    python benchmarks/deltanet_model_gpu.py --out results    # writes deltanet_model_GPU.json

Both have 24 layers of width 1024, 8 heads of 128, a vocabulary of 32,000, weights in bf16 and the fused AdamW, and see
the same 16 rows of 2048 random tokens. Ours is compiled as one graph; FLA's is eager, for compiled it is slower. A step
is the forward, the loss, the backward and the optimiser's, and waits for the device. Then the time on the GPU of a
compiled step, by what its kernels do.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # not there under PYTHONSAFEPATH
from harness import Benchmark, Part
from models_gpu import fla_step, our_step, train_both

SHAPE = 16, 2048
KINDS = {
    "matrix products": ("nvjet", "gemm", "cutlass", "splitK"),
    "delta rule": ("prepare_kernel", "scan_kernel", "gradients_kernel"),
    "convolution": ("forward_kernel", "backward_kernel"),
    "optimiser": ("multi_tensor_apply",),
    "fused by Inductor": ("triton_",),
}


def train() -> dict[str, Any]:
    """A training step of both, and where the time of ours goes."""
    ours, fla = partial(our_step, "deltanet-340m", SHAPE), partial(fla_step, "DeltaNet", 8, SHAPE)
    return train_both(ours, fla, SHAPE, KINDS)


def main() -> None:
    """Measure."""
    benchmark = Benchmark(
        name="deltanet_model",
        kind="section",
        parts={"train": Part(train.__doc__ or "", train)},
        fla_module="fla.models",
        settings={"dtype": "bfloat16"},
    )
    parser = benchmark.make_parser((__doc__ or "").partition("\n")[0], out="the JSON")
    args = benchmark.parse_args(parser)
    benchmark.run(args.parts, args.out)


if __name__ == "__main__":
    main()
