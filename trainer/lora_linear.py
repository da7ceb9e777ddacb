"""An adapted linear layer as one operation.

y = x W' + b + s (x A') B', as PEFT computes it, but without intermediate results of the layer's
full width, and with the products for the derivatives of A and B turned so that their long side
lies where a CPU's matrix multiplication is quick. The weights stay PEFT's. An input that can be
made again (see `trainer.remade`) is not kept for the backward pass.
"""

from typing import Any, cast

import torch
from peft.tuners.lora import Linear
from torch import Tensor, nn

from trainer.remade import Origin, origin_of


class _Adapted(torch.autograd.Function):
    """Inputs (N, in) → (N, out); W (out, in), A (r, in), B (out, r)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor,
        b: Tensor,
        scale: float,
        origin: Origin | None,
    ) -> Tensor:
        inner = nn.functional.linear(x, a)
        out = nn.functional.linear(x, weight, bias)
        out.addmm_(inner, b.t(), alpha=scale)
        kept = (x,) if origin is None else origin.parts
        ctx.save_for_backward(weight, a, b, inner, *kept)
        ctx.scale, ctx.make = scale, None if origin is None else origin.make
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weight, a, b, inner, *kept = cast(tuple[Tensor, ...], ctx.saved_tensors)
        x = kept[0] if ctx.make is None else ctx.make(*kept).view(-1, a.shape[1])
        grad = grads[0]
        to_inner = nn.functional.linear(grad, b.t().contiguous()) * ctx.scale
        to_a = to_inner.t() @ x
        to_b = ((inner.t() @ grad) * ctx.scale).t()
        to_x = (grad @ weight).addmm_(to_inner, a) if ctx.needs_input_grad[0] else None
        return to_x, None, None, to_a, to_b, None, None


def speed_up(model: nn.Module, adapter: str = "default") -> int:
    """Make the plain LoRA layers of a PEFT model compute in one operation; returns how many.

    Layers that are more than that (dropout, DoRA, quantised or trained base weights, types that
    differ) are left as PEFT made them.
    """
    count = 0
    for layer in model.modules():
        if type(layer) is Linear and _plain(layer, adapter):
            # An instance's own forward goes before its class's.
            layer.forward = _forward(layer, adapter)
            count += 1
    return count


def _plain(layer: Any, adapter: str) -> bool:
    base = layer.get_base_layer()
    return (
        type(base) is nn.Linear
        and not base.weight.requires_grad
        and (base.bias is None or not base.bias.requires_grad)
        and list(layer.lora_A) == [adapter]
        and isinstance(layer.lora_dropout[adapter], nn.Identity)
        and not layer.lora_bias.get(adapter)
        and adapter not in getattr(layer, "lora_variant", {})
        and layer.lora_A[adapter].weight.dtype == base.weight.dtype
    )


def _forward(layer: Any, adapter: str) -> Any:
    usual = layer.forward

    def forward(x: Tensor, *arguments: Any, **options: Any) -> Tensor:
        base = layer.get_base_layer()
        unusual = arguments or options or layer.disable_adapters or layer.merged
        if unusual or x.dtype != base.weight.dtype or layer.active_adapters != [adapter]:
            return cast(Tensor, usual(x, *arguments, **options))
        out = cast(Any, _Adapted.apply)(
            x.reshape(-1, x.shape[-1]),
            base.weight,
            base.bias,
            layer.lora_A[adapter].weight,
            layer.lora_B[adapter].weight,
            layer.scaling[adapter],
            origin_of(x),
        )
        return cast(Tensor, out).view(*x.shape[:-1], -1)

    return forward
