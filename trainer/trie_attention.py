"""Attention over a token trie, segment by segment.

Each segment of the trie attends to the keys of its own path from the root and to nothing else, so
the work is that of the samples' own attention with every shared query computed once. A dense mask
would spend N^2 instead, most of it on pairs that do not see each other. The backward pass computes
the probabilities again, as FlashAttention does (Dao et al. 2022), so what is kept between the two
is linear in N. Softmax and its sums are in float32 whatever the model's type.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from trainer.packing import Segment, Trie

NAME = "strop_trie"
"""What models are told to attend with; without a trie it is torch's own attention."""

_Saved = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


class _TrieAttention(torch.autograd.Function):
    """Inputs: queries (H, N, D), keys and values (G, N, D) with G dividing H."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        segments: list[Segment],
        scale: float,
        window: int | None,
    ) -> Tensor:
        out = torch.empty_like(query)
        heads, tokens, _ = query.shape
        normaliser = query.new_empty((heads, tokens), dtype=torch.float32)
        for segment in segments:
            part = slice(segment.start, segment.stop)
            scores = _scores(query[:, part], key[:, segment.path], segment, scale, window)
            total = torch.logsumexp(scores, dim=-1, keepdim=True)
            normaliser[:, part] = total.reshape(heads, -1)
            weights = torch.exp(scores - total).to(value.dtype)
            out[:, part] = _ungroup(weights @ value[:, segment.path], heads)
        ctx.save_for_backward(query, key, value, out, normaliser)
        ctx.segments, ctx.scale, ctx.window = segments, scale, window
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        query, key, value, out, normaliser = cast(_Saved, ctx.saved_tensors)
        heads, groups = query.shape[0], key.shape[0]
        grad_query = torch.empty_like(query)
        grad_key = torch.zeros(key.shape, dtype=torch.float32, device=key.device)
        grad_value = torch.zeros_like(grad_key)
        # Row sums of weights * d(weights), which the derivative of a softmax needs.
        inner = (grad * out).sum(-1, dtype=torch.float32)
        for segment in ctx.segments:
            part, path = slice(segment.start, segment.stop), segment.path
            keys, values = key[:, path], value[:, path]
            asked, given = _group(query[:, part], groups), _group(grad[:, part], groups)
            scores = _scores(query[:, part], keys, segment, ctx.scale, ctx.window)
            weights = torch.exp(scores - normaliser[:, part].reshape(groups, -1, 1))
            grad_value.index_add_(
                1, path, (weights.to(given.dtype).transpose(1, 2) @ given).float()
            )
            slope = (given @ values.transpose(1, 2)).float()
            slope = (slope - inner[:, part].reshape(groups, -1, 1)) * weights * ctx.scale
            slope = slope.to(key.dtype)
            grad_query[:, part] = _ungroup(slope @ keys, heads)
            grad_key.index_add_(1, path, (slope.transpose(1, 2) @ asked).float())
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), None, None, None


def _group(tensor: Tensor, groups: int) -> Tensor:
    """(H, n, D) → (G, H / G * n, D): query heads that share a key head side by side."""
    return tensor.reshape(groups, -1, tensor.shape[-1])


def _ungroup(tensor: Tensor, heads: int) -> Tensor:
    return tensor.reshape(heads, -1, tensor.shape[-1])


def _scores(
    query: Tensor, keys: Tensor, segment: Segment, scale: float, window: int | None
) -> Tensor:
    """Scaled scores of a segment's queries against its path, (G, H / G * n, D), -inf if unseen."""
    groups, depth = keys.shape[0], keys.shape[1]
    own = segment.stop - segment.start
    scores = (_group(query, groups) @ keys.transpose(1, 2)).float() * scale
    seen_by = scores.view(groups, -1, own, depth)
    # Query i of the segment is at depth `depth - own + i` and sees no deeper key ...
    later = torch.ones((own, own), dtype=torch.bool, device=keys.device).triu_(1)
    seen_by[..., depth - own :].masked_fill_(later, -torch.inf)
    if window is not None and depth > window:
        # ... and in a layer with a sliding window none further away than that.
        far = torch.ones((own, depth), dtype=torch.bool, device=keys.device)
        seen_by.masked_fill_(far.tril_(depth - own - window), -torch.inf)
    return scores


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
    apply = cast(Callable[..., Tensor], _TrieAttention.apply)
    out = apply(query[0], key[0], value[0], trie.segments, scale, sliding_window)
    return out.transpose(0, 1).contiguous()[None], None


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
