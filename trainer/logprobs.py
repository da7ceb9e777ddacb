"""Logprobs of a packed step's trained tokens under a model, in one of three ways.

The quickest way that the model supports is found once, when it is loaded: each way has to give
what the model itself gives on sequences that it sees one by one. So a model whose layers do not
attend as packing assumes (recurrent or softcapped ones, scaled logits) trains slower, not wrong.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainer import trie_attention
from trainer.packing import PackedStep, Trie, pack
from trainer.samples import ChoiceKey, Sample, Span

HEAD_FLOATS = 1 << 26
"""Logits that are held at once, in numbers (256 MB as float32)."""


class Way(StrEnum):
    """How a packed step is forwarded."""

    SEGMENTS = "segments"
    """One trie, attention segment by segment."""
    DENSE = "dense"
    """One trie, with a mask of N x N."""
    ONE_BY_ONE = "one_by_one"
    """Each sample alone, by the model's own forward; right for every causal model."""


def trained_logprobs(
    model: nn.Module, packed: PackedStep, way: Way, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Logprobs of the trained tokens and entropies where they were drawn, both (M,), in nats.

    Args:
        model: the causal language model itself, adapters injected.
        packed: on the model's device.
        way: how to forward it.
        entropy_gradient: whether the entropies are part of the loss.
    """
    if way is Way.ONE_BY_ONE:
        score = _logits_one_by_one(model, packed)
    else:
        hidden = _hidden(model, packed.trie, way).index_select(0, packed.rows)
        score = _logits_by_head(model, hidden)
    vocabulary = cast(int, cast(Any, model).config.get_text_config().vocab_size)
    size = max(1, HEAD_FLOATS // vocabulary)
    # Each chunk of rows serves the terms that it predicts.
    logprobs = packed.temperatures.new_zeros(packed.trained)
    entropies = torch.zeros_like(logprobs)
    rows = len(packed.rows)
    for start in range(0, rows, size):
        stop = min(start + size, rows)
        mine = (packed.term_row >= start) & (packed.term_row < stop)
        terms = mine.nonzero().squeeze(1)
        arguments = (
            score,
            start,
            stop,
            packed.temperatures[start:stop, None],
            packed.term_row[terms] - start,
            packed.term_token[terms],
            entropy_gradient,
        )
        if rows > size and torch.is_grad_enabled():
            # Logits of one chunk at a time in the backward pass too, at the price of a second
            # product with the head.
            chunk, spread = checkpoint(_pick, *arguments, use_reentrant=False)
        else:
            chunk, spread = _pick(*arguments)
        logprobs = logprobs.index_put((terms,), chunk)
        entropies = entropies.index_put((terms,), spread)
    return logprobs, entropies


_Score = Callable[[int, int], Tensor]


def _pick(
    score: _Score,
    start: int,
    stop: int,
    temperatures: Tensor,
    rows: Tensor,
    tokens: Tensor,
    entropy_gradient: bool,
) -> tuple[Tensor, Tensor]:
    logits = score(start, stop).float()
    if bool((temperatures != 1).any()):
        logits = logits / temperatures
    logs = torch.log_softmax(logits, dim=-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy = -(logs.exp() * logs).sum(-1)
    # Flat, because the derivative of indexing by two lists is many times slower.
    picked = logs.view(-1).gather(0, rows * logs.shape[1] + tokens)
    return picked, entropy[rows]


def _hidden(model: nn.Module, trie: Trie, way: Way) -> Tensor:
    """Last hidden states of a trie, (N, hidden)."""
    backbone = cast(Any, model).base_model
    if way is Way.SEGMENTS:
        # A 4-D mask is handed through untouched: this one only keeps the model from making its own.
        extra = {"attention_mask": trie.input_ids.new_zeros((1, 1, 1, 1)), "trie": trie}
    else:
        extra = {"attention_mask": trie.dense_mask(cast(Any, model).dtype)}
    output = backbone(
        input_ids=trie.input_ids[None],
        position_ids=trie.position_ids[None],
        use_cache=False,
        **extra,
    )
    return cast(Tensor, output.last_hidden_state[0])


def _logits_by_head(model: nn.Module, hidden: Tensor) -> _Score:
    head = cast(Any, model).get_output_embeddings()
    return lambda start, stop: cast(Tensor, head(hidden[start:stop]))


def _logits_one_by_one(model: nn.Module, packed: PackedStep) -> _Score:
    """Logits of the rows by the model's own forward over each sample; all held at once."""
    device = packed.rows.device
    place = torch.full((len(packed.trie.input_ids),), -1, device=device)
    place[packed.rows] = torch.arange(len(packed.rows), device=device)
    # The same node asked for at two temperatures is two rows with the same logits.
    first = place[packed.rows]
    found: Tensor | None = None
    done: set[int] = set()
    for sample, path in zip(packed.samples, packed.trie.paths, strict=True):
        wanted = [
            position
            for span in sample.spans
            for position in range(span.start - 1, span.stop - 1)
            if int(path[position]) not in done
        ]
        if not wanted:
            continue
        done.update(int(path[position]) for position in wanted)
        keep = torch.tensor(wanted, device=device)
        ids = torch.from_numpy(sample.token_ids).to(device)
        logits = cast(Any, model)(input_ids=ids[None], use_cache=False).logits[0, keep]
        if found is None:
            found = logits.new_zeros((len(packed.rows), logits.shape[-1]))
        found = found.index_put((place[torch.from_numpy(path[wanted]).to(device)],), logits)
    assert found is not None
    logits_of_rows = found
    return lambda start, stop: logits_of_rows[first[start:stop]]


def choose_way(model: nn.Module) -> Way:
    """Switch `model` to the quickest way of packing that gives the results of its own forward."""
    packed, expected = _proof(model)
    original = cast(Any, model).config._attn_implementation
    tolerance = 1e-3 if cast(Any, model).dtype == torch.float32 else 0.05
    ways = [Way.SEGMENTS]
    if getattr(cast(Any, model).config.get_text_config(), "sliding_window", None) is None:
        # A dense mask stands in for the model's own one, sliding windows included.
        ways.append(Way.DENSE)
    for way in ways:
        if _agrees(model, packed, way, expected, tolerance):
            return way
        cast(Any, model).set_attn_implementation(original)
    return Way.ONE_BY_ONE


def _agrees(
    model: nn.Module, packed: PackedStep, way: Way, expected: Tensor, tolerance: float
) -> bool:
    try:
        cast(Any, model).set_attn_implementation(trie_attention.NAME)
        with torch.no_grad():
            logprobs, _ = trained_logprobs(model, packed, way)
    except (NotImplementedError, TypeError, ValueError, AttributeError, RuntimeError):
        return False
    return bool((logprobs - expected).abs().mean() <= tolerance)


@torch.no_grad()
def _proof(model: nn.Module) -> tuple[PackedStep, Tensor]:
    """Made-up samples that fork in two places, and their logprobs one by one."""
    device = next(model.parameters()).device
    vocabulary = cast(Any, model).config.get_text_config().vocab_size
    draw = np.random.default_rng(0)
    stem = draw.integers(0, vocabulary, 24)
    samples = []
    for number, shared in enumerate((24, 24, 12, 12)):
        ids = np.concatenate([stem[:shared], draw.integers(0, vocabulary, 9)]).astype(np.int64)
        span = Span(ChoiceKey("", number), shared, len(ids), [0.0] * 9, 0, 1.0, 0.0)
        samples.append(Sample("", "", ids, [span]))
    packed = pack(samples, device)
    was_training = model.training
    model.eval()
    expected, _ = trained_logprobs(model, packed, Way.ONE_BY_ONE)
    model.train(was_training)
    return packed, expected
