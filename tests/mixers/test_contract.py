"""What every registered mixer keeps, whatever its options; a new entry of the registry gets all of it.

Shapes: B batch, T sequence length, D model width.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import zoo
from zoo import ZooConfigError, components, registry
from zoo.mixers.context import Context
from zoo.mixers.contract import Mixer, State
from zoo.mixers.feature_maps import precise
from zoo.mixers.options import Options

DIM = 48
MAX_LENGTH = 140
PIECES = (5, 1, 2, 64, 0, 3, 37, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningMeanOptions(Options):
    def num_params(self, dim: int) -> int:
        return dim * dim

    def flops_per_token(self, dim: int, length: int) -> float:
        return 2 * dim * dim

    def state_bytes(self, dim: int, length: int, dtype: torch.dtype = torch.bfloat16) -> int:
        return 4 * dim


@zoo.register_mixer("running_mean", supports=("packed", "decode", "constant_state"))
class RunningMean(Mixer):
    """The mean of all tokens so far: an example of a mixer that somebody adds."""

    Config = RunningMeanOptions

    def __init__(self, options: RunningMeanOptions, dim: int) -> None:
        super().__init__()
        self.out_proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, context: Context, state: State | None = None) -> tuple[Tensor, State | None]:
        order = torch.arange(x.shape[1])
        lag = order[:, None] - order
        visible = (lag >= 0) & (lag <= context.positions[..., None])  # the document's own tokens
        total = (visible[..., None] * precise(context.hide_padding(x))[:, None]).sum(2)
        if state is not None:
            total = total + state["total"][:, None]
            state = {"total": torch.empty_like(state["total"]).copy_(total[:, -1])}
        return self.out_proj((total / (context.positions[..., None] + 1)).to(x.dtype)), state

    def init_state(self, batch_size: int, max_length: int, device: torch.device, dtype: torch.dtype) -> State:
        return {"total": torch.zeros(batch_size, self.out_proj.in_features, device=device)}


VARIANTS: dict[str, list[dict[str, Any]]] = {
    "delta_net": [
        {},
        {"num_heads": 1, "head_dim": 80, "conv_size": 1},
        {"num_heads": 4, "num_kv_heads": 2, "head_dim": 10, "expand_k": 0.5, "expand_v": 1.5, "conv_bias": True}
        | {"conv_size": 3, "output_gate": True, "beta": "2sigmoid", "feature_map": "elu1", "qk_norm": "l1"},
        {"num_heads": 2, "head_dim": 5, "conv_size": 0, "beta": 0.5, "feature_map": "identity"},
    ],
    "gated_delta_net": [
        {},
        {"num_heads": 4, "num_kv_heads": 2, "head_dim": 10, "expand_v": 2, "conv_bias": True, "beta": "2sigmoid"},
        {"num_heads": 1, "head_dim": 80, "expand_k": 0.5, "output_gate": False, "feature_map": "elu1", "qk_norm": "l1"},
        {"num_heads": 2, "head_dim": 5, "conv_size": 0, "beta": 0.5},
    ],
    "deltaformer": [
        {},
        {"num_heads": 4, "num_kv_heads": 2, "head_dim": 10, "compare": "wk", "alpha": "sigmoid", "beta": "2sigmoid"}
        | {"conv_size": 3, "conv_bias": True},
        {"num_heads": 4, "num_kv_heads": 2, "compare": "qk", "kappa1": "linear", "kappa2": "relu", "alpha": 0.5},
        {"num_heads": 3, "head_dim": 7, "kappa1": "relu", "rope": False, "conv_size": 2},
        {"num_heads": 2, "kappa1": "exp", "kappa2": "exp", "compare": "qk", "beta": 0.1},
        {"num_heads": 1, "head_dim": 80, "kappa2": "linear", "qk_norm": "none"},
    ],
    "full_attention": [
        {},
        {"num_heads": 4, "num_kv_heads": 1, "head_dim": 10, "qk_norm": "rms"},
        {"num_heads": 3, "head_dim": 7, "qk_norm": "l2", "rope": False, "backend": "reference"},
        {"num_heads": 1, "head_dim": 80, "rope_theta": 100.0},
    ],
    "sliding_window": [
        {},
        {"num_heads": 4, "num_kv_heads": 2, "window": 8},
        {"num_heads": 2, "window": 1},
        {"num_heads": 2, "window": 65, "qk_norm": "rms", "backend": "reference"},
    ],
}


@dataclass(frozen=True)
class Case:
    """A mixer and options for it."""

    entry: registry.Entry
    values: dict[str, Any]

    @property
    def options(self) -> Options:
        return components.resolve("mixer", {"name": self.entry.name} | self.values, DIM).options

    def require(self, capability: str) -> None:
        if capability not in self.entry.supports:
            pytest.skip(f"{self.entry.name} does not support {capability}")

    def build(self, dtype: torch.dtype = torch.float32) -> Mixer:
        """With every parameter away from its first value, so that a zero bias or a norm of ones hides nothing."""
        torch.manual_seed(1)
        mixer = components.make("mixer", components.resolve("mixer", {"name": self.entry.name} | self.values, DIM), DIM)
        with torch.no_grad():
            for parameter in mixer.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        return cast(Mixer, mixer.to(dtype))

    def __str__(self) -> str:
        return "-".join([self.entry.name, *(f"{key}={value}" for key, value in self.values.items())])


CASES = [Case(entry, values) for entry in registry.entries("mixer") for values in VARIANTS.get(entry.name, [{}])]
_EXAMPLE = registry._entries().pop(("mixer", "running_mean"))  # other files' tests see the registry as it is


@pytest.fixture(autouse=True, scope="module")
def example() -> Iterator[None]:
    registry._entries()["mixer", "running_mean"] = _EXAMPLE
    yield
    del registry._entries()["mixer", "running_mean"]


@pytest.fixture(params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


def mix(mixer: Mixer, x: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    return mixer(x, Context.from_tokens(x[..., 0], cu_seqlens).share(mixer.shared))[0]


def step(mixer: Mixer, x: Tensor, state: State, start: int | Tensor, room: int = MAX_LENGTH) -> tuple[Tensor, State]:
    start = torch.as_tensor(start).expand(x.shape[0])
    return mixer(x, Context.from_state(x[..., 0], start, room).share(mixer.shared), state)


def new_state(mixer: Mixer, batch: int, dtype: torch.dtype = torch.float32, room: int = MAX_LENGTH) -> State:
    return mixer.init_state(batch, room, torch.device("cpu"), dtype)


def in_pieces(mixer: Mixer, x: Tensor, lengths: tuple[int, ...]) -> Tensor:
    state, start, ys = new_state(mixer, x.shape[0], x.dtype), 0, []
    for piece in x.split(lengths, 1):
        y, state = step(mixer, piece, state, start)
        start += piece.shape[1]
        ys.append(y)
    return torch.cat(ys, 1)


def gradients(mixer: Mixer, loss: Tensor, *others: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [*mixer.parameters(), *others]))


def assert_near(actual: Tensor, expected: Tensor, bound: float = 1e-5) -> None:
    """Within `bound` of the expected tensor, relative to its largest entry."""
    assert actual.shape == expected.shape
    error = (actual.double() - expected.double()).abs().max() / expected.double().abs().max().clamp_min(1e-6)
    assert error <= bound, f"relative error {error:.1e} > {bound}"


def test_example_is_among_the_cases() -> None:
    assert {case.entry.name for case in CASES} == {entry.name for entry in registry.entries("mixer")}
    assert "running_mean" in {case.entry.name for case in CASES}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_keeps_shape_and_dtype(case: Case, dtype: torch.dtype) -> None:
    x = torch.randn(3, 11, DIM, dtype=dtype)
    mixer = case.build(dtype)
    y, state = mixer(x, Context.from_tokens(x[..., 0]).share(mixer.shared))
    assert (y.shape, y.dtype, state) == (x.shape, dtype, None)


@pytest.mark.parametrize("token", [0, 1, 35, 64, 69])
def test_causal(case: Case, token: int) -> None:
    x, mixer = torch.randn(2, 70, DIM), case.build()
    changed = x.clone()
    changed[:, token] += torch.randn(DIM)
    before, after = mix(mixer, x), mix(mixer, changed)
    assert torch.equal(before[:, :token], after[:, :token])
    assert not torch.equal(before[:, token:], after[:, token:])


def test_row_does_not_depend_on_the_batch(case: Case) -> None:
    x, mixer = torch.randn(5, 67, DIM), case.build()
    together = mix(mixer, x)
    for row in range(5):
        assert_near(together[row : row + 1], mix(mixer, x[row : row + 1]), 3e-6)


@pytest.mark.parametrize("length", [1, 2, 3, 63, 64, 65])
def test_any_length(case: Case, length: int) -> None:
    x, mixer = torch.randn(2, 130, DIM), case.build()
    assert_near(mix(mixer, x[:, :length]), mix(mixer, x)[:, :length])


def test_packed_equals_separate(case: Case) -> None:
    case.require("packed")
    mixer, length = case.build(), sum(PIECES)
    x, weights = torch.randn(1, length, DIM, requires_grad=True), torch.randn(1, length, DIM)
    packed = mix(mixer, x, torch.tensor([0, *PIECES]).cumsum(0).int())
    separate = torch.cat([mix(mixer, piece) for piece in x.split(PIECES, 1) if piece.shape[1]], 1)
    assert_near(packed, separate)
    for actual, expected in zip(
        gradients(mixer, (packed * weights).sum(), x), gradients(mixer, (separate * weights).sum(), x), strict=True
    ):
        assert_near(actual, expected)


def test_packed_documents_do_not_see_each_other(case: Case) -> None:
    case.require("packed")
    mixer, bounds = case.build(), torch.tensor([0, *PIECES]).cumsum(0).int()
    x = torch.randn(1, sum(PIECES), DIM)
    before = mix(mixer, x, bounds)
    for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        changed = x.clone()
        changed[:, start:end] *= -3
        after = mix(mixer, changed, bounds)
        assert torch.equal(before[:, :start], after[:, :start])
        assert torch.equal(before[:, end:], after[:, end:])


@torch.no_grad()
@pytest.mark.parametrize(
    "lengths",
    [(5, 1, 64, 37), (107,), (1,) * 20, (3, *(1,) * 15), (70, 1, 2), *((prefill, 1, 1) for prefill in (2, 63, 64, 65))],
    ids=str,
)
def test_in_pieces_with_state_equals_one_piece(case: Case, lengths: tuple[int, ...]) -> None:
    case.require("decode")
    x, mixer = torch.randn(2, sum(lengths), DIM), case.build()
    assert_near(in_pieces(mixer, x, lengths), mix(mixer, x))


@torch.no_grad()
@pytest.mark.parametrize("around", [8, 65])
def test_steps_agree_around_a_window_edge(case: Case, around: int) -> None:
    case.require("decode")
    x, mixer = torch.randn(2, 2 * around + 3, DIM), case.build()
    expected = mix(mixer, x)
    for prefill in range(around - 1, 2 * around + 2, 1 if around < 10 else 22):
        assert_near(in_pieces(mixer, x[:, : prefill + 2], (prefill, 1, 1)), expected[:, : prefill + 2])


@torch.no_grad()
def test_rows_of_a_state_may_be_of_different_age(case: Case) -> None:
    case.require("decode")
    mixer, ages, x = case.build(), [3, 9, 20], torch.randn(3, 25, DIM)
    states = [step(mixer, x[i : i + 1, :age], new_state(mixer, 1), 0)[1] for i, age in enumerate(ages)]
    together = {key: torch.cat([state[key] for state in states]) for key in states[0]}
    y, _ = step(mixer, torch.stack([x[i, age : age + 5] for i, age in enumerate(ages)]), together, torch.tensor(ages))
    for i, age in enumerate(ages):
        assert_near(y[i], mix(mixer, x[i : i + 1])[0, age : age + 5])


@torch.no_grad()
@pytest.mark.parametrize("ages", [(0, 0, 0, 0), (3, 9, 20, 70)], ids=str)
@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("lengths", [(5, 1, 2, 37), (66, 64, 0, 3), (1, 0, 1, 1)], ids=str)
def test_padding_leaves_no_trace(case: Case, lengths: tuple[int, ...], fresh: bool, ages: tuple[int, ...]) -> None:
    """Rows of different length are what each is alone, and their states too, whatever stands behind them."""
    case.require("decode")
    if fresh and any(ages):
        pytest.skip("a fresh state is of age 0")
    mixer, width = case.build(), max(lengths)
    x = torch.randn(4, max(ages) + width + 2, DIM)
    states = [new_state(mixer, 1) for _ in ages]
    for i, age in enumerate(ages):
        if age:
            _, states[i] = step(mixer, x[i : i + 1, :age], states[i], 0)
    start = torch.tensor(ages)
    pieces = torch.stack([x[i, age : age + width] for i, age in enumerate(ages)])
    ends = []
    for padding in (0.0, 100.0):
        state = {key: torch.cat([state[key] for state in states]) for key in states[0]}
        for i, length in enumerate(lengths):
            pieces[i, length:] = padding
        context = Context.from_state(pieces[..., 0], start, MAX_LENGTH, lengths=torch.tensor(lengths), fresh=fresh)
        y, state = mixer(pieces, context.share(mixer.shared), state)
        ends.append(state)
        whole = mix(mixer, x)
        for i, (age, length) in enumerate(zip(ages, lengths, strict=True)):
            if length:
                assert_near(y[i, :length], whole[i, age : age + length])
    assert all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0])
    there = start + torch.tensor(lengths)
    following = torch.stack([x[i, end : end + 1] for i, end in enumerate(there.tolist())])
    y, _ = step(mixer, following, ends[0], there)
    for i, end in enumerate(there.tolist()):
        assert_near(y[i], whole[i, end : end + 1])


@torch.no_grad()
@pytest.mark.parametrize("mode", ["float32", "bfloat16", "float64", "autocast"])
@pytest.mark.parametrize("batch", [1, 3])
def test_state_keeps_its_form(case: Case, mode: str, batch: int) -> None:
    case.require("decode")
    dtype = torch.float32 if mode == "autocast" else getattr(torch, mode)
    mixer, x = case.build(dtype), torch.randn(batch, 76, DIM, dtype=dtype)
    state, start = new_state(mixer, batch, dtype), 0
    form = {key: (value.shape, value.dtype, value.stride()) for key, value in state.items()}
    for piece in x.split((70, 1, 5), 1):
        with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
            _, state = step(mixer, piece, state, start)
        start += piece.shape[1]
        assert {key: (value.shape, value.dtype, value.stride()) for key, value in state.items()} == form
        assert all(value.is_contiguous() and value.shape[0] == batch for value in state.values())
        held = sum(value.untyped_storage().nbytes() for value in state.values())
        assert held == sum(value.nbytes for value in state.values()), "a view keeps a larger tensor alive"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [1, 7, 100])
def test_state_bytes_are_those_of_the_state(case: Case, length: int, dtype: torch.dtype) -> None:
    case.require("decode")
    state = new_state(case.build(dtype), 1, dtype, room=length)
    assert case.options.state_bytes(DIM, length, dtype) == sum(value.nbytes for value in state.values())
    if "constant_state" in case.entry.supports:
        assert case.options.state_bytes(DIM, length, dtype) == case.options.state_bytes(DIM, 10 * length, dtype)


def test_counts_its_parameters(case: Case) -> None:
    assert case.options.num_params(DIM) == sum(parameter.numel() for parameter in case.build().parameters())


def test_flops_are_positive_and_do_not_fall_with_length(case: Case) -> None:
    flops = [case.options.flops_per_token(DIM, length) for length in (1, 2, 64, 1024, 10**6)]
    assert flops[0] >= 2 * case.options.num_params(DIM) * 0.9
    assert flops == sorted(flops)


@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_grouped_heads_are_supported_or_refused(case: Case, num_kv_heads: int) -> None:
    grouped = Case(case.entry, case.values | {"num_heads": 4, "num_kv_heads": num_kv_heads, "head_dim": 12})
    if "grouped_heads" not in case.entry.supports:
        with pytest.raises(ZooConfigError, match=r"num_heads|num_kv_heads"):
            grouped.build()
        return
    full = Case(case.entry, grouped.values | {"num_kv_heads": 4})
    assert grouped.options.num_params(DIM) < full.options.num_params(DIM)
    assert torch.isfinite(mix(grouped.build(), torch.randn(3, 9, DIM))).all()


@pytest.mark.parametrize("scale", [1.0, 0.0, 100.0])
@pytest.mark.parametrize("length", [1, 66])
def test_gradients_are_finite(case: Case, scale: float, length: int) -> None:
    mixer, x = case.build(), (scale * torch.randn(2, length, DIM)).requires_grad_()
    for gradient in gradients(mixer, mix(mixer, x).sum(), x):
        assert torch.isfinite(gradient).all()


def test_gradient_agrees_with_a_difference_quotient(case: Case) -> None:
    mixer = case.build(torch.float64)
    x, direction, weights = (torch.randn(2, 9, DIM, dtype=torch.float64) for _ in range(3))
    x.requires_grad_()
    (gradient,) = torch.autograd.grad((mix(mixer, x) * weights).sum(), x)
    h = 1e-4
    with torch.no_grad():
        quotient = ((mix(mixer, x + h * direction) - mix(mixer, x - h * direction)) * weights).sum() / (2 * h)
    assert_near((gradient * direction).sum(), quotient, 1e-5)


def test_non_contiguous_input(case: Case) -> None:
    mixer, x = case.build(), torch.randn(3, 21, DIM)
    for strided in (
        x.mT.contiguous().mT,
        torch.stack([x, x], -1)[..., 0],
        x.transpose(0, 1).contiguous().transpose(0, 1),
    ):
        assert not strided.is_contiguous()
        assert_near(mix(mixer, strided), mix(mixer, x), 3e-6)


def test_two_runs_are_bit_identical(case: Case) -> None:
    mixer, x = case.build(), torch.randn(2, 70, DIM, requires_grad=True)
    runs = [[y := mix(mixer, x), *gradients(mixer, y.square().sum(), x)] for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("autocast", [True, False])
def test_bfloat16(case: Case, autocast: bool) -> None:
    x, expected = torch.randn(2, 66, DIM), case.build()
    mixer = case.build(torch.float32 if autocast else torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = mix(mixer, x if autocast else x.bfloat16())
    assert y.dtype == torch.bfloat16
    assert (y - mix(expected, x)).norm() < 0.03 * mix(expected, x).norm()
    assert all(torch.isfinite(gradient).all() for gradient in gradients(mixer, y.float().sum()))


@pytest.mark.parametrize("name", dict.fromkeys(case.entry.name for case in CASES))
def test_compiles_to_one_graph_for_all_lengths(name: str, fresh_compiler: None) -> None:
    """One layer for each variant."""
    mlp = {"name": "gelu", "hidden_dim": 40}
    layers = [{"mixer": {"name": name} | case.values, "mlp": mlp} for case in CASES if case.entry.name == name]
    model = zoo.build({"vocab_size": 37, "dim": DIM, "num_layers": len(layers), "layers": layers}, seed=0)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for index, length in enumerate((61, 97)):
        tokens, weights = torch.randint(37, (3, length)), torch.randn(3, length, 37)
        with torch._dynamo.config.patch(error_on_recompile=index > 0):
            results = [
                [y := run(tokens), *torch.autograd.grad((y * weights).sum(), list(model.parameters()))]
                for run in (model, compiled)
            ]
        for expected, actual in zip(*results, strict=True):
            assert_near(actual, expected)
