"""Deltaformer's own: each option, the layer written out, and what it reduces to.

Shapes: B batch, T sequence length, D model width, H query heads, G key/value heads, H_u heads of u, d head dim.
"""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import zoo
from zoo import ZooConfigError, components
from zoo.kernels.delta_rule.reference import delta_rule_reference
from zoo.kernels.deltaformer import Kappa
from zoo.mixers.context import Context
from zoo.mixers.contract import Mixer, State
from zoo.mixers.deltaformer import Deltaformer, DeltaformerOptions

DIM = 24


def options(dim: int = DIM, **values: Any) -> DeltaformerOptions:
    return cast(DeltaformerOptions, components.resolve("mixer", {"name": "deltaformer"} | values, dim).options)


def make(name: str, **values: Any) -> Mixer:
    """With every parameter away from its first value, so that a norm of ones hides nothing."""
    layer = cast(Mixer, components.make("mixer", components.resolve("mixer", {"name": name} | values, DIM), DIM))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return layer


def deltaformer(**values: Any) -> Deltaformer:
    return cast(Deltaformer, make("deltaformer", **values))


def mix(layer: Mixer, x: Tensor) -> Tensor:
    return layer(x, Context.from_tokens(x[..., 0]).share(layer.shared))[0]


def in_pieces(layer: Mixer, x: Tensor, length: int) -> tuple[Tensor, State]:
    state, ys = layer.init_state(x.shape[0], x.shape[1], x.device, x.dtype), []
    for start in range(0, x.shape[1], length):
        piece = x[:, start : start + length]
        context = Context.from_state(piece[..., 0], torch.full(x.shape[:1], start), x.shape[1]).share(layer.shared)
        y, state = layer(piece, context, state)
        ys.append(y)
    return torch.cat(ys, 1), state


def projections(layer: Deltaformer) -> list[Tensor]:
    """The rows of the fused projection that make q, k, v, w, alpha and beta."""
    return list(layer.in_proj.weight.split([*layer.compared_widths, *layer.widths[1:]]))


