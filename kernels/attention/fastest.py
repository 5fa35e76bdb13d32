"""Which backend is fastest, as measured: what "auto" goes by.

The tables are the rankings of benchmarks/attention_h200_*.json, where a call's backends stand in the order of their
worst times, relative to PyTorch's best. After each new benchmark they are written anew by hand; the test that compares
them shows what to write.
"""

import torch

__all__ = ["TABLES", "Table", "fastest_first"]

# By whether there is a window and whether documents are packed, then by head dim: backends, the fastest first. A row
# ends with "sdpa", which serves all calls but the largest; slower ones are left out. So is xformers, an optional
# package: the choice must not depend on what is installed.
Table = dict[tuple[bool, bool], dict[int, tuple[str, ...]]]

_BFLOAT16: Table = {
    (False, False): {64: ("sdpa",), 128: ("sdpa",)},
    (False, True): {64: ("triton", "flex", "flash", "sdpa"), 128: ("triton", "flex", "flash", "sdpa")},
    (True, False): {64: ("triton", "flex", "flash", "sdpa"), 128: ("triton", "flex", "flash", "sdpa")},
    (True, True): {64: ("triton", "flex", "flash", "sdpa"), 128: ("triton", "flex", "flash", "sdpa")},
}
_FLOAT32: Table = {
    (False, False): {64: ("sdpa",), 128: ("sdpa",)},
    (False, True): {64: ("triton", "flex", "sdpa"), 128: ("triton", "flex", "sdpa")},
    (True, False): {64: ("triton", "flex", "sdpa"), 128: ("triton", "sdpa")},
    (True, True): {64: ("triton", "flex", "sdpa"), 128: ("triton", "flex", "sdpa")},
}
TABLES = {torch.bfloat16: _BFLOAT16, torch.float16: _BFLOAT16, torch.float32: _FLOAT32}


def fastest_first(dtype: torch.dtype, head_dim: int, *, windowed: bool, packed: bool) -> tuple[str, ...]:
    """Backends to try in this order on a CUDA device; the last one is "sdpa".

    Args:
        dtype: of the values.
        head_dim: the larger of D and D_v: the smallest measured one that holds it counts, or the largest of all.
        windowed: whether there is a window.
        packed: whether documents are packed.
    """
    if dtype not in TABLES:
        return ("sdpa",)
    row = TABLES[dtype][windowed, packed]
    return row[min([measured for measured in row if measured >= head_dim] or [max(row)])]
