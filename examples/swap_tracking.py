"""A Deltaformer layer with hand-set weights tracks swaps of elements exactly, without training (arXiv 2505.19488).

    python examples/swap_tracking.py    # 64 elements, head dim 512, 60 swaps; writes swap_tracking.png where you are

Slot i has a key k_i, a random unit vector. One token for each slot writes its element, one-hot, under k_i. Then "swap
a and b" is one token with the key k_a - k_b and the value 0: the write takes from it what the memory returns for that
key, element_a - element_b, so that from then on a read with k_a gets element_b. Random keys are only nearly orthogonal:
the kernel "round" keeps that error out of the memory, "linear" lets it in, and "relu" makes nothing of the -k_b.

Shapes: N slots and elements, S swaps, T = N + N + S (1 + N) tokens, d head dim.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zoo.files import require_file, write_whole
from zoo.kernels.deltaformer import Kappa
from zoo.mixers.context import Context
from zoo.mixers.deltaformer import Deltaformer, DeltaformerOptions

KAPPAS: dict[Kappa, str] = {"round": "C2", "linear": "C0", "relu": "C1"}  # with their colours
Swaps = list[tuple[int, int]]


def parse_args(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--elements", type=int, default=64, help="that are swapped, in as many slots; 2 to --dim")
    parser.add_argument("--dim", type=int, default=512, help="of the head; the more, the closer to orthogonal the keys")
    parser.add_argument("--swaps", type=int, default=60, help="of two random slots, one after the other; at least 1")
    parser.add_argument("--seed", type=int, default=0, help="of the keys and the swaps")
    parser.add_argument("--out", type=Path, default=Path("swap_tracking.png"), help="where the plot goes, a PNG")
    args = parser.parse_args(arguments)
    if not 2 <= args.elements <= args.dim:
        parser.error(f"--elements: expected from 2 to --dim = {args.dim}, got {args.elements}")
    if args.swaps < 1:
        parser.error(f"--swaps: expected at least 1, got {args.swaps}")
    if args.seed < 0:
        parser.error(f"--seed: expected at least 0, got {args.seed}")
    try:
        require_file(args.out)
    except OSError as error:
        parser.error(f"--out: cannot write there: {error}")
    return args


def make_layer(kappa: Kappa, dim: int) -> Deltaformer:
    """One head whose query, key and value are the three parts of the input, and whose output is in the value's part.

    Args:
        kappa: kernel of the write and of the read.
        dim: d; the layer's width is 3 d.
    """
    options = DeltaformerOptions(
        num_heads=1,
        head_dim=dim,
        kappa1=kappa,
        kappa2=kappa,
        compare="kk",
        alpha=1.0,
        beta=1.0,
        qk_norm="none",  # a swap's key has norm sqrt 2
        rope=False,
    )
    layer = Deltaformer(options.resolve(3 * dim), 3 * dim).requires_grad_(False)
    nn.init.eye_(layer.in_proj.weight)
    nn.init.zeros_(layer.out_proj.weight)
    nn.init.eye_(layer.out_proj.weight[2 * dim :])
    return layer


def make_task(elements: int, dim: int, swaps: int, seed: int) -> tuple[Tensor, Swaps]:
    """Random unit keys [N, d], and S pairs of different slots."""
    generator = torch.Generator().manual_seed(seed)
    keys = nn.functional.normalize(torch.randn(elements, dim, generator=generator), dim=-1)
    pairs = [torch.randperm(elements, generator=generator)[:2].tolist() for _ in range(swaps)]
    return keys, [(a, b) for a, b in pairs]


def make_sequence(keys: Tensor, swaps: Swaps) -> Tensor:
    """The tokens [1, T, 3 d], each a query, a key and a value: N writes and N reads, then a swap and N reads S times.

    A token that only reads has the key and the value 0, and so writes 0 with a kernel that makes 0 of 0.
    """
    size, dim = keys.shape
    reads = torch.cat([keys, torch.zeros(size, 2 * dim)], 1)
    writes = torch.cat([torch.zeros(size, dim), keys, torch.eye(size, dim)], 1)
    parts = [writes, reads]
    for a, b in swaps:
        swap = torch.cat([torch.zeros(dim), keys[a] - keys[b], torch.zeros(dim)])
        parts += [swap[None], reads]
    return torch.cat(parts)[None]


def split_reads(outputs: Tensor, elements: int) -> Tensor:
    """What the reads return, [S + 1, N, d]: before the first swap and after each.

    Args:
        outputs: [1, T, 3 d] of the layer.
        elements: N.
    """
    rounds = outputs[0, elements - 1 :, outputs.shape[-1] // 3 * 2 :].unflatten(0, (-1, 1 + elements))
    return rounds[:, 1:]  # each round of reads follows one token that wrote


@torch.no_grad()
def track(kappa: Kappa, keys: Tensor, swaps: Swaps) -> Tensor:
    """What every slot holds, [S + 1, N, d], before the first swap and after each: one forward pass over all tokens."""
    layer, tokens = make_layer(kappa, keys.shape[1]), make_sequence(keys, swaps)
    context = Context.from_tokens(tokens[..., 0]).share(layer.shared)
    return split_reads(layer(tokens, context)[0], keys.shape[0])


def swap_list(elements: int, swaps: Swaps) -> Tensor:
    """The truth [S + 1, N]: which element each slot holds, from a list whose entries are swapped."""
    held = list(range(elements))
    history = [held.copy()]
    for a, b in swaps:
        held[a], held[b] = held[b], held[a]
        history.append(held.copy())
    return torch.tensor(history)


def errors(reads: Tensor, truth: Tensor) -> Tensor:
    """The largest |read - one-hot element| [S + 1], before the first swap and after each.

    Args:
        reads: [S + 1, N, d].
        truth: [S + 1, N].
    """
    return (reads - nn.functional.one_hot(truth, reads.shape[-1])).abs().amax((1, 2))


def figures(reads: Tensor, truth: Tensor) -> dict[str, float]:
    """The largest error over all swaps, and the share of slots and swaps whose largest entry is the right element."""
    right = (reads.argmax(-1) == truth).double().mean()
    return {"error": errors(reads, truth).max().item(), "argmax_right": right.item()}


def draw(reads: dict[Kappa, Tensor], swaps: Swaps, truth: Tensor, title: str, path: Path) -> None:
    """What the slots hold according to "round", and every kernel's error, against the number of the swap.

    Args:
        reads: of each kernel, [S + 1, N, d].
        swaps: S pairs.
        truth: [S + 1, N].
        title: of the whole figure.
        path: of the PNG.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    _draw_slots(figure, left, reads["round"].argmax(-1), swaps)
    _draw_errors(right, reads, truth)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.savefig(path, dpi=100, format="png")