def assert_same(layer: Mixer, other: Mixer, x: Tensor, *, parameters: bool = False) -> None:
    """Outputs, the gradients of x and, if wanted, those of the parameters."""
    results, weights = [], torch.randn_like(x)
    for mixer in (layer, other):
        given = x.clone().requires_grad_()
        y = mix(mixer, given)
        sources = [given, *(mixer.parameters() if parameters else ())]
        results.append([y, *torch.autograd.grad((y * weights).sum(), sources)])
    for actual, expected in zip(*results, strict=True):
        assert expected.any()
        assert (actual - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("compare", ["kk", "qk"])
@pytest.mark.parametrize("num_kv_heads", [1, 4])
@pytest.mark.parametrize("rope", [True, False])
@pytest.mark.parametrize("qk_norm", ["none", "rms", "l2"])
def test_zero_beta_is_full_attention(qk_norm: str, rope: bool, num_kv_heads: int, compare: str) -> None:
    shared = {"num_heads": 4, "num_kv_heads": num_kv_heads, "qk_norm": qk_norm, "rope": rope}
    layer, attention = deltaformer(alpha=1, beta=0, compare=compare, **shared), make("full_attention", **shared)
    attention.load_state_dict(layer.state_dict())
    assert_same(layer, attention, torch.randn(2, 70, DIM), parameters=True)


def test_linear_kernels_with_alpha_equal_to_beta_are_the_delta_rule() -> None:
    kernels = {"kappa1": "linear", "kappa2": "linear", "alpha": "sigmoid", "beta": "sigmoid"}
    layer, x = deltaformer(num_heads=2, rope=False, **kernels).double(), torch.randn(2, 70, DIM).double()
    q, k, v, _, alpha, beta = (rows.detach() for rows in projections(layer))
    alpha.copy_(beta)
    q, k, v = ((x @ weight.t()).unflatten(-1, (2, 12)) for weight in (q, k, v))
    q, k = (y * (y.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for y in (q, k))
    o, _ = delta_rule_reference(q, k, v, (x @ beta.t()).sigmoid(), scale=1.0)
    torch.testing.assert_close(mix(layer, x), o.flatten(-2) @ layer.out_proj.weight.t())


@pytest.mark.parametrize("kappa1", ["softmax", "relu"])
@pytest.mark.parametrize("num_kv_heads", [2, 4])
def test_a_projection_equal_to_that_of_the_keys_compares_keys(num_kv_heads: int, kappa1: str) -> None:
    shared = {"num_heads": 4, "num_kv_heads": num_kv_heads, "kappa1": kappa1, "conv_size": 3, "conv_bias": True}
    own, keys = deltaformer(compare="wk", **shared), deltaformer(compare="kk", **shared)
    weights = own.state_dict()
    q, k, v, w, *strengths = (rows.detach() for rows in projections(own))
    w.copy_(k)
    for name in ("conv.weight", "conv.bias"):
        taps = weights[name].split(own.compared_widths, -1)
        taps[3].copy_(taps[1])
        weights[name] = torch.cat(taps[:3], -1)
    if "w_norm.weight" in weights:
        weights.pop("w_norm.weight").copy_(weights["k_norm.weight"])
    keys.load_state_dict(weights | {"in_proj.weight": torch.cat([q, k, v, *strengths])})
    assert_same(own, keys, torch.randn(2, 70, DIM))


@pytest.mark.parametrize("kappa1", ["softmax", "relu"])
def test_queries_equal_to_the_keys_compare_keys(kappa1: str) -> None:
    queries = deltaformer(num_heads=4, compare="qk", kappa1=kappa1)
    keys = deltaformer(num_heads=4, compare="kk", kappa1=kappa1)
    q, k, *_ = (rows.detach() for rows in projections(queries))
    q.copy_(k)
    queries.q_norm.load_state_dict(queries.k_norm.state_dict())
    keys.load_state_dict(queries.state_dict())
    assert_same(queries, keys, torch.randn(2, 70, DIM))


def test_what_is_compared_makes_a_difference() -> None:
    layers = [deltaformer(num_heads=4, compare=compare) for compare in ("kk", "qk")]
    layers[1].load_state_dict(layers[0].state_dict())
    x = torch.randn(1, 9, DIM)
    assert not torch.allclose(mix(layers[0], x), mix(layers[1], x), atol=1e-3)


@pytest.mark.parametrize("kappa2", ["softmax", "linear"])
@pytest.mark.parametrize("num_kv_heads", [1, 2])
@pytest.mark.parametrize("compare", ["kk", "wk", "qk"])
def test_grouped_heads_equal_repeated_ones(compare: str, num_kv_heads: int, kappa2: str) -> None:
    values = {"num_heads": 4, "compare": compare, "kappa2": kappa2, "alpha": "sigmoid", "beta": "2sigmoid"}
    grouped, full = deltaformer(num_kv_heads=num_kv_heads, **values), deltaformer(**values)
    q, *rest = projections(grouped)
    heads = [num_kv_heads] * 3 + [grouped.write_heads] * 2
    repeated = [
        rows.unflatten(0, (count, -1)).repeat_interleave(4 // count, 0).flatten(0, 1)
        for rows, count in zip(rest, heads, strict=True)
    ]
    full.load_state_dict(grouped.state_dict() | {"in_proj.weight": torch.cat([q, *repeated])})
    assert_same(grouped, full, torch.randn(2, 70, DIM))


@torch.no_grad()
@pytest.mark.parametrize(("compare", "write_heads"), [("kk", 2), ("wk", 2), ("qk", 4)])
def test_writes_once_for_each_key_head_unless_queries_are_compared(compare: str, write_heads: int) -> None:
    layer = deltaformer(num_heads=4, num_kv_heads=2, compare=compare, alpha="sigmoid", beta="sigmoid")
    _, state = in_pieces(layer, torch.randn(3, 5, DIM), 2)
    assert {name: value.shape for name, value in state.items()} == {"keys": (3, 5, 2, 6), "u": (3, 5, write_heads, 6)}
    assert [rows.shape[0] for rows in projections(layer)[4:]] == [write_heads, write_heads]


@pytest.mark.parametrize(
    ("strengths", "logits"),
    [
        ({}, [0, 2]),
        ({"alpha": "sigmoid", "beta": "2sigmoid"}, [2, 2]),
        ({"alpha": "2sigmoid", "beta": 0.5}, [2, 0]),
        ({"alpha": 2, "beta": 0}, [0, 0]),
    ],
)
def test_a_fixed_strength_is_not_projected(strengths: dict[str, Any], logits: list[int]) -> None:
    layer = deltaformer(num_heads=2, **strengths)
    assert [rows.shape[0] for rows in projections(layer)] == [DIM, DIM, DIM, 0, *logits]
    assert layer.in_proj.out_features == 3 * DIM + sum(logits)


@pytest.mark.parametrize(("beta", "bounded"), [("sigmoid", True), ("2sigmoid", False), (1.0, True), (1.5, False)])
def test_the_write_is_told_of_bounds(beta: float | str, bounded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(
        "zoo.mixers.deltaformer.deltaformer_write", lambda *args, **options: given.update(options) or args[2]
    )
    mix(deltaformer(num_heads=2, beta=beta), torch.randn(2, 7, DIM))
    assert given["bounded"] is bounded


def softmax(x: Tensor, seen: Tensor, _: int) -> Tensor:
    weights = x.exp() * seen
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-30)


def nearest(x: Tensor, seen: Tensor, decimals: int) -> Tensor:
    return (x + ((x * 10**decimals).round() / 10**decimals - x).detach()) * seen


KERNELS: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "softmax": softmax,
    "linear": lambda x, seen, _: x * seen,
    "relu": lambda x, seen, _: x.clamp(min=0) * seen,
    "exp": lambda x, seen, _: x.exp() * seen,
    "round": nearest,
}
CHOICES = [(a, b, places) for a in KERNELS for b in KERNELS for places in (0, 2) if not places or "round" in (a, b)]


def normalise(x: Tensor, kind: str, weight: Tensor | None) -> Tensor:
    if kind == "none":
        return x
    if kind == "l2":
        return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    assert weight is not None
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def written_out(layer: Deltaformer, x: Tensor, kappas: tuple[str, str, int], compare: str, qk_norm: str) -> Tensor:
    """U = (I + diag(beta) A)^-1 diag(alpha) V and O = P U, by dense matrices [B, H, T, T]; alpha and beta learned."""
    kappa1, kappa2, decimals = kappas
    q, k, v, w, alpha, beta = (x @ rows.t() for rows in projections(layer))
    q, k, v, w = (part.unflatten(-1, (-1, layer.head_dim)).transpose(1, 2) for part in (q, k, v, w))
    norms = [dict(layer.named_parameters()).get(f"{name}_norm.weight") for name in "qkw"]
    q, k = normalise(q, qk_norm, norms[0]), normalise(k, qk_norm, norms[1])
    w = {"kk": k, "qk": q}[compare] if compare != "wk" else normalise(w, qk_norm, norms[2])
    alpha, beta = alpha.sigmoid().mT[..., None], 2 * beta.sigmoid().mT[..., None]

    def weigh(kappa: str, rows: Tensor, seen: Tensor) -> Tensor:
        keys = k.repeat_interleave(rows.shape[1] // k.shape[1], 1)
        scale = 1.0 if kappa != "softmax" else layer.head_dim ** (0.5 if qk_norm == "l2" else -0.5)
        return KERNELS[kappa](scale * rows @ keys.mT, seen, decimals)

    seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    a = beta * weigh(kappa1, w, seen.tril(-1))
    written = alpha * v.repeat_interleave(w.shape[1] // v.shape[1], 1)
    u = torch.linalg.solve_triangular(torch.eye(x.shape[1]).to(a) + a, written, upper=False, unitriangular=True)
    o = weigh(kappa2, q, seen) @ u.repeat_interleave(q.shape[1] // u.shape[1], 1)
    return o.transpose(1, 2).flatten(-2) @ layer.out_proj.weight.t()


@pytest.mark.parametrize("qk_norm", ["none", "rms", "l2"])
@pytest.mark.parametrize("compare", ["kk", "qk", "wk"])
@pytest.mark.parametrize("kappas", CHOICES, ids=str)
def test_equals_the_layer_written_out(kappas: tuple[str, str, int], compare: str, qk_norm: str) -> None:
    """Each token's output on its own scale, for without normalisation u grows; and all gradients."""
    choices = dict(zip(("kappa1", "kappa2", "round_decimals"), kappas, strict=True)) | {"qk_norm": qk_norm}
    strengths = {"alpha": "sigmoid", "beta": "2sigmoid", "rope": False}
    layer = deltaformer(num_heads=4, num_kv_heads=2, compare=compare, **choices, **strengths).double()
    x, weights = torch.randn(2, 2, 67, DIM).double()
    x.requires_grad_()
    y, expected = mix(layer, x), written_out(layer, x, kappas, compare, qk_norm)
    assert ((y - expected).norm(dim=-1) <= 1e-9 * expected.norm(dim=-1)).all()
    gradients = [torch.autograd.grad((o * weights).sum(), [x, *layer.parameters()]) for o in (y, expected)]
    for actual, gradient in zip(*gradients, strict=True):
        assert gradient.any()
        assert (actual - gradient).norm() <= 1e-9 * gradient.norm()


@pytest.mark.parametrize(
    ("values", "qk_norm"),
    [
        ({}, "rms"),
        ({"kappa1": "softmax", "kappa2": "linear"}, "rms"),
        *(({"kappa1": kappa1}, "l2") for kappa1 in ("linear", "relu", "exp", "round")),
        ({"qk_norm": "l2"}, "l2"),
        ({"qk_norm": "none"}, "none"),
        ({"kappa1": "linear", "qk_norm": "rms"}, "rms"),
        ({"kappa1": "linear", "qk_norm": "none"}, "none"),
    ],
)
def test_the_norm_follows_the_kernel_of_the_write_unless_given(values: dict[str, Any], qk_norm: str) -> None:
    resolved = options(**values)
    assert resolved.qk_norm == qk_norm
    assert resolved.resolve(DIM) == resolved


@pytest.mark.parametrize(("qk_norm", "scale"), [("none", 1 / 4), ("rms", 1 / 4), ("l2", 4.0)])
def test_logits_of_softmax_alone_are_scaled(qk_norm: str, scale: float) -> None:
    resolved = options(num_heads=2, head_dim=16, qk_norm=qk_norm)
    others: list[Kappa] = ["linear", "relu", "exp", "round"]
    assert resolved.logit_scale("softmax") == (scale,)
    assert {resolved.logit_scale(kappa) for kappa in others} == {(1.0,)}


def test_write_and_read_have_a_scale_each() -> None:
    layer = deltaformer(num_heads=1, head_dim=16, kappa1="linear", kappa2="softmax")
    assert (layer.writing.scale, layer.reading.scale) == ((1.0,), (4.0,))


@pytest.mark.parametrize("decimals", [0, 2])
def test_round_lets_gradients_through(decimals: int) -> None:
    layer = deltaformer(num_heads=2, kappa1="round", kappa2="round", round_decimals=decimals, compare="wk")
    (gradient,) = torch.autograd.grad(mix(layer, torch.randn(2, 70, DIM)).square().sum(), [layer.in_proj.weight])
    assert torch.isfinite(gradient).all()
    assert all(rows.any(1).all() for rows in gradient.split(layer.compared_widths + layer.widths[2:]))


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 3, 20])
@pytest.mark.parametrize("decimals", [0, 2])
def test_round_decodes_what_it_computes_at_once(decimals: int, length: int) -> None:
    """On a grid of eighths every logit is exact, however it is summed, so that none is rounded to another value."""
    kernels = {"kappa1": "round", "kappa2": "round", "round_decimals": decimals, "qk_norm": "none", "rope": False}
    layer, x = deltaformer(num_heads=3, beta=0.5, compare="qk", **kernels), torch.randint(-1, 2, (2, 70, DIM)).float()
    layer.in_proj.weight.copy_(torch.randint(-1, 2, layer.in_proj.weight.shape) / 8)
    together, (apart, _) = mix(layer, x), in_pieces(layer, x, length)
    assert ((apart - together).norm(dim=-1) <= 1e-4 * together.norm(dim=-1)).all()


@pytest.mark.parametrize("length", [1, 10, 64, 1000])
@pytest.mark.parametrize(("compare", "write_heads", "widths"), [("kk", 2, 128), ("wk", 2, 160), ("qk", 4, 128)])
def test_counts_the_work_of_the_paper(compare: str, write_heads: int, widths: int, length: int) -> None:
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    resolved = options(compare=compare, alpha="sigmoid", beta="sigmoid", conv_size=4, **heads)
    chunk = min(64, length)
    write = write_heads * (2 * length * 16 + 4 * chunk * 16 + 0.7 * chunk**2)
    projected = 2 * DIM * (widths + 2 * write_heads + 64) + 2 * 4 * widths
    assert resolved.flops_per_token(DIM, length) == pytest.approx(projected + write + 4 * 2 * length * 16)


@pytest.mark.parametrize(("compare", "write_heads", "widths"), [("kk", 2, 128), ("wk", 2, 160), ("qk", 4, 128)])
def test_the_state_holds_keys_u_and_taps(compare: str, write_heads: int, widths: int) -> None:
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    plain, convolved = (options(compare=compare, conv_size=size, **heads) for size in (0, 4))
    past = (2 + write_heads) * 16 * 100
    assert plain.state_bytes(DIM, 100) == 2 * past
    assert plain.state_bytes(DIM, 100, torch.float32) == 4 * past
    assert convolved.state_bytes(DIM, 100) == 2 * (past + 4 * widths)


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"kappa1": "cosine"}, r"kappa1.*'cosine'.*'softmax', 'linear', 'relu', 'exp', 'round'"),
        ({"kappa2": "sigmoid"}, r"kappa2.*'sigmoid'.*'softmax', 'linear', 'relu', 'exp', 'round'"),
        ({"compare": "qq"}, r"compare.*'qq'.*'kk', 'qk', 'wk'"),
        ({"alpha": -0.1}, r"alpha.*-0\.1.*'sigmoid', '2sigmoid' or a number between 0 and 2"),
        ({"beta": 2.5}, r"beta.*2\.5.*'sigmoid', '2sigmoid' or a number between 0 and 2"),
        ({"beta": "tanh"}, r"beta.*'tanh'.*'sigmoid', '2sigmoid' or a number between 0 and 2"),
        ({"kappa1": "round", "round_decimals": 1}, r"round_decimals.*1.*0, 2"),
        ({"round_decimals": 2}, r"round_decimals.*2.*0 where neither kappa1 nor kappa2 is round"),
        ({"qk_norm": "l1"}, r"qk_norm.*'l1'.*'rms', 'l2', 'none'"),
        ({"conv_bias": True}, r"conv_bias.*True.*false where conv_size is 0"),
        ({"conv_size": 65}, r"conv_size.*65.*between 0 and 64"),
        ({"num_heads": 4, "num_kv_heads": 3}, r"num_kv_heads.*3.*a divisor of num_heads = 4"),
        ({"head_dim": 7}, r"head_dim.*7.*an even number, or rope: false"),
    ],
)
def test_bad_options_are_named(values: dict[str, Any], match: str) -> None:
    with pytest.raises(ZooConfigError, match=match):
        options(**values)
    with pytest.raises(ZooConfigError, match=match):
        zoo.build(
            {"vocab_size": 8, "dim": DIM, "num_layers": 1, "layers": [{"mixer": {"name": "deltaformer"} | values}]}
        )
