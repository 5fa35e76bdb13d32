"""What stands in front of the delta rule in a DeltaNet layer, on one CUDA GPU: convolution, SiLU, L2 norm, sigmoid.

    python benchmarks/feature_maps_gpu.py --out results        # dense and packed; writes feature_maps_GPU.json
    python benchmarks/feature_maps_gpu.py dense --out results  # one of them; the file keeps the other

From the layer's products, qkv [B, T, 3 H D] and the logits of beta [B, T, H], to q, k, v [B, T, H, D] and beta, forward
and with the backward: the convolution and SiLU in plain PyTorch and by the Triton kernel, compiled, compiled without
the L2 norm (as if the rule's kernel normalised), and eager; and FLA's kernels where flash-linear-attention is
installed. Then the same followed by the delta rule, with the norm compiled in front of the kernel and inside it.

Shapes: B batch, T tokens, H heads, D head dimension, C = 3 H D channels, K taps.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor

from zoo import components
from zoo.kernels.delta_rule import chunk_delta_rule
from zoo.kernels.normalize import l2_normalize
from zoo.kernels.short_convolution import short_convolution
from zoo.mixers import feature_maps
from zoo.mixers.context import Context
from zoo.mixers.delta_net import DeltaNet
from zoo.timing import call_ms, graph_ms

sys.path.insert(0, str(Path(__file__).parent))  # not there under PYTHONSAFEPATH
from harness import DEVICE, Benchmark, Part, relative_errors, rounded, show

DTYPE = torch.bfloat16
WIDTH, HEADS, HEAD_DIM = 1024, 8, 128
SHAPES = {"dense": (16, 2048), "packed": (1, 32768)}
DOCUMENT = 1000
TOLERANCE = 2e-2

Call = Callable[[], tuple[Tensor, ...]]
"""Computes the outputs that have an upstream gradient."""


class Case:
    """One batch: what every variant starts from, and the gradients that come back.

    Args:
        name: "dense" or "packed".
    """

    def __init__(self, name: str) -> None:
        self.batch, self.length = SHAPES[name]
        torch.manual_seed(0)
        self.layers = {norm: make_layer(norm) for norm in ("l2", "none")}
        self.layers["none"].load_state_dict(self.layers["l2"].state_dict())
        shape = self.batch, self.length
        self.projected = [
            torch.randn(*shape, width, device=DEVICE, dtype=DTYPE).requires_grad_()
            for width in (3 * HEADS * HEAD_DIM, HEADS)
        ]
        self.cu_seqlens = document_ends(self.length) if name == "packed" else None
        tokens = torch.empty(shape, device=DEVICE, dtype=torch.long)
        self.context = Context.from_tokens(tokens, self.cu_seqlens)
        heads = *shape, HEADS, HEAD_DIM
        self.gradients = [torch.randn(heads, device=DEVICE, dtype=DTYPE) for _ in range(3)]
        self.gradients.append(torch.randn(heads[:3], device=DEVICE))

    @property
    def floors(self) -> dict[str, int]:
        """Bytes: each input read once, each output written once; the backward reads the projection again."""
        projected, weight = sum(x.nbytes for x in self.projected), taps(self.layers["l2"]).nbytes
        forward = projected + weight + sum(x.nbytes for x in self.gradients)
        return {"forward": forward, "forward_backward": 2 * forward + projected + weight}


def make_layer(norm: str) -> DeltaNet:
    """A DeltaNet layer of the width, whose q and k are normalised that way."""
    options = {"name": "delta_net", "num_heads": HEADS, "head_dim": HEAD_DIM, "qk_norm": norm}
    layer = components.make("mixer", components.resolve("mixer", options, WIDTH), WIDTH)
    return cast(DeltaNet, layer.to(DEVICE, DTYPE))


def taps(layer: DeltaNet) -> Tensor:
    """The weight of its convolution [K, C]."""
    assert layer.conv is not None, "the default has one"
    return layer.conv.weight


def document_ends(length: int) -> Tensor:
    """[N + 1] int32: documents of 500 to 1500 tokens."""
    sizes = torch.randint(DOCUMENT // 2, 3 * DOCUMENT // 2, (2 * length // DOCUMENT,))
    ends = sizes.cumsum(0)
    inner = ends[ends < length - DOCUMENT // 2].tolist()
    return torch.tensor([0, *inner, length], device=DEVICE, dtype=torch.int32)


def features(layer: DeltaNet, context: Context, qkv: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The mixer's own q, k, v, beta, and the L2 norm, if it has one, which the mixer leaves to the kernel."""
    q, k, v = layer._features(qkv, context, None)
    if layer.options.qk_norm == "l2":
        q, k = l2_normalize(q), l2_normalize(k)
    return q, k, v, layer.beta(beta)


