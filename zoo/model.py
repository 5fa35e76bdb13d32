"""The language model: embedding, blocks, norm, head.

Shapes: B batch, T sequence length, D model width, V vocabulary, N documents.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zoo import components, registry
from zoo.config import ModelConfig
from zoo.generation import generate
from zoo.kernels.packing import can_read_values, check_cu_seqlens
from zoo.kernels.precision import layers_dtype
from zoo.loss import IGNORED, ChunkGradients, linear_cross_entropy
from zoo.mixers.context import Context
from zoo.mixers.contract import Mixer, State
from zoo.state import check_lengths, check_state

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["LanguageModel"]


class LanguageModel(nn.Module):
    """A stack of blocks between an embedding and a head.

    Args:
        config: resolved configuration.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.vocab_size = config.vocab_size
        self.activation_checkpointing = config.activation_checkpointing
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(components.make("block", layer, config.dim) for layer in config.layers)
        self.norm = components.make("norm", config.norm, config.dim)
        self.head = None if config.tie_embeddings else nn.Linear(config.dim, config.vocab_size, bias=False)
        self.chunk_gradients = ChunkGradients()
        self.lacking = _lacking(config)
        self.shared = tuple(dict.fromkeys(shared for mixer in self.mixers() for shared in mixer.shared))
        self.reset_parameters()

    def mixers(self) -> list[Mixer]:
        """Every mixer, first layer first."""
        return [module for module in self.modules() if isinstance(module, Mixer)]

    def reset_parameters(self) -> None:
        """Initialise: normal with std 0.02, divided by sqrt(2 L) where a layer writes to the residual stream.

        Modules with parameters of another kind (norms, convolutions) start as their own ``reset_parameters`` says.
        """
        residual_std = 0.02 / (2 * len(self.blocks)) ** 0.5
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=residual_std if name.endswith(".out_proj") else 0.02)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif module is not self and callable(reset := getattr(module, "reset_parameters", None)):
                reset()

    @overload
    def forward(self, tokens: Tensor, labels: Tensor | None = None, *, cu_seqlens: Tensor | None = None) -> Tensor: ...
    @overload
    def forward(
        self, tokens: Tensor, *, state: "TensorDict", lengths: Tensor | None = None, last: bool = False
    ) -> "tuple[Tensor, TensorDict]": ...
    @overload
    def forward(
        self, tokens: Tensor, *, max_length: int, lengths: Tensor | None = None, last: bool = False
    ) -> "tuple[Tensor, TensorDict]": ...
    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        state: "TensorDict | None" = None,
        max_length: int | None = None,
        lengths: Tensor | None = None,
        last: bool = False,
    ) -> "Tensor | tuple[Tensor, TensorDict]":
        """Logits, or the loss where there are labels, or logits and the next state in decoding.

        Decoding goes on from a state, or with ``max_length`` begins with one: ``model(tokens, max_length=n)`` is
        ``model(tokens, state=model.init_state(B, n))``, but knows that there is nothing before these tokens, so that
        attention is as fast as without a state. It takes no gradients. A state is consumed: its tensors are updated in
        place, views of them too, and are those of the state that is returned; `state.clone()` keeps a copy.

        Args:
            tokens: [B, T] int64 in [0, V).
            labels: [B, T] int64: the target at each position (nothing is shifted), -100 to ignore it.
            cu_seqlens: [N + 1] int32, 0 first and T last, when B = 1 row holds N packed documents.
            state: from `init_state` or an earlier call, of the tokens before these.
            max_length: the most tokens that the new state will ever hold.
            lengths: [B] int64 from 0 to T, decoding: how many tokens of each row are there, the first ones. What stands
                after them never reaches the state, and their logits mean nothing. All are if None.
            last: decoding: whether only the logits of each row's last token are wanted.

        Returns:
            logits [B, T, V], or [B, 1, V] with ``last``; or the mean loss over the labels, an fp32 scalar; or
            (logits, state).

        Raises:
            ValueError: an argument is not as above. Values are checked in eager calls on the CPU.
        """
        decodes = state is not None or max_length is not None
        self._check(tokens, labels, cu_seqlens)
        if decodes and (labels is not None or cu_seqlens is not None):
            raise ValueError("state: decoding takes neither labels nor cu_seqlens")
        if decodes:
            with torch.no_grad():
                return self._decode(tokens, self._check_state(tokens, state, max_length, lengths), state, lengths, last)
        if lengths is not None or last:
            raise ValueError("lengths, last: expected only in decoding, with state or max_length")
        embedded = self._embed(tokens)
        context = Context.from_tokens(tokens, cu_seqlens, dtype=layers_dtype(embedded)).share(self.shared)
        hidden = self._run(embedded, context, [None] * len(self.blocks))[0]
        if labels is not None:
            alone = None if torch.compiler.is_compiling() else self.chunk_gradients
            return linear_cross_entropy(hidden.flatten(0, 1), self._head_weight(), labels.flatten(), alone)
        return nn.functional.linear(hidden, self._head_weight())

    def loss(self, tokens: Tensor, labels: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """``model(tokens, labels=labels)``, for use without a wrapper: torch.compile, DDP and FSDP see only forward."""
        return self(tokens, labels=labels, cu_seqlens=cu_seqlens)

    generate = generate

    def _embed(self, tokens: Tensor) -> Tensor:
        return nn.functional.embedding(tokens, self.embedding.weight)  # its own forward reads floats: `StaticFloat`

    def _head_weight(self) -> Tensor:
        return self.embedding.weight if self.head is None else self.head.weight

    def _decode(
        self, tokens: Tensor, room: int, given: "TensorDict | None", lengths: Tensor | None, last: bool
    ) -> "tuple[Tensor, TensorDict]":
        """Logits, and the state, updated in place; a new one where none was given."""
        state = self.init_state(tokens.shape[0], room) if given is None else given
        embedded = self._embed(tokens)
        fresh, dtype = given is None, layers_dtype(embedded)
        context = Context.from_state(tokens, state["positions"], room, lengths=lengths, fresh=fresh, dtype=dtype)
        layers: list[State] = [dict(state["layers", str(i)].items()) for i in range(len(self.blocks))]
        hidden, following = self._run(embedded, context.share(self.shared), layers)
        for old, new in zip(layers, following, strict=True):
            for name, tensor in (new or {}).items():
                if tensor is not old[name]:  # a mixer may make new tensors
                    old[name].copy_(tensor)
        if last:
            hidden = _last(hidden, lengths)
        logits = nn.functional.linear(hidden, self._head_weight())
        state["positions"].add_(tokens.shape[1] if lengths is None else lengths)
        return logits, state

    def _run(self, x: Tensor, context: Context, states: Sequence[State | None]) -> tuple[Tensor, list[State | None]]:
        following: list[State | None] = []
        for block, state in zip(self.blocks, states, strict=True):
            if self.activation_checkpointing and state is None and torch.is_grad_enabled():
                x, state = checkpoint(block, x, context, use_reentrant=False)  # pyright: ignore[reportGeneralTypeIssues]
            else:
                x, state = block(x, context, state)
            following.append(state)
        return self.norm(x), following

    def init_state(self, batch_size: int, max_length: int) -> "TensorDict":
        """The state of ``batch_size`` sequences before their first token, on the model's device.

        Args:
            batch_size: B.
            max_length: the most tokens that a sequence will have.

        Returns:
            A TensorDict of batch size [B]: ``positions`` [B] int64, and the tensors of each layer, [B, ...] each.

        Raises:
            ValueError: a number below 1, or a mixer that cannot decode.
        """
        from tensordict import TensorDict  # loads half of the compiler

        for name, value in (("batch_size", batch_size), ("max_length", max_length)):
            if value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")
        self._require("decode", "init_state")
        device, dtype = self.embedding.weight.device, self.embedding.weight.dtype
        layers = {str(i): layer for i, layer in enumerate(self._first_states(batch_size, max_length, device, dtype))}
        values: dict[str, Any] = {
            "positions": torch.zeros(batch_size, dtype=torch.int64, device=device),
            "room": torch.zeros(batch_size, max_length, 0, device=device),  # no bytes: its shape carries max_length
            "layers": layers,
        }
        return TensorDict(values, batch_size=[batch_size], device=device)

    def crop(self, state: "TensorDict", length: int) -> "TensorDict":
        """Go back to an earlier position: each row forgets what came after its first ``length`` tokens.

        Full attention can, and the Deltaformer without a convolution; a sliding window as long as it has lost no
        token. What keeps only a sum of the past cannot. Reads positions on the host.

        Args:
            state: is consumed.
            length: of every row that is longer.

        Raises:
            ValueError: the length is negative, or some layer cannot go back.
        """
        if length < 0:
            raise ValueError(f"length: expected at least 0, got {length}")
        self._room(state, state.batch_size[0])
        seen = int(state["positions"].max())
        for index, mixer in enumerate(self._outermost()):
            if length < seen and length < mixer.earliest(seen):
                options: Any = self.config.layers[index].options
                name = options.mixer.name
                raise ValueError(
                    f"length: layer {index}'s mixer {name!r} cannot go back from {seen} tokens to {length}"
                )
        state["positions"].clamp_(max=length)
        return state

    def _outermost(self) -> list[Mixer]:
        """Of each block its mixer, which may hold further mixers itself."""
        return [next(part for part in block.modules() if isinstance(part, Mixer)) for block in self.blocks]

    def _first_states(self, *args: Any) -> list[State]:
        return [mixer.init_state(*args) for mixer in self._outermost()]

    def _require(self, capability: str, wanted_by: str) -> None:
        if capability in self.lacking:
            raise ValueError(f"{wanted_by}: {self.lacking[capability]} does not support {capability!r}")

    def _check(self, tokens: Tensor, labels: Tensor | None, cu_seqlens: Tensor | None) -> None:
        if tokens.ndim != 2 or 0 in tokens.shape or tokens.dtype != torch.int64:
            raise ValueError(f"tokens: expected [B, T] int64, not empty, got {list(tokens.shape)} {tokens.dtype}")
        if labels is not None and (labels.shape != tokens.shape or labels.dtype != torch.int64):
            raise ValueError(f"labels: expected {list(tokens.shape)} int64, got {list(labels.shape)} {labels.dtype}")
        if cu_seqlens is not None:
            self._require("packed", "cu_seqlens")
            check_cu_seqlens(cu_seqlens, batch_size=tokens.shape[0], length=tokens.shape[1], device=tokens.device)
        if can_read_values(tokens):
            self._check_ids("tokens", tokens)
            if labels is not None:
                self._check_ids("labels", labels[labels != IGNORED])

    def _check_state(
        self, tokens: Tensor, state: "TensorDict | None", max_length: int | None, lengths: Tensor | None
    ) -> int:
        """The most tokens that the state holds.

        Raises:
            ValueError: it is not this model's, or has no room, or the lengths are not as they should be.
        """
        (batch_size, length), readable = tokens.shape, can_read_values(tokens)
        if lengths is not None:
            check_lengths(lengths, tokens)
        longest = length if lengths is None or not readable else int(lengths.max())
        if state is None:
            if isinstance(max_length, bool) or not isinstance(max_length, (int, torch.SymInt)) or max_length < longest:
                raise ValueError(f"max_length: expected at least the T = {longest} of the tokens, got {max_length}")
            return max_length  # pyright: ignore[reportReturnType]
        if max_length is not None:
            raise ValueError("max_length: expected none with a state, which has its own")
        room = self._room(state, batch_size)
        if readable:
            new = longest if lengths is None else lengths
            needed = int((state["positions"] + new).max())
            if needed > room:
                raise ValueError(f"state: it has room for max_length = {room} tokens, these would make {needed}")
        return room

    def _room(self, state: "TensorDict", batch_size: int) -> int:
        """The most tokens that a state of this model holds, which it is checked to be."""
        weight = self.embedding.weight
        meta = torch.device("meta")
        return check_state(
            state, batch_size, lambda room: self._first_states(batch_size, room, meta, weight.dtype), weight.device
        )

    def _check_ids(self, name: str, ids: Tensor) -> None:
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.vocab_size:
            raise ValueError(
                f"{name}: expected ids from 0 to {self.vocab_size - 1}, got {int(ids.min())} to {int(ids.max())}"
            )


def _last(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Of x [B, T, D] each row's last token [B, 1, D]."""
    if lengths is None:
        return x[:, -1:]
    index = (lengths - 1).clamp(min=0)[:, None, None]
    return x.gather(1, index.expand(-1, 1, x.shape[2]))


def _lacking(config: ModelConfig) -> dict[str, str]:
    """The capabilities that some mixer lacks, and the first that does; looked up here, since a graph cannot."""
    lacking: dict[str, str] = {}
    for index, layer in enumerate(config.layers):
        mixer = getattr(layer.options, "mixer", None)
        if mixer is not None:
            for capability in set(registry.CAPABILITIES) - set(registry.find("mixer", mixer.name).supports):
                lacking.setdefault(capability, f"layer {index}'s mixer {mixer.name!r}")
    return lacking
