"""How a model's width is cut into heads, for every mixer alike."""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Self

from zoo.mixers.options import AtLeast, OptionError, Options

__all__ = ["HeadOptions"]


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadOptions(Options):
    """Number and size of the heads.

    Attributes:
        num_heads: query heads. Alone, it must divide the model's width; without it the width over `typical_head_dim`.
        head_dim: size of a head. With num_heads, the inner width is their product.
        num_kv_heads: key/value heads, dividing num_heads; as many if None.
    """

    typical_head_dim: ClassVar[int] = 64

    num_heads: Annotated[int, AtLeast(1)] | None = None
    head_dim: Annotated[int, AtLeast(1)] | None = None
    num_kv_heads: Annotated[int, AtLeast(1)] | None = None

    def resolve(self, dim: int) -> Self:
        """The same options with all three numbers filled in.

        Raises:
            OptionError: the heads do not divide the width, or the key/value heads the heads.
        """
        num_heads = self.num_heads or max(1, dim // (self.head_dim or self.typical_head_dim))
        if self.head_dim is None and dim % num_heads:
            default = "" if self.num_heads else f" (the default, {num_heads}, is none)"
            allowed = f"a divisor of dim = {dim}{default}, or give head_dim as well"
            raise OptionError("num_heads", self.num_heads, allowed)
        num_kv_heads = self.num_kv_heads or num_heads
        if num_heads % num_kv_heads:
            raise OptionError("num_kv_heads", num_kv_heads, f"a divisor of num_heads = {num_heads}")
        return replace(self, num_heads=num_heads, head_dim=self.head_dim or dim // num_heads, num_kv_heads=num_kv_heads)

    @property
    def heads(self) -> tuple[int, int, int]:
        """num_heads, num_kv_heads and head_dim of resolved options."""
        assert self.num_heads is not None, "resolve(dim) comes first"
        assert self.num_kv_heads is not None
        assert self.head_dim is not None
        return self.num_heads, self.num_kv_heads, self.head_dim
