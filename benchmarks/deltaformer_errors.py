"""The errors of the Deltaformer's write and read on a CUDA device, against float64, for `deltaformer_gpu.py`.

Errors are judged by those of rounding the exact results to bf16; where they are larger than a few of these, by those
of the same formulas in PyTorch, `half_write`.

Shapes: B batch, T tokens, H heads, D head dimension of keys and values.
"""

import math
from functools import partial
from typing import Any

from delta_rule_calls import Inputs, make_gradients
from deltaformer_calls import EXACT, HARD, OURS, Write, exact_results, make_hard, results, rounding_errors
from half_precision import half_write
from harness import ratios, relative_errors, rounded, show_errors, verdict

ERROR_LENGTHS, ERROR_DIMS = (512, 1024, 2048), (64, 128)
MAX_U_RATIO, MAX_RATIO, MAX_DBETA_RATIO, MAX_PYTORCH_RATIO = 1.5, 3, 7, 1.2
MAX_ABSOLUTE = 2**-8  # of the largest gradient, where the exact one is 0
KERNELS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "linear": {},
    "relu": {},
    "exp": {},
    "round": {"round_decimals": 2},
}


def limit(name: str) -> float:
    """How many times the error of rounding that of a result may be."""
    return {"u": MAX_U_RATIO, "dbeta": MAX_DBETA_RATIO}.get(name, MAX_RATIO)


def over_limits(over_rounding: dict[str, float | None]) -> float | None:
    """The largest share that an error has of its limit."""
    return rounded(max(or_inf(ratio) / limit(name) for name, ratio in over_rounding.items()))


def judge(inputs: Inputs, kernel: str = "softmax") -> dict[str, Any]:
    """The errors of one case; where they are above the limits, also those of the same formulas in PyTorch."""
    gradients = make_gradients(inputs)
    ours, half, reference = (with_kernel(write, kernel) for write in (OURS, half_write, EXACT))
    exact = exact_results(reference, inputs, gradients)
    found = {"ours": relative_errors(results(ours, inputs, gradients), exact), "rounding": rounding_errors(exact)}
    found["over_rounding"] = ratios(found["ours"], found["rounding"])
    above = {name: found["ours"][name] for name, x in found["over_rounding"].items() if x is None or x > limit(name)}
    if above:
        found["pytorch"] = relative_errors(results(half, inputs, gradients), exact)
        found["over_pytorch"] = dict.fromkeys(above) | ratios(above, found["pytorch"])
    largest = max(x.norm().item() for x in exact.values())
    found["over_largest"] = {
        name: rounded(or_inf(error) / largest) for name, error in found["ours"].items() if name.endswith("_absolute")
    }
    return found


def errors() -> dict[str, Any]:
    """Errors against float64 with hard inputs (B 1 H 16), forward and gradients through both; and of other kernels."""
    rows: list[dict[str, Any]] = []
    for head_dim, length, case in ((d, t, case) for d in ERROR_DIMS for t in ERROR_LENGTHS for case in HARD):
        found = judge(make_hard(case, length, head_dim))
        finite = all(error is not None for error in found["ours"].values())
        rows.append({"D": head_dim, "T": length, "case": case, "finite": finite, "errors": found})
        show_judged(f"D {head_dim} T {length} {case}", found)
    others = other_kernels()
    written = [or_inf(row["errors"]["over_rounding"]["u"]) for row in rows]
    above, above_others = (
        [or_inf(ratio) for row in cases for ratio in row["errors"].get("over_pytorch", {}).values()]
        for cases in (rows, others)
    )
    absolute = [or_inf(ratio) for row in rows for ratio in row["errors"]["over_largest"].values()]
    return {
        "shape": "B 1 H 16",
        "cases": rows,
        "other_kernels": others,
        "targets": [
            verdict("u over rounding", rounded(max(written)), MAX_U_RATIO, least=False),
            *(
                verdict(
                    f"above limits, over PyTorch: {name}",
                    rounded(max(found, default=0.0)),
                    MAX_PYTORCH_RATIO,
                    least=False,
                )
                for name, found in (("softmax", above), ("others", above_others))
            ),
            verdict("of what is 0, over the largest", rounded(max(absolute)), MAX_ABSOLUTE, least=False),
            verdict("finite cases", sum(row["finite"] for row in rows) / len(rows), 1.0, least=True),
        ],
    }


def or_inf(value: float | None) -> float:
    """What JSON does not know is worse than anything."""
    return math.inf if value is None else value


def other_kernels() -> list[dict[str, Any]]:
    """Errors of the write with other kernels, of unit keys at T 1024."""
    rows = []
    for head_dim in ERROR_DIMS:
        inputs = make_hard("unit keys", 1024, head_dim)
        for kernel in (kernel for kernel in KERNELS if kernel != "softmax"):
            found = judge(inputs, kernel)
            rows.append({"D": head_dim, "kappa1": kernel, **KERNELS[kernel], "errors": found})
            show_judged(f"D {head_dim} T 1024 {kernel}", found)
    return rows


def show_judged(label: str, found: dict[str, Any]) -> None:
    """Errors, and how they compare."""
    show_errors(label, {side: errors for side, errors in found.items() if side not in ("rounding", "pytorch")})


def with_kernel(write: Write, kernel: str) -> Write:
    """The write with one of `KERNELS`."""
    return partial(write, kappa1=kernel, **KERNELS[kernel])