@contextmanager
def convolution(impl: str) -> Iterator[None]:
    """Within it the layers convolve by that implementation."""
    with patch.object(feature_maps, "short_convolution", partial(short_convolution, impl=impl)):
        yield


def mix(layer: DeltaNet, context: Context, qk_l2norm: bool, *projected: Tensor) -> tuple[Tensor]:
    """The features and the delta rule."""
    q, k, v, beta = features(layer, context, *projected)
    return (chunk_delta_rule(q, k, v, beta, cu_seqlens=context.cu_seqlens, qk_l2norm=qk_l2norm)[0],)


def fla_features(weights: list[Tensor], cu_seqlens: Tensor | None, parts: list[Tensor]) -> tuple[Tensor, ...]:
    """FLA's kernels on q, k, v and the logits of beta, with weights [H D, K] of each."""
    convolve = import_module("fla.modules.causal_conv1d").causal_conv1d
    normalize = import_module("fla.modules.norm.l2norm").l2norm
    *qkv, beta = parts
    q, k, v = (
        convolve(x, weight=weight, activation="silu", cu_seqlens=cu_seqlens)[0].unflatten(-1, (HEADS, HEAD_DIM))
        for x, weight in zip(qkv, weights, strict=True)
    )
    return normalize(q), normalize(k), v, beta.float().sigmoid()


