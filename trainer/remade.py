"""Inputs of linear layers that are made again in the backward pass instead of being kept.

An adapted layer's derivative needs the layer's input. Where that is a norm of the residual stream,
or gate(x) * up(x), it is cheap to make from what the backward pass has at hand anyway, and it is
two fifths of what a decoder keeps of a token. So the output of such a part carries what it was made
of, and `trainer.lora_linear` keeps that in its place. What is made again is made by the same
operations of the same numbers: derivatives are the same to the bit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Origin:
    """What a tensor was made of, and how."""

    make: Callable[..., Tensor]
    """Called with the parts, outside of autograd."""
    parts: tuple[Tensor, ...]


def origin_of(tensor: Tensor) -> Origin | None:
    """What a tensor can be made of again; None where it has to be kept."""
    return cast(Origin | None, getattr(tensor, "strop_origin", None))


def _mark(tensor: Tensor, make: Callable[..., Tensor], *parts: Tensor) -> Tensor:
    if torch.is_grad_enabled() and tensor.requires_grad:
        # Without their history: autograd has that, and a tensor must not keep its own alive.
        cast(Any, tensor).strop_origin = Origin(make, tuple(part.detach() for part in parts))
    return tensor


def remake(model: nn.Module) -> int:
    """Mark the outputs of a model's norms and gated products; returns of how many parts.

    Norms with weights of their own to train, and feed-forward parts that are anything else than
    down(act(gate(x)) * up(x)), stay as they are.
    """
    count = 0
    for part in model.modules():
        if _is_norm(part):
            part.forward = _marked_norm(part)
            count += 1
        elif _is_gated(part):
            part.forward = _gated_forward(part)
            count += 1
    return count


def _is_norm(part: nn.Module) -> bool:
    norm = type(part) is nn.LayerNorm or type(part).__name__.endswith("RMSNorm")
    return norm and not any(weight.requires_grad for weight in part.parameters())


def _marked_norm(norm: Any) -> Callable[..., Tensor]:
    usual = norm.forward

    def forward(x: Tensor, *arguments: Any, **options: Any) -> Tensor:
        out = cast(Tensor, usual(x, *arguments, **options))
        return out if arguments or options else _mark(out, usual, x)

    return forward


def _is_gated(part: nn.Module) -> bool:
    """Whether its class computes down(act(gate(x)) * up(x)): tried on stand-ins for its layers.

    A class that looks at anything else of itself finds it missing.
    """
    if not all(hasattr(part, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")):
        return False
    layers: dict[str, Callable[[Tensor], Tensor]] = {
        "gate_proj": lambda x: 3 * x - 1,
        "up_proj": lambda x: 2 - x,
        "down_proj": lambda x: x * x + 0.5 * x,
    }
    x = torch.linspace(-2, 2, 15).view(3, 5)
    act = cast(Any, part).act_fn
    try:
        found = cast(Any, type(part)).forward(SimpleNamespace(**layers, act_fn=act), x)
        expected = layers["down_proj"](act(layers["gate_proj"](x)) * layers["up_proj"](x))
        return bool(torch.equal(found, expected))
    except (AttributeError, TypeError, RuntimeError):
        return False


def _gated_forward(mlp: Any) -> Callable[[Tensor], Tensor]:
    def make(gate: Tensor, up: Tensor) -> Tensor:
        return cast(Tensor, mlp.act_fn(gate) * up)

    def forward(x: Tensor) -> Tensor:
        gate, up = mlp.gate_proj(x), mlp.up_proj(x)
        product = cast(Tensor, cast(Any, _Gated.apply)(gate, up, mlp.act_fn))
        return cast(Tensor, mlp.down_proj(_mark(product, make, gate, up)))

    return forward


class _Gated(torch.autograd.Function):
    """act(gate) * up, of which only gate and up are kept."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, act: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.act = act
        return act(gate) * up

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = cast(tuple[Tensor, ...], ctx.saved_tensors)
        with torch.enable_grad():
            leaf = gate.detach().requires_grad_()
            active = ctx.act(leaf)
        (to_gate,) = torch.autograd.grad(active, leaf, grads[0] * up)
        return to_gate, grads[0] * active.detach(), None
