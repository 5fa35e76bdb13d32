"""What `delta_rule_gpu.py` calls: the rule of both sides, its inputs and steps, and a reference in float64.

Both sides get the same tensors, beta in bf16 too, and normalise q and k themselves.

Shapes: B batch, T tokens, H heads, D head dimension of keys and values.
"""

import math
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from harness import DEVICE, ratios, relative_errors
from zoo.kernels.delta_rule import chunk_delta_rule

CHUNK = 64

Inputs = dict[str, Tensor]
"""A rule's arguments by name: q, k, v, beta, and g and initial_state where there are any."""
Rule = Callable[..., tuple[Tensor, Tensor | None]]


def rules(ours: Rule, operation: str, name: str) -> dict[str, Rule]:
    """Ours, and FLA's function of that operation where FLA can be imported."""
    both: dict[str, Rule] = {"ours": partial(ours, qk_l2norm=True)}
    try:
        theirs = getattr(import_module(f"fla.ops.{operation}"), name)
    except ImportError:
        return both

    def fla(**inputs: Tensor) -> tuple[Tensor, Tensor | None]:
        return theirs(**inputs, output_final_state="initial_state" in inputs, use_qk_l2norm_in_kernel=True)

    return both | {"fla": fla}


def chunk_rules(*, gated: bool = False) -> dict[str, Rule]:
    """The chunked rule of both."""
    operation = "gated_delta_rule" if gated else "delta_rule"
    return rules(chunk_delta_rule, operation, f"chunk_{operation}")


def make_inputs(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, *, gated: bool = False) -> Inputs:
    """Normal q, k, v; beta in (0, 1); g a log sigmoid near -0.07."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    draw = partial(torch.randn, generator=generator, device=DEVICE)
    inputs = {name: draw(shape, dtype=dtype) for name in "qkv"}
    inputs["beta"] = torch.rand(shape[:3], generator=generator, device=DEVICE, dtype=dtype)
    if gated:
        inputs["g"] = F.logsigmoid(3 + draw(shape[:3]))
    return {name: x.requires_grad_() for name, x in inputs.items()}


def make_stateful(shape: tuple[int, ...], keys: str, beta: float | None, dtype: torch.dtype = torch.bfloat16) -> Inputs:
    """Hard inputs with an initial state: keys "random", "similar" (cosine 0.99) or "zero"; beta in (0, 2) if None."""
    inputs = {name: x.detach() for name, x in make_inputs(shape, dtype).items()}
    generator = torch.Generator(DEVICE).manual_seed(1)
    draw = partial(torch.randn, generator=generator, device=DEVICE)
    if keys == "similar":
        shared = F.normalize(draw(shape[2:]), dim=-1) * shape[3] ** 0.5
        inputs["k"] = (shared + (1 / 0.99 - 1) ** 0.5 * inputs["k"]).to(dtype)
        cosine = F.cosine_similarity(inputs["k"][:, 1:].float(), inputs["k"][:, :-1].float(), dim=-1).mean().item()
        if abs(cosine - 0.99) > 0.002:
            raise RuntimeError(f"keys meant to have cosine 0.99 have {cosine}")
    elif keys == "zero":
        inputs["k"] = torch.zeros_like(inputs["k"])
    inputs["beta"] = 2 * inputs["beta"] if beta is None else torch.full_like(inputs["beta"], beta)
    inputs["initial_state"] = draw(shape[0], shape[2], shape[3], shape[3])
    return {name: x.requires_grad_() for name, x in inputs.items()}


def make_gradients(inputs: Inputs) -> list[Tensor]:
    """The gradient that comes back through o, and through the final state where there is an initial one."""
    generator = torch.Generator(DEVICE).manual_seed(2)
    results = [x for name, x in inputs.items() if name in ("v", "initial_state")]
    return [torch.randn(x.shape, generator=generator, device=DEVICE, dtype=x.dtype) for x in results]


def forward(rule: Rule, inputs: Inputs, _: list[Tensor]) -> Any:
    """Without gradients, as in prefill."""
    with torch.no_grad():
        return rule(**inputs)


def forward_backward(rule: Rule, inputs: Inputs, gradients: list[Tensor]) -> dict[str, Tensor]:
    """The results that have an upstream gradient, and the gradient of every input, by name."""
    results = rule(**inputs)[: len(gradients)]
    found = torch.autograd.grad([x for x in results if x is not None], list(inputs.values()), gradients)
    named = dict(zip(("o", "final_state"), (x.detach() for x in results if x is not None), strict=False))
    return named | {f"d{name}": x for name, x in zip(inputs, found, strict=True)}


STEPS = {"forward": forward, "forward_backward": forward_backward}


def reference(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None = None, initial_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The rule by chunks, q and k normalised, in the dtype of its inputs; the gradients are autograd's own."""
    g = torch.zeros_like(beta) if g is None else g
    q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3]) if initial_state is None else initial_state
    outputs = []
    chunks = ((x if x.ndim == 4 else x[..., None]).transpose(1, 2).split(CHUNK, 2) for x in (q, k, v, beta, g))
    for q_c, k_c, v_c, beta_c, g_c in zip(*chunks, strict=True):
        decay = g_c.cumsum(2)
        above = torch.ones(2 * decay.shape[2:3], dtype=torch.bool, device=q.device).triu(1)
        between = (decay - decay.mT).masked_fill(above, -math.inf).exp()
        system = beta_c * (k_c @ k_c.mT * between).tril(-1) + torch.eye(len(above), dtype=q.dtype, device=q.device)
        written = beta_c * (v_c - decay.exp() * (k_c @ state))
        delta = torch.linalg.solve_triangular(system, written, upper=False)
        outputs.append(decay.exp() * (q_c @ state) + (q_c @ k_c.mT * between) @ delta)
        state = decay[:, :, -1:].exp() * state + (k_c * between[:, :, -1:].mT).mT @ delta
    return torch.cat(outputs, 2).transpose(1, 2) * q.shape[-1] ** -0.5, state


def compare(both: dict[str, Rule], inputs: Inputs, gradients: list[Tensor], rows: int | None = None) -> dict[str, Any]:
    """The errors of each side, of the first rows of the batch, against the reference in float64; and their ratios."""
    exact = forward_backward(
        reference,
        {name: x.detach()[:rows].double().requires_grad_() for name, x in inputs.items()},
        [x[:rows].double() for x in gradients],
    )
    errors: dict[str, Any] = {}
    for side, rule in both.items():
        found = {name: x[:rows] for name, x in forward_backward(rule, inputs, gradients).items()}
        errors[side] = relative_errors(found, exact)
    if "fla" in errors:
        over = ratios(errors["ours"], errors["fla"])
        errors["ours_over_fla"] = {name: ratio for name, ratio in over.items() if ratio is not None}
    return errors
