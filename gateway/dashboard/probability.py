"""Each sampled token of an answer with the probability that the model gave it, on demand."""

from functools import lru_cache
from math import exp
from pathlib import Path
from typing import Any

from gateway.store.records import StoredChoice

MOST = 4_000
_BOUNDS = (0.1, 0.4, 0.7, 0.95)


def tokens(choice: StoredChoice, base_model: str) -> list[dict[str, Any]]:
    """Text, probability, and a class from `p0` (unlikely) to `p4` of the first `MOST` tokens.

    The texts come from the base model's `tokenizer.json` where that is on this machine; elsewhere
    the ids stand for them.
    """
    if not choice.token_ids or not choice.logprobs:
        return []
    ids = choice.token_ids[:MOST]
    texts = _texts(ids, base_model)
    found = []
    for number, text, logprob in zip(ids, texts, choice.logprobs, strict=False):
        chance = exp(min(0.0, logprob))
        kind = sum(chance >= bound for bound in _BOUNDS)
        found.append({"id": number, "text": text, "chance": chance, "kind": f"p{kind}"})
    return found


def _texts(ids: list[int], base_model: str) -> list[str]:
    tokenizer = _tokenizer(base_model)
    if tokenizer is None:
        return [f"{number} " for number in ids]
    return [tokenizer.decode([number], skip_special_tokens=False) for number in ids]


@lru_cache(4)
def _tokenizer(base_model: str) -> Any:
    file = Path(base_model) / "tokenizer.json"
    try:
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(file)) if file.is_file() else None
    except Exception:
        # Not installed, or a file that it cannot read: the ids say as much.
        return None
