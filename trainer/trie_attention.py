"""Attention over a token trie, segment by segment.

The keys of a segment are seen by its own tokens, causally, and by all their descendants, wholly.
Both are contiguous stretches of the layout, so the attention of a whole trie is two calls of an
ordinary fused attention for each segment, over slices, without a copy and without a mask: the work
is that of the samples' own attention with every pair of tokens computed once. What different
segments give to one query is put together by the sums of their exponentials, as FlashAttention
does with its blocks (Dao et al. 2022); so is the backward pass, each call under the final sums.

On CUDA, FlexAttention does the same in one kernel: `trainer.flex_attention`.
"""

from typing import Any, cast

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from trainer import flex_attention
from trainer.packing import Segment, Trie

NAME = "strop_trie"
"""What models are told to attend with; without a trie it is torch's own attention."""

_UNSEEN = -1e30
"""Finite, so that a query for which a window hides all of a segment has a sum, of weight 0."""

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class _TrieAttention(torch.autograd.Function):
    """Inputs: queries (G, J, N, D), keys and values (G, N, D): J query heads share one of keys."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        trie: Trie,
        scale: float,
        window: int | None,
    ) -> Tensor:
        groups, shared, tokens, width = query.shape
        # Every token is in the segment it belongs to, so all of both is written. Heads lie beside
        # each other, as the next layer reads them, so that it needs no copy and keeps none.
        exact = torch.promote_types(query.dtype, torch.float32)
        laid = query.new_empty((tokens, groups, shared, width), dtype=exact)
        out = laid.permute(1, 2, 0, 3)
        total = out.new_empty((groups, shared, tokens))
        for segment in trie.segments:
            keys, values = (_shared(t, segment, shared) for t in (key, value))
            for part, causal in _parts(segment):
                seen, logs = _forward(
                    query[:, :, part],
                    keys,
                    values,
                    0.0,
                    causal,
                    attn_mask=_window_mask(trie, segment, part, window, query.dtype),
                    scale=scale,
                )
                if segment.depth == 0:
                    # The first keys that these queries see.
                    out[:, :, part], total[:, :, part] = seen, logs
                else:
                    _add(out[:, :, part], total[:, :, part], seen, logs)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, total)
        ctx.trie, ctx.scale, ctx.window = trie, scale, window
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, total = cast(tuple[Tensor, ...], ctx.saved_tensors)
        trie, shared = ctx.trie, query.shape[1]
        grad_query = torch.zeros(query.shape, dtype=total.dtype)
        grad_key, grad_value = (torch.zeros(t.shape, dtype=total.dtype) for t in (key, value))
        for segment in trie.segments:
            own = slice(segment.start, segment.stop)
            keys, values = (_shared(t, segment, shared) for t in (key, value))
            for part, causal in _parts(segment):
                to_query, to_keys, to_values = _backward(
                    grads[0][:, :, part],
                    query[:, :, part],
                    keys,
                    values,
                    out[:, :, part],
                    total[:, :, part],
                    0.0,
                    causal,
                    attn_mask=_window_mask(trie, segment, part, ctx.window, query.dtype),
                    scale=ctx.scale,
                )
                grad_query[:, :, part] += to_query
                grad_key[:, own] += to_keys.sum(1)
                grad_value[:, own] += to_values.sum(1)
        return (
            grad_query.to(query.dtype),
            grad_key.to(key.dtype),
            grad_value.to(value.dtype),
            None,
            None,
            None,
        )


def _parts(segment: Segment) -> list[tuple[slice, bool]]:
    """Who sees the keys of a segment: itself, causally, and what descends from it."""
    parts = [(slice(segment.start, segment.stop), True)]
    if segment.end > segment.stop:
        parts.append((slice(segment.stop, segment.end), False))
    return parts


def _shared(tensor: Tensor, segment: Segment, heads: int) -> Tensor:
    """Keys or values of a segment, (G, n, D) → (G, J, n, D) without a copy."""
    return tensor[:, None, segment.start : segment.stop].expand(-1, heads, -1, -1)


def _add(out: Tensor, total: Tensor, seen: Tensor, logs: Tensor) -> None:
    """Put attention over further keys together with what was seen before, in place."""
    both = torch.logaddexp(total, logs)
    out.mul_(torch.exp(total - both)[..., None]).addcmul_(
        seen.to(out.dtype), torch.exp(logs - both)[..., None]
    )
    total.copy_(both)


def _window_mask(
    trie: Trie, segment: Segment, part: slice, window: int | None, dtype: torch.dtype
) -> Tensor | None:
    """0 where a query is less than `window` deeper than a key; None where all of them are."""
    if window is None:
        return None
    keys = trie.position_ids[segment.start : segment.stop]
    queries = trie.position_ids[part]
    if int(queries.max()) - segment.depth < window:
        return None
    far = queries[:, None] - keys[None, :] >= window
    return torch.zeros(far.shape, dtype=dtype).masked_fill_(far, _UNSEEN)[None, None]


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    trie: Trie | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention that transformers calls: queries (1, H, N, D) → (1, N, H, D).

    Raises:
        NotImplementedError: the layer wants something of its attention that is not computed here.
    """
    if trie is None:
        return cast(
            tuple[Tensor, None],
            sdpa_attention_forward(
                module,
                query,
                key,
                value,
                attention_mask,
                scaling=scaling,
                dropout=dropout,
                **options,
            ),
        )
    for name in ("softcap", "s_aux", "position_bias"):
        if options.get(name) is not None:
            raise NotImplementedError(f"attention over a trie has no {name}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    by = flex_attention.attend if query.is_cuda else by_segments
    out = by(trie, query, key, value, scale, sliding_window)
    return out.transpose(1, 2).contiguous(), None


def by_segments(
    trie: Trie, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
) -> Tensor:
    """Attention on a CPU: queries (1, H, N, D), keys and values (1, G, N, D) → (1, H, N, D)."""
    _, heads, tokens, width = query.shape
    groups = key.shape[1]
    grouped = query[0].view(groups, heads // groups, tokens, width)
    out = cast(Any, _TrieAttention.apply)(grouped, key[0], value[0], trie, scale, window)
    return cast(Tensor, out).reshape(1, heads, tokens, width)


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
