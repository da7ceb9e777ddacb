"""Samples of a step → one token trie, forwarded once per shared prefix.

The samples of a step share long beginnings: a system prompt, a group's prompt, the turns before a
fork. Laid out one sample a row, each beginning is computed once per sample; here, once.

Layout. Samples are sorted by their tokens, and each is appended without the beginning that it
shares with the one before it. After sorting that is the longest beginning it shares with *any*
earlier one, so the result is the trie of the samples with its nodes in depth-first order:

    samples   a b c d      tokens     a b c d x y e
              a b x y      position   0 1 2 3 2 3 0
              e            end        6 6 4 4 6 6 7      (one past a node's last descendant)

A transformer computes each token from its ancestors alone, at its depth in the sample. So the
packed forward pass is the padded one exactly, up to the order of floating-point sums, if the
position of a node is its depth and

    query q sees key k   if and only if   k <= q and q < end[k]

Sizes. N different tokens are forwarded, cut into S segments between the places where samples fork.
M tokens are trained on; where samples fork, one node predicts several of them, so only R <= M rows
reach the LM head. Memory grows with N, not with the sum of the samples' lengths; attention work
with the pairs of tokens that see each other (see `trie_attention`).

Nothing may depend on the layout: LoRA dropout has to be 0.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.samples import Ids, Sample

LONGEST = 256
"""Longest segment, in tokens: of the square of its own tokens, half is computed for nothing."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens `start` to `stop` of the layout, each the only child of the one before."""

    start: int
    stop: int
    end: int
    """One past their last descendant: all of them have the same."""
    depth: int
    """Position of the first."""


@dataclass(frozen=True, slots=True)
class Trie:
    """N tokens in depth-first order."""

    input_ids: Tensor
    """(N,)"""
    position_ids: Tensor
    """Depth of each token, (N,)."""
    end: Tensor
    """One past the last descendant of each token, (N,)."""
    segments: list[Segment]
    """Together all tokens, in order."""
    paths: list[NDArray[np.int64]]
    """Of each sample, in the order given: where each of its tokens lies."""
    masks: dict[int | None, Any] = field(default_factory=dict)
    """Block masks of FlexAttention, by window; made when first asked for."""


@dataclass(frozen=True, slots=True)
class PackedStep:
    """The samples of one forward and backward pass, B of them, and what the loss needs of them.

    The loss is laid out (B, T): row b begins with the first trained token of sample b, and T is
    the longest distance from there to a sample's last trained token.
    """

    trie: Trie
    rows: Tensor
    """Tokens of the trie whose hidden states reach the LM head, (R,)."""
    temperatures: Tensor
    """What the logits of each row are divided by, (R,)."""
    term_row: Tensor
    """Index into `rows` that predicts each trained token, (M,)."""
    term_token: Tensor
    """The trained tokens, (M,)."""
    term_place: Tensor
    """b * T + t of each trained token, (M,)."""
    mask: Tensor
    """1 where a token is trained, (B, T)."""
    logprobs: Tensor
    """Logged logprobs of the trained tokens, 0 elsewhere, (B, T)."""
    advantages: Tensor
    """Advantages of the trained tokens, 0 elsewhere, (B, T)."""
    samples: list[Sample]

    @property
    def trained(self) -> int:
        """M."""
        return len(self.term_token)

    def spread(self, terms: Tensor) -> Tensor:
        """Values of the M trained tokens → (B, T), 0 elsewhere; differentiable."""
        flat = terms.new_zeros(self.mask.numel())
        return flat.index_put((self.term_place,), terms).view(self.mask.shape)


def build_trie(sequences: Sequence[Ids], device: torch.device | str = "cpu") -> Trie:
    """Lay token sequences out as one trie; O(total length) apart from the sort."""
    order = sorted(range(len(sequences)), key=lambda i: sequences[i].tolist())
    ids: list[Ids] = []
    depths: list[Ids] = []
    end = np.zeros(sum(len(s) for s in sequences), dtype=np.int64)
    paths: list[NDArray[np.int64]] = [np.empty(0, dtype=np.int64)] * len(sequences)
    total, previous = 0, np.empty(0, dtype=np.int64)
    path = np.empty(0, dtype=np.int64)
    for index in order:
        sequence = sequences[index]
        shared = common_prefix(previous, sequence)
        end[path[shared:]] = total
        fresh = len(sequence) - shared
        path = np.concatenate([path[:shared], np.arange(total, total + fresh)])
        ids.append(sequence[shared:])
        depths.append(np.arange(shared, len(sequence)))
        paths[index] = path
        total += fresh
        previous = sequence
    end[path] = total
    depth = np.concatenate(depths)
    return Trie(
        input_ids=torch.from_numpy(np.concatenate(ids)).to(device),
        position_ids=torch.from_numpy(depth).to(device),
        end=torch.from_numpy(end[:total].copy()).to(device),
        segments=_segments(depth, end[:total]),
        paths=paths,
    )


