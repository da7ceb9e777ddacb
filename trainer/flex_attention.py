"""Attention over a token trie on CUDA: FlexAttention with a block mask.

The mask is the trie's rule (`trainer.packing`). Blocks of it that are empty are skipped, so the
work grows with the pairs of tokens that see each other, and nothing of N x N is ever held.
"""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers.integrations.flex_attention import compile_friendly_flex_attention

from trainer.packing import Trie

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def attend(
    trie: Trie, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
) -> Tensor:
    """Queries (1, H, N, D), keys and values (1, G, N, D) → (1, H, N, D)."""
    heads, groups = query.shape[1], key.shape[1]
    if heads & (heads - 1):
        # The kernel takes shared keys for numbers of heads that are powers of two only.
        key, value = (t.repeat_interleave(heads // groups, dim=1) for t in (key, value))
    out = compile_friendly_flex_attention(
        query,
        key,
        value,
        block_mask=block_mask(trie, window),
        enable_gqa=key.shape[1] != heads,
        scale=scale,
        training=torch.is_grad_enabled(),
    )
    return cast(Tensor, out)


def block_mask(trie: Trie, window: int | None) -> BlockMask:
    """The block mask of a trie, made once for all layers with the same window."""
    kept: dict[int | None, BlockMask] = trie.masks
    if window not in kept:
        tokens = len(trie.input_ids)
        device = trie.input_ids.device
        kept[window] = create_block_mask(
            rule(trie, window),
            None,
            None,
            tokens,
            tokens,
            device=str(device),
            _compile=device.type == "cuda",
        )
    return kept[window]


def rule(trie: Trie, window: int | None) -> Rule:
    """Whether a query sees a key, as FlexAttention asks it: an ancestor within the window."""
    end, depth = trie.end, trie.position_ids

    def causal(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < end[key])

    if window is None:
        return causal

    def windowed(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < end[key]) & (depth[query] - depth[key] < window)

    return windowed
