"""The tensors of all sides of a kernel at one shape, and what is exact for them.

Shapes: B batch, T tokens, H heads, D head dim.
"""

from functools import cached_property
from math import inf

import torch
from torch import Tensor

from zoo.bench.kernels.kernel import REFERENCE_LENGTH, Call, Draw, Inputs, Kernel, Shape

__all__ = ["Case"]

_COLD = 2**28  # bytes of inputs that no cache of a GPU holds


class Case:
    """Of one kernel and shape.

    Args:
        kernel: an entry of the table.
        shape: of the call.
        seed: of the tensors' values.
    """

    def __init__(self, kernel: Kernel, shape: Shape, seed: int) -> None:
        self.kernel, self.shape = kernel, shape
        draw = Draw(torch.Generator(shape.device).manual_seed(seed), shape.dtype)
        self.inputs = kernel.inputs(shape, draw)
        size = shape.batch_size, shape.length, shape.num_heads, shape.head_dim
        self.gradient = draw.normal(*size) if kernel.has_backward else None

    @cached_property
    def copies(self) -> list[tuple[Inputs, Tensor | None]]:
        """What timed calls take in turns: on CUDA so many copies of small inputs that each call finds its own cold."""
        given = [*self.inputs.values()] + ([] if self.gradient is None else [self.gradient])
        nbytes = sum(x.nbytes for x in given)
        count = max(1, _COLD // nbytes) if self.shape.device.type == "cuda" else 1
        return [
            (self.fresh({name: x.clone() for name, x in self.inputs.items()}),
             None if self.gradient is None else self.gradient.clone())
            for _ in range(count)
        ]  # fmt: skip

    def fresh(self, inputs: Inputs) -> Inputs:
        """Leaves of the same memory, which want gradients if there is a backward."""
        if not self.kernel.has_backward:
            return {name: x.detach() for name, x in inputs.items()}
        return {name: x.detach().requires_grad_(x.is_floating_point()) for name, x in inputs.items()}

    def forward(self, call: Call, inputs: Inputs) -> dict[str, Tensor]:
        """The outputs by name, without gradients."""
        with torch.no_grad():
            return dict(zip(self.kernel.outputs, call(**inputs), strict=False))

    def forward_backward(self, call: Call, inputs: Inputs, gradient: Tensor) -> dict[str, Tensor]:
        """The outputs, and as dNAME the inputs' gradients; the autograd graph ends with the call."""
        outputs = call(**inputs)
        leaves = {name: x for name, x in inputs.items() if x.requires_grad}
        gradients = torch.autograd.grad(outputs[0], [*leaves.values()], gradient)
        found = {name: x.detach() for name, x in zip(self.kernel.outputs, outputs, strict=False)}
        return found | {f"d{name}": x for name, x in zip(leaves, gradients, strict=True)}

    def results(self, call: Call, inputs: Inputs, gradient: Tensor | None) -> dict[str, Tensor]:
        """All that a call computes, of copies of the inputs."""
        inputs = self.fresh({name: x.clone() for name, x in inputs.items()})
        if self.shape.device.type == "cuda":
            torch.cuda.synchronize()  # a kernel may read early what it is told that nothing writes any more
        if gradient is None:
            return self.forward(call, inputs)
        return self.forward_backward(call, inputs, gradient)

    def errors(self, call: Call) -> dict[str, float]:
        """The largest |found - exact| / |exact| of each result, or difference where that is zero; inf if not finite."""
        results = self.results(call, self.inputs, self.gradient)
        errors = {name: 0.0 if x.isfinite().all() else inf for name, x in results.items()}
        for row, head, tensors in self._exact:
            for name, found in results.items():
                exact = tensors[name]
                difference = self._part(name.removeprefix("d"), found, row, head).to(exact.dtype) - exact
                errors[name] = max(errors[name], (difference.norm() / (exact.norm().item() or 1.0)).item())
        return errors

    @cached_property
    def _exact(self) -> list[tuple[int, int, dict[str, Tensor]]]:
        """Row, head, and their results in float64, of the first ones and the last."""
        places = dict.fromkeys([(0, 0), (self.shape.batch_size - 1, self.shape.num_heads - 1)])
        if not self._cut:
            places = [(0, 0)]
        make = self.kernel.reference
        if self.kernel.exact and self.shape.length > REFERENCE_LENGTH:
            make = self.kernel.exact
        return [(*place, self._compute(make(self.shape), *place)) for place in places]

    def _compute(self, call: Call, row: int, head: int) -> dict[str, Tensor]:
        inputs = {name: _double(self._part(name, x, row, head)) for name, x in self.inputs.items()}
        if self.gradient is None:
            return self.results(call, inputs, None)
        return self.results(call, inputs, _double(self._part(self.kernel.outputs[0], self.gradient, row, head)))

    @cached_property
    def _cut(self) -> set[str]:
        """B and H if no result of a row or a head depends on others: if every input has the dimension."""
        return {letter for letter in "BH" if all(letter in self.kernel.layouts[name] for name in self.inputs)}

    def _part(self, name: str, x: Tensor, row: int, head: int) -> Tensor:
        """A row and head of a tensor, or all where results depend on all."""
        layout = self.kernel.layouts[name]
        for letter, index in (("B", row), ("H", head)):
            if letter in self._cut:
                x = x.narrow(layout.index(letter), index, 1)
        return x


def _double(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x
