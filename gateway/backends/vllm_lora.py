"""LoRA on CPU as matrix products: loaded by the vLLM that strop starts, as a plugin of vLLM's.

vLLM's own way on CPU (`vllm/lora/ops/torch_ops`, 0.32) copies the adapter once per token before it
multiplies: 10 MB a token for rank 8 on all layers of a model of 135 million parameters, written and
read again. Here the tokens of a batch are parted by adapter once per forward, and each layer
multiplies the rows of each adapter with that adapter's matrices where they lie.

Two faults of vLLM's own way are gone with it. Rows without an adapter (index -1) stay as the base
made them, where it takes the last slot's adapter for them (vllm-project/vllm#48421). And a request
for `prompt_logprobs`, such as the publisher's probe of a version, may share a batch with others:
there its own way takes the prompt's rows for those of the batch's samples, and the engine dies.

Tensors come from vLLM; torch itself is not imported, as nowhere in the gateway.
"""

import logging
from collections.abc import Sequence
from typing import Any

log = logging.getLogger("vllm.strop")

Tensor = Any
Rows = Any
"""A slice of the batch's rows, or a tensor of their numbers where they do not lie together."""


def register() -> None:
    """Put the products in the place of vLLM's; called by vLLM once in each of its processes."""
    try:
        from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
    except ImportError as error:
        log.warning("this vLLM has no LoRA wrapper for CPUs to speed up: %s", error)
        return
    if hasattr(PunicaWrapperCPU, "rows_by_adapter"):
        return
    PunicaWrapperCPU.rows_by_adapter = PunicaWrapperCPU.samples_by_adapter = ()
    own_update = PunicaWrapperCPU.update_metadata

    def update_metadata(self: Any, *args: Any, **kwargs: Any) -> None:
        own_update(self, *args, **kwargs)
        self.rows_by_adapter = part(self.token_lora_indices)
        self.samples_by_adapter = part(self.sampler_indices)

    def add_lora_linear(
        self: Any,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        *,
        buffer: Any = None,
        **kwargs: Any,
    ) -> None:
        x, y = x.view(-1, x.shape[-1]), y.view(-1, y.shape[-1])
        add(self.rows_by_adapter, y, x, lora_a_stacked, lora_b_stacked, scale, output_slices)

    def add_lora_logits(
        self: Any,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: Tensor,
        lora_b_stacked: Tensor,
        scale: float,
        *,
        buffer: Any = None,
        **kwargs: Any,
    ) -> None:
        x, y = x.view(-1, x.shape[-1]), y.view(-1, y.shape[-1])
        samples = self.samples_by_adapter
        if x.shape[0] != len(self.sampler_indices):
            samples = of_one_prompt(self.sampler_indices, lora_b_stacked)
        # The logits may be padded, or cut, to another number of entries than the adapter's.
        width = min(y.shape[-1], lora_b_stacked.shape[-2])
        add(samples, y, x, (lora_a_stacked,), (lora_b_stacked[..., :width, :],), scale, (width,))

    PunicaWrapperCPU.update_metadata = update_metadata
    PunicaWrapperCPU.add_lora_linear = add_lora_linear
    PunicaWrapperCPU.add_lora_logits = add_lora_logits
    log.info("LoRA on CPU: one product per adapter")


def of_one_prompt(slots: Tensor, b_stacked: Tensor) -> list[tuple[int, Rows]]:
    """The adapter of a prompt's rows at the LM head, by what the batch's samples have.

    vLLM does not tell there whose prompt it is.

    Raises:
        NotImplementedError: several adapters are in the batch, and one changes the LM head.
    """
    found = part(slots)
    if not b_stacked.any():
        return []
    if len(set(slots.tolist())) > 1:
        raise NotImplementedError(
            "prompt_logprobs in a batch of several adapters that change the LM head"
        )
    return [(slot, slice(None)) for slot, _ in found]


def part(adapter_of_row: Tensor) -> list[tuple[int, Rows]]:
    """The rows of each adapter in a batch, from the adapter's slot of each row (-1: none)."""
    runs: dict[int, list[slice]] = {}
    slots = adapter_of_row.tolist()
    start = 0
    for end in range(1, len(slots) + 1):
        if end == len(slots) or slots[end] != slots[start]:
            runs.setdefault(slots[start], []).append(slice(start, end))
            start = end
    return [
        (slot, of_slot[0] if len(of_slot) == 1 else (adapter_of_row == slot).nonzero()[:, 0])
        for slot, of_slot in runs.items()
        if slot >= 0
    ]


def add(
    rows_by_adapter: Sequence[tuple[int, Rows]],
    y: Tensor,
    x: Tensor,
    a_stacked: tuple[Tensor, ...],
    b_stacked: tuple[Tensor, ...],
    scale: float,
    output_slices: tuple[int, ...],
) -> None:
    """Add each row's adapter to a layer's output, in place: y += scale · x Aᵀ Bᵀ.

    Args:
        y: (N, sum of O) output of the base layer.
        x: (N, I) its input.
        a_stacked: per slice of the output (S, 1, R, I), by slot of the adapter.
        b_stacked: per slice of the output (S, 1, O, R).
        output_slices: O of each.
    """
    for slot, rows in rows_by_adapter:
        of_adapter = x[rows]
        start = 0
        for a, b, width in zip(a_stacked, b_stacked, output_slices, strict=True):
            # As vLLM does: the small side in float32, the large one in the layer's own type.
            small = (of_adapter.float() @ a[slot, 0].float().T).to(y.dtype)
            into = y[:, start : start + width]
            large = b[slot, 0].to(y.dtype).T
            if isinstance(rows, slice):
                into[rows].addmm_(small, large, alpha=scale)
            else:
                into.index_add_(0, rows, small @ large, alpha=scale)
            start += width
