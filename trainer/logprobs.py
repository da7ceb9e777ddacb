"""Logprobs of a packed step's trained tokens under a model, in one of three ways.

The way is found once, when a model is loaded, by looking at it: packing has to give what the model
itself gives on sequences that it sees one by one. So a model whose layers do not attend as packing
assumes (recurrent or softcapped ones, scaled logits) trains slower, not wrong.
"""

import logging
from collections.abc import Iterator
from enum import StrEnum
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from trainer import head, trie_attention
from trainer.packing import PackedStep, Trie, pack
from trainer.samples import ChoiceKey, Sample, Span

log = logging.getLogger("strop.trainer")

ROW_TOKENS = 8192
"""Tokens of one padded batch, padding included."""


class Way(StrEnum):
    """How a packed step is forwarded."""

    SEGMENTS = "segments"
    """One trie, attention segment by segment: on a CPU."""
    FLEX = "flex"
    """One trie, attention by FlexAttention's block mask: on CUDA."""
    PADDED = "padded"
    """One sample a row, by the model's own forward; right for every causal model."""


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
    if way is Way.PADDED:
        return _padded(model, packed, entropy_gradient)
    hidden = _hidden(model, packed.trie).index_select(0, packed.rows)
    return head.score(
        cast(Any, model).get_output_embeddings(),
        hidden,
        packed.temperatures,
        packed.term_row,
        packed.term_token,
        entropy_gradient,
    )


def _hidden(model: nn.Module, trie: Trie) -> Tensor:
    """Last hidden states of a trie, (N, hidden)."""
    output = cast(Any, model).base_model(
        input_ids=trie.input_ids[None],
        position_ids=trie.position_ids[None],
        use_cache=False,
        # A 4-D mask is handed through untouched: this one only keeps the model from making its own.
        attention_mask=trie.input_ids.new_zeros((1, 1, 1, 1)),
        trie=trie,
    )
    return cast(Tensor, output.last_hidden_state[0])


def _padded(model: nn.Module, packed: PackedStep, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
    """By rows of samples, padded behind their ends, where nothing that counts can see it."""
    device = packed.rows.device
    firsts = np.cumsum([0, *(sample.trained for sample in packed.samples)])
    logprobs = packed.temperatures.new_zeros(packed.trained)
    entropies = torch.zeros_like(logprobs)
    for batch in _rows_of(packed.samples):
        samples = [packed.samples[b] for b in batch]
        width = max(len(s.token_ids) for s in samples)
        ids = np.stack([np.pad(s.token_ids, (0, width - len(s.token_ids))) for s in samples])
        mask = np.stack([np.arange(width) < len(s.token_ids) for s in samples])
        logits = cast(Any, model)(
            input_ids=torch.from_numpy(ids).to(device),
            attention_mask=torch.from_numpy(mask.astype(np.int64)).to(device),
            use_cache=False,
        ).logits
        rows, terms = [], []
        for row, b in enumerate(batch):
            for span in packed.samples[b].spans:
                rows.append(row * width + np.arange(span.start - 1, span.stop - 1))
            terms.append(np.arange(firsts[b], firsts[b + 1]))
        asked = torch.from_numpy(np.concatenate(terms)).to(device)
        kept = torch.from_numpy(np.concatenate(rows)).to(device)
        chosen, spread = head.pick(
            logits.view(-1, logits.shape[-1]).index_select(0, kept),
            packed.temperatures[packed.term_row[asked]],
            torch.arange(len(asked), device=device),
            packed.term_token[asked],
            entropy_gradient,
        )
        logprobs = logprobs.index_put((asked,), chosen)
        entropies = entropies.index_put((asked,), spread)
    return logprobs, entropies


def _rows_of(samples: list[Sample]) -> Iterator[list[int]]:
    """Samples of like length together, at most `ROW_TOKENS` a batch."""
    batch: list[int] = []
    for b in sorted(range(len(samples)), key=lambda b: len(samples[b].token_ids)):
        # Sorted, so this sample is the widest of its batch.
        if batch and (len(batch) + 1) * len(samples[b].token_ids) > ROW_TOKENS:
            yield batch
            batch = []
        batch.append(b)
    if batch:
        yield batch


def choose_way(model: nn.Module) -> Way:
    """Make `model` attend over tries if that gives what its own forward gives, and log it."""
    packed, expected = _proof(model)
    original = cast(Any, model).config._attn_implementation
    tolerance = 1e-3 if cast(Any, model).dtype == torch.float32 else 0.05
    way = Way.FLEX if packed.rows.is_cuda else Way.SEGMENTS
    name = type(model).__name__
    try:
        cast(Any, model).set_attn_implementation(trie_attention.NAME)
        with torch.no_grad():
            logprobs, _ = trained_logprobs(model, packed, way)
        difference = float((logprobs - expected).abs().mean())
        if difference <= tolerance:
            log.info("%s: packed, attention by %s", name, way.value)
            return way
        reason = f"packing differs from its own forward by {difference:.2g} nats"
    except (NotImplementedError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    cast(Any, model).set_attn_implementation(original)
    log.warning("%s: padded rows, because it cannot be packed: %s", name, reason)
    return Way.PADDED


@torch.no_grad()
def _proof(model: nn.Module) -> tuple[PackedStep, Tensor]:
    """Made-up samples that fork in two places, and their logprobs by the model's own forward."""
    device = next(model.parameters()).device
    text = cast(Any, model).config.get_text_config()
    draw = np.random.default_rng(0)
    stem = draw.integers(0, text.vocab_size, 24)
    samples = []
    for number, shared in enumerate((24, 24, 12, 12)):
        ids = np.concatenate([stem[:shared], draw.integers(0, text.vocab_size, 9)])
        span = Span(ChoiceKey("", number), shared, len(ids), [0.0] * 9, 0, 1.0, 0.0)
        samples.append(Sample("", "", ids.astype(np.int64), [span]))
    packed = pack(samples, device)
    was_training = model.training
    model.eval()
    expected, _ = trained_logprobs(model, packed, Way.PADDED)
    model.train(was_training)
    return packed, expected
