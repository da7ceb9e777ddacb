"""A language model small enough to write down: what the fake vLLM samples from.

Tokens are the 256 bytes, two specials, and a dozen words, each capitalised ("Red") and with a
leading space (" red"). Answers are made of words alone, so that text → ids → text round-trips and
the prompt of a next turn begins with the prompt and the answer of the one before. A word is longer
than a character, so that a stop string can end inside a token, as it does in real models.

The logits of the next token are a hash of the adapter's weights and of the last tokens: they are the
same in every process, and differ between any two adapters. An adapter whose B matrices are zero is
the base model, as in the real thing.
"""

import contextlib
import hashlib
import json
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

WORDS = ["red", "blue", "green", "gold", "pink", "gray", "teal", "lime", "plum", "navy", "rust"]
START, END = 256, 257
"""<|im_start|>, and <|im_end|>, which is also the end of sequence."""

_FIRST = 258
TOKENS: list[bytes] = [
    *(bytes([value]) for value in range(256)),
    b"<|im_start|>",
    b"<|im_end|>",
    *(word.capitalize().encode() for word in WORDS),
    *(f" {word}".encode() for word in WORDS),
]
VOCAB = len(TOKENS)
_IDS = {token: index for index, token in enumerate(TOKENS) if index >= _FIRST}
_PIECES = re.compile(b"|".join(map(re.escape, _IDS)) + rb"|.", re.DOTALL)

CONTEXT = 16
"""How many tokens back the model looks."""

_UNLIKELY = -30.0
_AFTER_WORD = np.full(VOCAB, _UNLIKELY)
_AFTER_WORD[_FIRST + len(WORDS) :] = 0.0
_AFTER_WORD[END] = 0.8
_ELSEWHERE = np.full(VOCAB, _UNLIKELY)
_ELSEWHERE[_FIRST : _FIRST + len(WORDS)] = 0.0


def encode(text: str) -> list[int]:
    """Ids of plain text; specials in it are not special."""
    return [_IDS.get(piece, piece[0]) for piece in _PIECES.findall(text.encode())]


def decode(ids: Sequence[int], *, skip_special: bool = True) -> str:
    """Text of ids, without the specials unless they are asked for."""
    kept = (i for i in ids if not (skip_special and i in (START, END)))
    return b"".join(TOKENS[i] for i in kept).decode(errors="replace")


def tool_call_text(name: str, arguments: str) -> str:
    """A tool call the way the model writes it, and the template after it.

    Like the templates of real models this writes arguments its own way, however a client has
    serialised them.
    """
    with contextlib.suppress(ValueError):
        arguments = json.dumps(json.loads(arguments))
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def chat_prompt(
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    *,
    open_answer: bool = True,
) -> list[int]:
    """The chat template: one `<|im_start|>role\\n…<|im_end|>\\n` per message."""
    ids: list[int] = []
    if tools:
        ids += _turn("system", "# Tools\n" + json.dumps(tools, sort_keys=True))
    for message in messages:
        ids += _turn(str(message.get("role")), message_text(message))
    return [*ids, START, *encode("assistant\n")] if open_answer else ids


def message_text(message: dict[str, Any]) -> str:
    """The content of a message as text, tool calls included."""
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content)
    for call in message.get("tool_calls") or []:
        content += tool_call_text(call["function"]["name"], call["function"]["arguments"])
    return str(content)


def _turn(role: str, text: str) -> list[int]:
    return [START, *encode(f"{role}\n{text}"), END, *encode("\n")]


def fingerprint(adapter: Path | str | None) -> bytes:
    """What tells an adapter from any other; empty for none and for one that changes nothing.

    Raises what reading a broken safetensors file raises.
    """
    if adapter is None:
        return b""
    weights = Path(adapter) / "adapter_model.safetensors"
    stat = weights.stat()
    return _fingerprint(str(weights), stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=256)
def _fingerprint(weights: str, changed: int, size: int) -> bytes:
    with safe_open(weights, framework="numpy"):  # only to fail as vLLM does on a broken file
        raw = Path(weights).read_bytes()
    # The values are looked at as bytes, because numpy has no bfloat16.
    start = 8 + int.from_bytes(raw[:8], "little")
    slices = [
        raw[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]]
        for name, entry in json.loads(raw[8:start]).items()
        if ".lora_B." in name
    ]
    if slices and not any(any(values) for values in slices):
        return b""
    return hashlib.blake2b(raw, digest_size=16).digest()


def next_logprobs(mark: bytes, prefix: Sequence[int]) -> NDArray[np.float64]:
    """Log-probabilities (VOCAB,) of the token that follows `prefix`."""
    context = np.asarray(prefix[-CONTEXT:], dtype="<u2").tobytes()
    noise = hashlib.shake_128(mark + b"|" + context).digest(2 * VOCAB)
    after_word = bool(prefix) and prefix[-1] >= _FIRST
    logits = np.frombuffer(noise, dtype="<u2") * (3.0 / 65536)
    return log_softmax(logits + (_AFTER_WORD if after_word else _ELSEWHERE))


def log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """Normalised log-probabilities."""
    shifted = logits - logits.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))


def toy_logprobs(adapter: Path | str | None, token_ids: Sequence[int]) -> list[float]:
    """What `prompt_logprobs` says about `token_ids[1:]`: one number fewer than there are ids."""
    mark = fingerprint(adapter)
    return [
        float(next_logprobs(mark, token_ids[:position])[token_ids[position]])
        for position in range(1, len(token_ids))
    ]
