"""Compact binary forms of token ids, logprobs and JSON.

Token ids are stored in the fewest whole bytes that hold the largest of them, little-endian,
after one byte that names the width. Logprobs are float32, which is what vLLM computes. JSON is
deflated when that makes it smaller; the first byte says which of the two it is.
"""

import sys
import zlib
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import orjson

DIGEST_BYTES = 16
_PLAIN, _DEFLATED = b"\x00", b"\x01"


def encode_ids(ids: Sequence[int]) -> bytes:
    """Token ids → 1 + width · len(ids) bytes, width 1 to 4.

    Raises:
        ValueError: an id is negative or needs more than 32 bits.
    """
    if not ids:
        return b"\x01"
    words = _words(ids)
    width = max(1, (max(ids).bit_length() + 7) // 8)
    if width == 4:
        return b"\x04" + words
    packed = bytearray(1 + width * len(ids))
    packed[0] = width
    for byte in range(width):
        packed[1 + byte :: width] = words[byte::4]
    return bytes(packed)


def _words(ids: Sequence[int]) -> bytes:
    """Token ids as little-endian words of 32 bits."""
    try:
        words = array("I", ids)
    except OverflowError:
        raise ValueError("token ids must lie between 0 and 2**32 - 1") from None
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def decode_ids(blob: bytes) -> list[int]:
    """The inverse of `encode_ids`."""
    width = blob[0]
    columns = np.frombuffer(blob, dtype=np.uint8, offset=1).reshape(-1, width)
    padded = np.zeros((len(columns), 4), dtype=np.uint8)
    padded[:, :width] = columns
    ids: list[int] = padded.view("<u4").ravel().tolist()
    return ids


def encode_logprobs(logprobs: Sequence[float]) -> bytes:
    """Logprobs in nats → 4 bytes each."""
    values = array("f", logprobs)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def decode_logprobs(blob: bytes) -> list[float]:
    """The inverse of `encode_logprobs`, at float32 precision."""
    values: list[float] = np.frombuffer(blob, dtype="<f4").tolist()
    return values


def encode_json(value: Any) -> bytes:
    """A JSON value → bytes, deflated if that is shorter."""
    plain = orjson.dumps(value)
    if len(plain) > 128:
        deflated = zlib.compress(plain, 6)
        if len(deflated) < len(plain):
            return _DEFLATED + deflated
    return _PLAIN + plain


def decode_json(blob: bytes) -> Any:
    """The inverse of `encode_json`."""
    body = blob[1:]
    return orjson.loads(zlib.decompress(body) if blob[:1] == _DEFLATED else body)


def digest(data: bytes) -> bytes:
    """16 bytes of BLAKE2b: enough that two different texts never meet in one database."""
    return blake2b(data, digest_size=DIGEST_BYTES).digest()


def digest_ids(ids: Sequence[int]) -> bytes:
    """Digest of a token sequence, independent of the width it is stored in."""
    return digest(_words(ids))


def digest_json(value: Any) -> bytes:
    """Digest of a JSON value with its key order as it is."""
    return digest(orjson.dumps(value))
