"""The language model: embedding, blocks, norm, head.

Shapes: B batch, T sequence length, D model width, V vocabulary, N documents.
"""

from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zoo import components, registry
from zoo.config import ModelConfig
from zoo.kernels.packing import can_read_values, check_cu_seqlens
from zoo.kernels.precision import layers_dtype
from zoo.loss import IGNORED, linear_cross_entropy
from zoo.mixers.context import Context
from zoo.mixers.contract import Mixer, State

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["LanguageModel"]


def _forms(layers: list[State]) -> list[dict[str, list[int]]]:
    return [{key: list(layer[key].shape) for key in sorted(layer)} for layer in layers]


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
    def forward(self, tokens: Tensor, *, state: "TensorDict") -> "tuple[Tensor, TensorDict]": ...
    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        state: "TensorDict | None" = None,
    ) -> "Tensor | tuple[Tensor, TensorDict]":
        """Logits, or the loss where there are labels, or logits and the next state where there is a state.

        Args:
            tokens: [B, T] int64 in [0, V).
            labels: [B, T] int64: the target at each position (nothing is shifted), -100 to ignore it.
            cu_seqlens: [N + 1] int32, 0 first and T last, when B = 1 row holds N packed documents.
            state: from `init_state` or an earlier call, of the tokens before these. It is consumed.

        Returns:
            logits [B, T, V]; or the mean loss over the labels, an fp32 scalar; or (logits, state).

        Raises:
            ValueError: an argument is not as above. Values are checked in eager calls on the CPU.
        """
        self._check(tokens, labels, cu_seqlens, state)
        states: list[State | None] = [None] * len(self.blocks)
        embedded = nn.functional.embedding(tokens, self.embedding.weight)  # its own forward reads floats: `StaticFloat`
        if state is None:
            context = Context.from_tokens(tokens, cu_seqlens, dtype=layers_dtype(embedded))
        else:
            context = Context.from_state(tokens, state["positions"], state["room"].shape[1])
            states = [dict(state["layers", str(i)].items()) for i in range(len(self.blocks))]
        hidden, states = self._run(embedded, context.share(self.shared), states)
        weight = self.embedding.weight if self.head is None else self.head.weight
        if labels is not None:
            return linear_cross_entropy(hidden.flatten(0, 1), weight, labels.flatten())
        logits = nn.functional.linear(hidden, weight)
        return logits if state is None else (logits, self._advance(state, states, tokens.shape[1]))

    def loss(self, tokens: Tensor, labels: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """``model(tokens, labels=labels)``, for use without a wrapper: torch.compile, DDP and FSDP see only forward."""
        return self(tokens, labels=labels, cu_seqlens=cu_seqlens)

    def _run(self, x: Tensor, context: Context, states: list[State | None]) -> tuple[Tensor, list[State | None]]:
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

    def _first_states(self, *args: Any) -> list[State]:
        """Of each block's mixer, which may hold further mixers itself."""
        outermost = [next(part for part in block.modules() if isinstance(part, Mixer)) for block in self.blocks]
        return [mixer.init_state(*args) for mixer in outermost]

    def _advance(self, state: "TensorDict", layers: list[State | None], length: int) -> "TensorDict":
        from tensordict import TensorDict

        values: dict[str, Any] = {
            "positions": state["positions"] + length,
            "room": state["room"],
            "layers": {str(i): layer for i, layer in enumerate(layers)},
        }
        return TensorDict(values, batch_size=state.batch_size, device=state.device)

    def _require(self, capability: str, wanted_by: str) -> None:
        if capability in self.lacking:
            raise ValueError(f"{wanted_by}: {self.lacking[capability]} does not support {capability!r}")

    def _check(
        self, tokens: Tensor, labels: Tensor | None, cu_seqlens: Tensor | None, state: "TensorDict | None"
    ) -> None:
        if tokens.ndim != 2 or 0 in tokens.shape or tokens.dtype != torch.int64:
            raise ValueError(f"tokens: expected [B, T] int64, not empty, got {list(tokens.shape)} {tokens.dtype}")
        if labels is not None and (labels.shape != tokens.shape or labels.dtype != torch.int64):
            raise ValueError(f"labels: expected {list(tokens.shape)} int64, got {list(labels.shape)} {labels.dtype}")
        if state is not None and (labels is not None or cu_seqlens is not None):
            raise ValueError("state: decoding takes neither labels nor cu_seqlens")
        if cu_seqlens is not None:
            self._require("packed", "cu_seqlens")
            check_cu_seqlens(cu_seqlens, batch_size=tokens.shape[0], length=tokens.shape[1], device=tokens.device)
        if state is not None:
            self._check_state(tokens, state)
        if can_read_values(tokens):
            self._check_ids("tokens", tokens)
            if labels is not None:
                self._check_ids("labels", labels[labels != IGNORED])

    def _check_state(self, tokens: Tensor, state: "TensorDict") -> None:
        if state.batch_size != tokens.shape[:1]:
            raise ValueError(f"state: expected batch size {tokens.shape[0]}, got {list(state.batch_size)}")
        if can_read_values(tokens):
            room, longest = state["room"].shape[1], int(state["positions"].max()) + tokens.shape[1]
            expected = self._first_states(tokens.shape[0], room, torch.device("meta"), torch.float32)
            given = [dict(state["layers"].get(str(i), {}).items()) for i in range(len(state["layers"].keys()))]
            if _forms(given) != _forms(expected):
                raise ValueError(
                    f"state: expected one from this model's init_state, with {_forms(expected)}, got {_forms(given)}"
                )
            if longest > room:
                raise ValueError(f"state: it has room for max_length = {room} tokens, these would make {longest}")

    def _check_ids(self, name: str, ids: Tensor) -> None:
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.vocab_size:
            raise ValueError(
                f"{name}: expected ids from 0 to {self.vocab_size - 1}, got {int(ids.min())} to {int(ids.max())}"
            )


def _lacking(config: ModelConfig) -> dict[str, str]:
    """The capabilities that some mixer lacks, and the first that does; looked up here, since a graph cannot."""
    lacking: dict[str, str] = {}
    for index, layer in enumerate(config.layers):
        mixer = getattr(layer.options, "mixer", None)
        if mixer is not None:
            for capability in set(registry.CAPABILITIES) - set(registry.find("mixer", mixer.name).supports):
                lacking.setdefault(capability, f"layer {index}'s mixer {mixer.name!r}")
    return lacking
