"""A short sequence by which the gateway tells a version from the one before it.

The gateway sends the tokens to every replica and compares the prompt's logprobs with those recorded
here. The two versions are one optimiser step apart, so the sequence is chosen, out of the ends of a
few samples, where that step moved the logprobs most: around what it was trained on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from gateway.store.records import Json
from trainer.samples import Ids, Sample

LENGTH = 32
"""Tokens of a probe, at most: it is forwarded before and after every step."""

CANDIDATES = 2
"""Sequences that are tried."""


@dataclass(frozen=True, slots=True)
class Before:
    """Candidate sequences and their logprobs before the step."""

    sequences: list[Ids]
    logprobs: list[Tensor]
    """Of tokens 1 .. L - 1 of each sequence."""


def before(model: nn.Module, samples: Sequence[Sample]) -> Before:
    """Choose candidates and measure them under the parent version."""
    # The strongest lessons first; ends of samples, because that is where most sampled tokens are.
    ranked = sorted(samples, key=lambda s: -max(abs(span.advantage) for span in s.spans))
    sequences: list[Ids] = []
    for sample in ranked:
        end = sample.token_ids[-LENGTH:]
        if len(end) > 1 and not any(np.array_equal(end, other) for other in sequences):
            sequences.append(end)
        if len(sequences) == CANDIDATES:
            break
    return Before(sequences, sequence_logprobs(model, sequences))


def after(model: nn.Module, earlier: Before) -> Json:
    """Measure the candidates under the new version and keep the one that moved most.

    Returns:
        `token_ids` (L,); `logprobs` and `previous_logprobs` of tokens 1 .. L - 1 under the new
        version and under its parent: natural logarithms, at temperature 1.
    """
    now = sequence_logprobs(model, earlier.sequences)
    moved = [
        float((new - old).abs().mean()) for new, old in zip(now, earlier.logprobs, strict=True)
    ]
    best = int(np.argmax(moved))
    return {
        "token_ids": earlier.sequences[best].tolist(),
        "logprobs": now[best].tolist(),
        "previous_logprobs": earlier.logprobs[best].tolist(),
    }


@torch.no_grad()
def sequence_logprobs(model: nn.Module, sequences: Sequence[Ids]) -> list[Tensor]:
    """Logprobs of tokens 1 .. L - 1 of each sequence, by the model's own forward, as float32."""
    # Side by side and padded on the right, where padding has no part in a causal model's results.
    width = max(len(sequence) for sequence in sequences)
    padded = np.stack([np.pad(sequence, (0, width - len(sequence))) for sequence in sequences])
    ids = torch.from_numpy(padded).to(next(model.parameters()).device)
    was_training = model.training
    if was_training:
        # Looks at every part of a model, adapters and all.
        model.eval()
    logits = cast(Any, model)(input_ids=ids, use_cache=False).logits[:, :-1]
    if was_training:
        model.train()
    logs = torch.log_softmax(logits.float(), dim=-1).gather(2, ids[:, 1:, None]).squeeze(2).cpu()
    return [row[: len(s) - 1] for row, s in zip(logs, sequences, strict=True)]
