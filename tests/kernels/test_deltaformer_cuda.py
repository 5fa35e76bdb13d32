"""The write of the Deltaformer in PyTorch on a CUDA device: equal to float64 on the CPU.

Shapes: B batch, T tokens, S tokens of a prefix, H heads of w, G key/value heads, D and D_v their sizes, N documents.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.kernels.deltaformer import deltaformer_write

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

B, H, G, D, D_V = 2, 4, 2, 48, 80
KERNELS = [("softmax", 0), ("linear", 0), ("relu", 0), ("exp", 0), ("round", 0), ("round", 2)]
FORMS = ("dense", "packed", "prefix")


def make_inputs(seq_len: int, form: str) -> dict[str, Tensor]:
    """Float64 on the CPU; keys and w unit vectors, or for exact rounding in float32 on a grid of 1/16."""
    generator = torch.Generator().manual_seed(seq_len)
    batch, prefix = 1 if form == "packed" else B, 37 if form == "prefix" else 0

    def unit(*shape: int) -> Tensor:
        x = F.normalize(torch.randn(*shape, dtype=torch.float64, generator=generator), dim=-1)
        return (16 * x).round() / 16

    inputs = {
        "w": unit(batch, seq_len, H, D),
        "k": unit(batch, seq_len, G, D),
        "v": torch.randn(batch, seq_len, G, D_V, dtype=torch.float64, generator=generator),
        "alpha": torch.rand(batch, seq_len, H, dtype=torch.float64, generator=generator),
        "beta": torch.rand(batch, seq_len, H, dtype=torch.float64, generator=generator),
    }
    if form == "prefix":
        inputs["prefix_k"] = unit(batch, prefix, G, D)
        inputs["prefix_u"] = torch.randn(batch, prefix, H, D_V, dtype=torch.float64, generator=generator)
        inputs["prefix_lengths"] = torch.tensor([prefix, 5])
    if form == "packed":
        inputs["cu_seqlens"] = torch.tensor([0, 1, 1, (seq_len + 1) // 2, seq_len], dtype=torch.int32)
    return inputs


def results(inputs: dict[str, Tensor], device: str, dtype: torch.dtype, **options: Any) -> list[Tensor]:
    """u and the gradients of all floating-point inputs, in PyTorch, back on the CPU in float64."""
    given = {
        name: x.to(device, dtype).requires_grad_() if x.is_floating_point() else x.to(device)
        for name, x in inputs.items()
    }
    u = deltaformer_write(**given, **options, impl="torch")
    generator = torch.Generator().manual_seed(0)
    upstream = torch.randn(u.shape, dtype=torch.float64, generator=generator).to(u)
    leaves = [x for x in given.values() if x.requires_grad]
    return [x.detach().double().cpu() for x in (u, *torch.autograd.grad(u, leaves, upstream))]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seq_len", [1, 65, 513, 700])
@pytest.mark.parametrize(("kappa1", "round_decimals"), KERNELS)
def test_float32_equals_float64_on_the_cpu(kappa1: str, round_decimals: int, seq_len: int, form: str) -> None:
    inputs = make_inputs(seq_len, form)
    options = {"kappa1": kappa1, "round_decimals": round_decimals}
    expected = results(inputs, "cpu", torch.float64, **options)
    actual = results(inputs, "cuda", torch.float32, **options)
    for y, x in zip(expected, actual, strict=True):
        assert (x - y).norm() <= 1e-5 * y.norm().clamp_min(1e-3)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kappa1", ["softmax", "linear"])
def test_bfloat16_rounds_only_inputs_and_outputs(kappa1: str, form: str) -> None:
    rounded = {
        name: x.bfloat16().double() if x.is_floating_point() else x for name, x in make_inputs(300, form).items()
    }
    expected = results(rounded, "cpu", torch.float64, kappa1=kappa1)
    actual = results(rounded, "cuda", torch.bfloat16, kappa1=kappa1)
    for y, x in zip(expected, actual, strict=True):
        assert (x - y).norm() <= 1e-2 * y.norm()


@pytest.mark.parametrize("form", FORMS)
def test_two_runs_are_bit_identical(form: str) -> None:
    inputs = make_inputs(300, form)
    runs = [results(inputs, "cuda", torch.float32) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("form", FORMS)
def test_sound_as_an_op(form: str) -> None:
    inputs = {
        name: x.to("cuda", torch.float32) if x.is_floating_point() else x.cuda()
        for name, x in make_inputs(67, form).items()
    }
    w, k, v, alpha, beta = (inputs[name].requires_grad_() for name in ("w", "k", "v", "alpha", "beta"))
    prefix_k = inputs.get("prefix_k", k[:, :0])
    prefix_u = inputs.get("prefix_u", v.new_empty(v.shape[0], 0, H, D_V))
    hidden = inputs.get("prefix_lengths"), inputs.get("cu_seqlens")
    keys = torch.cat([prefix_k, k], 1)
    torch.library.opcheck(
        torch.ops.zoo.deltaformer_write_torch.default,
        (w, keys, v, alpha, beta, prefix_u, *hidden, "softmax", 0, 0.1),
    )
