"""Peak memory of a call."""

import torch

from zoo.memory import peak_cpu_bytes

MIB = 2**20


def test_counts_what_is_held_at_the_same_time() -> None:
    def one_after_the_other() -> None:
        for _ in range(3):
            torch.empty(MIB, dtype=torch.uint8)

    def together() -> None:
        kept = [torch.empty(MIB, dtype=torch.uint8) for _ in range(3)]
        kept.clear()

    assert peak_cpu_bytes(one_after_the_other) == MIB
    assert peak_cpu_bytes(together) == 3 * MIB


def test_what_the_call_returns_counts_and_what_was_there_does_not() -> None:
    before = torch.empty(5 * MIB, dtype=torch.uint8)
    assert peak_cpu_bytes(lambda: before[:MIB].clone()) == MIB