def from_qkv(weights: list[Tensor], cu_seqlens: Tensor | None, qkv: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
    """`fla_features` of one product for q, k and v, whose backward has to join three gradients."""
    return fla_features(weights, cu_seqlens, [*qkv.split([HEADS * HEAD_DIM] * 3, -1), beta])


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """By Inductor, in one graph, for these shapes alone."""
    torch.compiler.reset()  # else the variants, which share their code, are recompiled for dynamic shapes
    return torch.compile(function, fullgraph=True, dynamic=False)


def forward(call: Call) -> tuple[Tensor, ...]:
    """Without gradients."""
    with torch.no_grad():
        return call()


def forward_backward(call: Call, leaves: list[Tensor], gradients: list[Tensor]) -> tuple[Tensor, ...]:
    """The gradients of the leaves."""
    return torch.autograd.grad(call(), leaves, gradients)


def times(call: Call, leaves: list[Tensor], gradients: list[Tensor], floors: dict[str, int]) -> dict[str, Any]:
    """Milliseconds of a call, the host included, and of its CUDA graph; terabytes of the floor a second."""
    steps = {"forward": partial(forward, call), "forward_backward": partial(forward_backward, call, leaves, gradients)}
    found: dict[str, Any] = {}
    for name, step in steps.items():
        row: dict[str, Any] = dict(zip(("ms", "p20_ms", "p80_ms"), map(rounded, call_ms(step)), strict=True))
        replayed = graph_ms(step)
        row["gpu_ms"] = None if replayed is None else rounded(replayed[0])
        if floors:
            row["floor_bytes"] = floors[name]
            for kind in ("", "gpu_"):
                elapsed = row[f"{kind}ms"]
                row[f"{kind}tb_per_s"] = None if elapsed is None else rounded(floors[name] / elapsed / 1e9)
        found[name] = row
    return found


def show_times(label: str, found: dict[str, Any]) -> None:
    """A line of the table for each step."""
    for name, row in found.items():
        cells = [row.get(key) for key in ("ms", "gpu_ms", "tb_per_s", "gpu_tb_per_s")]
        show(label, name.replace("_backward", "+bwd"), *cells)


def require_close(
    label: str, actual: list[Tensor], expected: list[Tensor], names: list[str]
) -> dict[str, float | None]:
    """The relative errors.

    Raises:
        RuntimeError: one is above the tolerance, or not a number.
    """
    errors = relative_errors(dict(zip(names, actual, strict=True)), dict(zip(names, expected, strict=True)))
    if not all(error is not None and error < TOLERANCE for error in errors.values()):
        raise RuntimeError(f"{label}: relative errors above {TOLERANCE}: {errors}")
    return errors


def normalized(call: Call) -> Call:
    """The call, then the L2 norm of q and k, for checking a variant that leaves it to the kernel."""

    def finished() -> tuple[Tensor, ...]:
        q, k, *rest = call()
        return l2_normalize(q), l2_normalize(k), *rest

    return finished


def float32_reference(case: Case) -> list[Tensor]:
    """The layer in eager float32: q, k, v, beta, and the gradients of the projection and the weight."""
    layer = deepcopy(case.layers["l2"]).float()
    projected = [x.detach().float().requires_grad_() for x in case.projected]
    outputs = features(layer, case.context, *projected)
    found = torch.autograd.grad(outputs, [*projected, taps(layer)], [x.float() for x in case.gradients])
    return [*(x.detach() for x in outputs), *found]


def run_front(case: Case) -> dict[str, Any]:
    """Each variant of what stands in front of the rule: checked against float32, then timed."""
    expected = float32_reference(case)
    names = ["q", "k", "v", "beta", "dqkv", "dlogits", "dweight"]
    result: dict[str, Any] = {}

    def add(label: str, call: Call, leaves: list[Tensor], check: Call) -> None:
        actual = [*forward(check), *join(forward_backward(check, leaves, case.gradients))]
        found = times(call, leaves, case.gradients, case.floors)
        show_times(label, found)
        result[label] = found | {"errors": require_close(label, actual, expected, names)}

    variants = {
        "inductor": ("torch", "l2", compiled),
        "inductor_without_norm": ("torch", "none", compiled),
        "triton": ("triton", "l2", compiled),
        "triton_without_norm": ("triton", "none", compiled),
        "eager": ("torch", "l2", lambda f: f),
        "eager_triton": ("triton", "l2", lambda f: f),
    }
    for label, (impl, norm, wrap) in variants.items():
        layer = case.layers[norm]
        call = partial(wrap(partial(features, layer, case.context)), *case.projected)
        check = call if norm == "l2" else normalized(call)
        with convolution(impl):
            add(label, call, [*case.projected, taps(layer)], check)

    for label, call, leaves in fla_variants(case):
        add(label, call, leaves, call)
    return result


def fla_variants(case: Case) -> list[tuple[str, Call, list[Tensor]]]:
    """FLA's kernels behind the fused projection, and on inputs of their own, as its layer has three projections."""
    try:
        import_module("fla.modules.causal_conv1d")
    except ImportError:
        return []
    thirds = taps(case.layers["l2"]).detach().flip(0).T.split(HEADS * HEAD_DIM)
    weights = [weight.contiguous().requires_grad_() for weight in thirds]
    cu_seqlens = None if case.cu_seqlens is None else case.cu_seqlens.long()
    qkv, beta = (x.detach() for x in case.projected)
    parts = [x.contiguous().requires_grad_() for x in (*qkv.split([HEADS * HEAD_DIM] * 3, -1), beta)]
    return [
        ("fla", partial(from_qkv, weights, cu_seqlens, *case.projected), [*case.projected, *weights]),
        ("fla_three_projections", partial(fla_features, weights, cu_seqlens, parts), [*parts, *weights]),
    ]


def join(gradients: tuple[Tensor, ...]) -> list[Tensor]:
    """Those of qkv or its parts, of the logits, and of the weight or FLA's three, as the layer has them."""
    if len(gradients) == 3:
        return list(gradients)
    *parts, logits = gradients[:-3]
    return [torch.cat(parts, -1), logits, torch.cat(gradients[-3:]).T.flip(0)]


def run_mixer(case: Case) -> dict[str, Any]:
    """The features and the rule compiled together, the norm in front of the kernel and inside it."""
    gradient = [case.gradients[2]]
    found: dict[str, list[Tensor]] = {}
    result: dict[str, Any] = {}
    variants = {"norm_in_front": ("torch", "l2"), "norm_in_kernel": ("torch", "none"), "triton": ("triton", "none")}
    for label, (impl, norm) in variants.items():
        layer = case.layers[norm]
        call = partial(compiled(partial(mix, layer, case.context, norm == "none")), *case.projected)
        leaves = [*case.projected, taps(layer)]
        with convolution(impl):
            found[label] = [*forward(call), *forward_backward(call, leaves, gradient)]
            result[label] = times(call, leaves, gradient, {})
        show_times(f"with the rule, {label}", result[label])
    names = ["o", "dqkv", "dlogits", "dweight"]
    expected = found.pop("norm_in_front")
    result["differences"] = {
        label: require_close(f"{label} against the norm in front", actual, expected, names)
        for label, actual in found.items()
    }
    return result


def measure(name: str) -> dict[str, Any]:
    """The features alone, and with the rule."""
    case = Case(name)
    show("", "", "ms", "GPU ms", "TB/s", "GPU TB/s")
    documents = None if case.cu_seqlens is None else len(case.cu_seqlens) - 1
    result = {"B": case.batch, "T": case.length, "documents": documents, "front": run_front(case)}
    return result | {"with_rule": run_mixer(case)}


def main() -> None:
    """Measure what the command line asks for."""
    benchmark = Benchmark(
        name="feature_maps",
        kind="case",
        parts={name: Part("B {} T {}".format(*shape), partial(measure, name)) for name, shape in SHAPES.items()},
        fla_module="fla.modules.causal_conv1d",
        settings={"width": WIDTH, "H": HEADS, "D": HEAD_DIM, "dtype": "bfloat16"},
    )
    args = benchmark.parse_args(benchmark.make_parser((__doc__ or "").partition("\n")[0], out="the JSON"))
    benchmark.run(args.parts, args.out)


if __name__ == "__main__":
    main()