def _draw_slots(figure: Any, axes: Any, held: Tensor, swaps: Swaps) -> None:
    image = axes.imshow(held.t().numpy(), aspect="auto", origin="lower", interpolation="nearest", cmap="turbo")
    steps = [step + 0.5 for step in range(len(swaps))]
    axes.vlines(steps, *zip(*swaps, strict=True), color="black", alpha=0.4, linewidth=0.8)
    axes.plot(steps, swaps, color="black", linestyle="none", marker=".", markersize=5)
    axes.set_title("what each slot holds, as read from the round memory", loc="left", fontsize=11)
    axes.set_xlabel("swaps so far (dots: the two slots that the next swap exchanges)")
    axes.set_ylabel("slot")
    for axis in (axes.xaxis, axes.yaxis):
        axis.get_major_locator().set_params(integer=True)
    figure.colorbar(image, ax=axes, label="element (slot i starts with element i)", pad=0.01, aspect=40)


def _draw_errors(axes: Any, reads: dict[Kappa, Tensor], truth: Tensor) -> None:
    rows: dict[Kappa, dict[str, float]] = {kappa: figures(read, truth) for kappa, read in reads.items()}
    for kappa, row in sorted(rows.items(), key=lambda item: -item[1]["error"]):
        error = "exactly 0" if row["error"] == 0 else f"up to {row['error']:.2f}"
        label = f"{kappa}: {error}, argmax right {row['argmax_right']:.0%}"
        axes.plot(errors(reads[kappa], truth).numpy(), color=KAPPAS[kappa], linewidth=2, label=label)
    axes.set_yscale("symlog", linthresh=0.01, linscale=0.5)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.axhspan(0, 0.01, color="0.95", zorder=0)  # where the axis is linear, so that it has a 0
    axes.set_ylim(bottom=-0.0015)
    axes.set_title("error: largest |read - one-hot element| over all slots", loc="left", fontsize=11)
    axes.set_xlabel("swaps so far (grey: the axis is linear, down to 0)")
    axes.set_ylabel("error")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(
        frameon=False, title="kernel of write and read", alignment="left", loc="center right", bbox_to_anchor=(1, 0.4)
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Track with every kernel, print, draw."""
    args = parse_args(arguments)
    keys, swaps = make_task(args.elements, args.dim, args.swaps, args.seed)
    truth = swap_list(args.elements, swaps)
    cosine = (keys @ keys.t()).fill_diagonal_(0).abs().max().item()

    reads: dict[Kappa, Tensor] = {}
    for kappa in KAPPAS:
        print(f"{kappa} ...", file=sys.stderr, flush=True)
        reads[kappa] = track(kappa, keys, swaps)
    rows = {kappa: figures(read, truth) for kappa, read in reads.items()}

    print(f"{args.swaps} swaps of {args.elements} elements, head dim {args.dim}, seed {args.seed}")
    print(f"largest |k_i . k_j|: {cosine:.3f} (the theorem's proof asks for less than 0.125)")
    print(f"{'kernel':<10}{'largest error':>16}{'argmax right':>16}")
    for kappa, row in rows.items():
        print(f"{kappa:<10}{row['error']:>16.4g}{row['argmax_right']:>16.1%}")
    title = f"Deltaformer with hand-set weights: {args.swaps} swaps of {args.elements} elements, head dim {args.dim}"
    write_whole(args.out, lambda path: draw(reads, swaps, truth, title, path))
    print(json.dumps({**vars(args), "out": str(args.out), "largest_cosine": cosine, "kernels": rows}))


if __name__ == "__main__":
    torch.set_num_threads(1)  # many small operations: on a busy machine threads mostly wait for one another
    main()
