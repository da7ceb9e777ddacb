"""Logprobs and entropies out of hidden states, without ever holding the logits of all of them.

Rows go through the LM head a few at a time. With a frozen head their logits need not be made again
for the derivative: with p = softmax(W h / T), the logprob of token k has the gradient
(W[k] - p W) / T, and p W, as wide as a hidden state, is made while the logits are there. It is all
that is kept of them.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

LOGITS = {"cpu": 1 << 22}
"""Logits that are held at once, in numbers: 16 MB as float32, a few times over."""

_LOGITS_ELSEWHERE = 1 << 24


def score(
    head: nn.Module,
    hidden: Tensor,
    temperatures: Tensor,
    term_row: Tensor,
    term_token: Tensor,
    entropy_gradient: bool,
) -> tuple[Tensor, Tensor]:
    """Logprobs of terms and entropies of the rows that they are drawn from, both (M,), in nats.

    Args:
        head: hidden states → logits.
        hidden: (R, hidden).
        temperatures: what the logits of each row are divided by, (R,).
        term_row: (M,), into the R rows.
        term_token: (M,).
        entropy_gradient: whether the entropies are part of the loss.
    """
    if type(head) is nn.Linear and not head.weight.requires_grad:
        logprobs, entropies = cast(Any, _FrozenHead.apply)(
            hidden, head.weight, head.bias, temperatures, term_row, term_token, entropy_gradient
        )
        return logprobs, entropies[term_row]
    return _in_checkpoints(head, hidden, temperatures, term_row, term_token, entropy_gradient)


class _FrozenHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        temperatures: Tensor,
        term_row: Tensor,
        term_token: Tensor,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        rows, size = len(hidden), _chunk(weight.shape[0], hidden)
        with_grad = ctx.needs_input_grad[0]
        logprobs = temperatures.new_empty(len(term_row))
        entropies = torch.empty_like(temperatures)
        expected = torch.empty_like(hidden) if with_grad else None
        spread = torch.empty_like(hidden) if with_grad and entropy_gradient else None
        for start in range(0, rows, size):
            part = slice(start, start + size)
            logs = torch.nn.functional.linear(hidden[part], weight, bias).float()
            logs /= temperatures[part, None]
            logs -= torch.logsumexp(logs, dim=-1, keepdim=True)
            mine = ((term_row >= start) & (term_row < start + size)).nonzero().squeeze(1)
            logprobs[mine] = logs[term_row[mine] - start, term_token[mine]]
            likely = logs.exp()
            # In place: the product of the two is all that is needed of the logarithms from here.
            weighted = logs.mul_(likely)
            entropies[part] = -weighted.sum(-1)
            if expected is not None:
                expected[part] = likely.to(weight.dtype) @ weight
            if spread is not None:
                weighted.add_(likely * entropies[part, None])
                spread[part] = weighted.to(weight.dtype) @ weight
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        ctx.save_for_backward(weight, temperatures, term_row, term_token, expected, spread)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weight, temperatures, term_row, term_token, expected, spread = ctx.saved_tensors
        by_row = temperatures.new_zeros(len(temperatures)).index_add_(0, term_row, grads[0])
        grad = -by_row[:, None] * expected
        grad.index_add_(0, term_row, grads[0][:, None] * weight[term_token].to(grad.dtype))
        if spread is not None:
            # Of the entropy H = -sum p log p, by the logits: -p (log p + H).
            grad -= grads[1][:, None] * spread
        grad /= temperatures[:, None]
        return grad.to(expected.dtype), None, None, None, None, None, None


def _chunk(vocabulary: int, hidden: Tensor) -> int:
    return max(1, LOGITS.get(hidden.device.type, _LOGITS_ELSEWHERE) // vocabulary)


def _in_checkpoints(
    head: nn.Module,
    hidden: Tensor,
    temperatures: Tensor,
    term_row: Tensor,
    term_token: Tensor,
    entropy_gradient: bool,
) -> tuple[Tensor, Tensor]:
    """For every head there is: the backward pass makes the logits of a chunk again."""

    def part(start: int, stop: int, rows: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return pick(
            cast(Tensor, head(hidden[start:stop])),
            temperatures[start:stop],
            rows,
            tokens,
            entropy_gradient,
        )

    logprobs = temperatures.new_zeros(len(term_row))
    entropies = torch.zeros_like(logprobs)
    vocabulary = int(cast(Any, head).weight.shape[0]) if hasattr(head, "weight") else 1 << 17
    size = _chunk(vocabulary, hidden)
    for start in range(0, len(hidden), size):
        stop = min(start + size, len(hidden))
        terms = ((term_row >= start) & (term_row < stop)).nonzero().squeeze(1)
        found = checkpoint(
            part, start, stop, term_row[terms] - start, term_token[terms], use_reentrant=False
        )
        logprobs = logprobs.index_put((terms,), found[0])
        entropies = entropies.index_put((terms,), found[1])
    return logprobs, entropies


def pick(
    logits: Tensor, temperatures: Tensor, rows: Tensor, tokens: Tensor, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Logprobs of `tokens` in `rows` of the logits (R, V), and the entropies of these rows."""
    logs = torch.log_softmax(logits.float() / temperatures[:, None], dim=-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy = -(logs.exp() * logs).sum(-1)
    # Flat, because the derivative of indexing by two lists is many times slower.
    picked = logs.view(-1).gather(0, rows * logs.shape[1] + tokens)
    return picked, entropy[rows]
