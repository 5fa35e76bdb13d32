"""The models on a CUDA device: equal to the CPU, compiled as one graph."""

import math

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from variants import COMPARED, GATED, TINY, VARIANTS, build

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    found = {name: parameter.grad.cpu() for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return found


def assert_same_gradients(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        error = (actual[name] - gradient).norm() / gradient.norm()
        assert error < tolerance, f"{name}: relative error {error:.1e}"


@pytest.mark.parametrize("recipe", TINY)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_cuda_eager_and_compiled_equal_the_cpu(recipe: str, packed: bool) -> None:
    torch.compiler.reset()
    counters.clear()
    on_cpu = build(recipe, seed=0)
    on_cuda = build(recipe).cuda()
    on_cuda.load_state_dict(on_cpu.state_dict())
    tokens = torch.randint(256, (1, 333) if packed else (3, 161), generator=torch.Generator().manual_seed(0))
    cu_seqlens = torch.tensor([0, 1, 3, 70, 333], dtype=torch.int32) if packed else None
    expected = on_cpu(tokens, labels=tokens, cu_seqlens=cu_seqlens)
    expected.backward()
    expected_gradients = gradients(on_cpu)
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.cuda()
    for call in (on_cuda, torch.compile(on_cuda, fullgraph=True)):
        loss = call(tokens.cuda(), labels=tokens.cuda(), cu_seqlens=cu_seqlens)
        loss.backward()
        torch.testing.assert_close(loss.cpu(), expected, atol=1e-4, rtol=0)
        assert_same_gradients(gradients(on_cuda), expected_gradients, 1e-3)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.parametrize("recipe", TINY)
def test_decoding_in_pieces_equals_one_pass(recipe: str) -> None:
    model = build(recipe, device="cuda", seed=0)
    tokens = torch.randint(256, (2, 80), device="cuda")
    state, pieces = model.init_state(2, 80), []
    with torch.no_grad():
        expected = model(tokens)
        for piece in tokens.split([5, 1, 64, 10], 1):
            logits, state = model(piece, state=state)
            pieces.append(logits)
    torch.testing.assert_close(torch.cat(pieces, 1), expected, atol=1e-4, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("recipe", ["deltanet-swa-tiny", "deltaformer-swa-tiny", GATED, COMPARED])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_steps_equal_one_pass_and_survive_each_other(recipe: str, mode: str) -> None:
    torch.compiler.reset()
    model = build(recipe, device="cuda", seed=0)
    tokens = torch.randint(256, (3, 60), device="cuda")
    lengths = torch.tensor([40, 1, 33], device="cuda")
    _, state = model(tokens[:, :40], max_length=60, lengths=lengths)
    compiled, expected = torch.compile(model, fullgraph=True, mode=mode), model(tokens)
    places = [value.data_ptr() for value in state.values(True, True)]
    steps = []
    for offset in range(20):
        token = tokens.gather(1, lengths[:, None] + offset)
        with torch._dynamo.config.patch(error_on_recompile=offset > 0):
            logits, state = compiled(token, state=state)
        steps.append(logits)
    assert [value.data_ptr() for value in state.values(True, True)] == places
    index = (lengths[:, None] + torch.arange(20, device="cuda"))[..., None].expand(-1, -1, 256)
    torch.testing.assert_close(torch.cat(steps, 1), expected.gather(1, index), atol=1e-3, rtol=0)


@pytest.mark.parametrize("recipe", ["deltanet-swa-tiny", "deltaformer-tiny", *VARIANTS])
def test_one_cuda_graph_over_lengths(recipe: str) -> None:
    torch.compiler.reset()
    model = build(recipe, device="cuda", seed=0)
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in range(61, 650, 31):
            tokens = torch.randint(256, (3, length), device="cuda")
            loss = compiled(tokens, labels=tokens)
            loss.backward()
            torch.testing.assert_close(loss, model(tokens, labels=tokens), atol=1e-4, rtol=0)


@pytest.mark.parametrize("recipe", ["transformer-tiny", "swa-full-tiny", "deltaformer-swa-tiny"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)], ids=str)
def test_one_cuda_graph_over_packings(dtype: torch.dtype, tolerance: float, recipe: str) -> None:
    """Of one total length."""
    torch.compiler.reset()
    model = build(recipe, device="cuda", seed=0).to(dtype)
    compiled = torch.compile(model, fullgraph=True)
    tokens = torch.randint(256, (1, 600), device="cuda")
    for index, pieces in enumerate([(100,) * 6, (1, 2, 3, 200, 194, 200), (0, 0, 0, 0, 0, 600)]):
        cu_seqlens = torch.tensor([0, *pieces], device="cuda").cumsum(0).int()
        with torch._dynamo.config.patch(error_on_recompile=index > 0):
            loss = compiled(tokens, labels=tokens, cu_seqlens=cu_seqlens)
            loss.backward()
        expected = model(tokens, labels=tokens, cu_seqlens=cu_seqlens)
        torch.testing.assert_close(loss, expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("recipe", ["transformer-tiny", "swa-full-tiny"])
def test_packed_documents_need_no_mask_of_all_pairs(recipe: str) -> None:
    """Forward and backward of a long row take less memory than a byte for each pair of tokens."""
    length = 65_536
    model = build(recipe, device="cuda", seed=0).to(torch.bfloat16)
    tokens = torch.randint(256, (1, length), device="cuda")
    cu_seqlens = torch.tensor([0, 1, 40, 30_000, length], device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model(tokens, labels=tokens, cu_seqlens=cu_seqlens).backward()
    assert torch.cuda.max_memory_allocated() - before < length**2


def test_a_340m_model_trains_dense_and_packed_in_one_graph_each() -> None:
    """Of full attention and a sliding window; over five packings of one total length."""
    torch.compiler.reset()
    model = build("swa-full-340m", device="cuda", dtype=torch.bfloat16, seed=0)
    compiled = torch.compile(model, fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    generator = torch.Generator("cuda").manual_seed(0)
    tokens = torch.randint(32_000, (1, 8192), device="cuda", generator=generator)
    packings = [
        (8192, 0, 0, 0, 0, 0),  # documents longer than the window of 1024, shorter, of one token, of none
        (1, 2, 3, 4000, 4186, 0),
        (1024, 1023, 1025, 1, 1119, 4000),
        (1365, 1365, 1365, 1365, 1365, 1367),
        (0, 0, 1, 8190, 1, 0),
    ]
    for dense in (True, False):
        losses = []
        for index, pieces in enumerate(packings):
            ends = torch.tensor([0, *pieces], device="cuda").cumsum(0).int()
            x = tokens.view(4, 2048) if dense else tokens
            with torch._dynamo.config.patch(error_on_recompile=index > 0):
                loss = compiled(x, labels=x, cu_seqlens=None if dense else ends)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item())
        assert losses[-1] < losses[0] < math.inf, losses