def _segments(depth: Ids, end: Ids) -> list[Segment]:
    """Cut a layout wherever a branch begins or ends, and where a segment gets too long."""
    cuts = 1 + np.flatnonzero((end[1:] != end[:-1]) | (depth[1:] != depth[:-1] + 1))
    found = []
    for first, last in pairwise([0, *cuts.tolist(), len(end)]):
        for start in range(first, last, LONGEST):
            stop = min(start + LONGEST, last)
            found.append(Segment(start, stop, int(end[start]), int(depth[start])))
    return found


def common_prefix(a: Ids, b: Ids) -> int:
    """How many tokens two sequences begin with in common."""
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length


def pack(samples: Sequence[Sample], device: torch.device | str = "cpu") -> PackedStep:
    """Pack samples, in the order given, for one forward pass."""
    trie = build_trie([sample.token_ids for sample in samples], device)
    firsts = [sample.spans[0].start for sample in samples]
    width = max(s.spans[-1].stop - first for s, first in zip(samples, firsts, strict=True))
    shape = (len(samples), width)
    mask, logged, advantages = (np.zeros(shape, dtype=np.float32) for _ in range(3))
    nodes, heats, tokens, places = [], [], [], []
    for b, (sample, first) in enumerate(zip(samples, firsts, strict=True)):
        for span in sample.spans:
            positions = np.arange(span.start, span.stop)
            columns = positions - first
            mask[b, columns] = 1
            logged[b, columns] = span.logprobs
            advantages[b, columns] = span.advantage
            nodes.append(trie.paths[b][positions - 1])
            heats.append(np.full(len(positions), span.temperature))
            tokens.append(sample.token_ids[positions])
            places.append(b * width + columns)
    # A node serves all tokens that it predicts, once for each temperature they were sampled with.
    keys = np.stack([np.concatenate(nodes).astype(np.float64), np.concatenate(heats)])
    unique, term_row = np.unique(keys, axis=1, return_inverse=True)

    def tensor(array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(device)

    return PackedStep(
        trie=trie,
        rows=tensor(unique[0].astype(np.int64)),
        temperatures=tensor(unique[1].astype(np.float32)),
        term_row=tensor(term_row.reshape(-1)),
        term_token=tensor(np.concatenate(tokens)),
        term_place=tensor(np.concatenate(places)),
        mask=tensor(mask),
        logprobs=tensor(logged),
        advantages=tensor(advantages),
        samples=list(samples),
    )


def unique_tokens(samples: Sequence[Sample]) -> int:
    """N of the trie that samples would make."""
    ordered = sorted((s.token_ids for s in samples), key=lambda ids: ids.tolist())
    previous = np.empty(0, dtype=np.int64)
    total = 0
    for sequence in ordered:
        total += len(sequence) - common_prefix(previous, sequence)
        previous = sequence
    return total


def row_tokens(samples: Sequence[Sample]) -> int:
    """Tokens of samples laid out one a row."""
    return sum(len(sample.token_ids) for sample in samples)


def micro_batches(
    samples: Sequence[Sample],
    budget: int,
    tokens: Callable[[Sequence[Sample]], int] = unique_tokens,
) -> list[list[Sample]]:
    """Cut a step into passes of at most `budget` tokens each.

    Groups stay whole where they can, because what a group shares is its prompt; a group that does
    not fit is cut between its samples, which are the threads of its trajectories. A sample that is
    longer than the budget gets a pass of its own.

    Args:
        samples: group by group.
        budget: of one pass.
        tokens: what samples that are forwarded together cost.
    """
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group_id, []).append(sample)
    batches: list[list[Sample]] = [[]]
    for group in groups.values():
        if tokens([*batches[-1], *group]) <= budget:
            batches[-1].extend(group)
        elif tokens(group) <= budget:
            batches.append(group)
        else:
            for sample in sorted(group, key=lambda s: s.token_ids.tolist()):
                if batches[-1] and tokens([*batches[-1], sample]) > budget:
                    batches.append([])
                batches[-1].append(sample)
    return [batch for batch in batches if batch]
