"""What gateways and the process that commits say to each other, over a Unix socket.

A frame is eight bytes of length and a pickle. Unpickling runs what it is told to, which is why the
socket is one that only this user can connect to: whoever can may run what he likes as it is.
"""

import pickle
import struct
from collections.abc import Iterator
from typing import Any

from gateway.store.committer import Work
from gateway.store.journal_state import JournalState
from gateway.store.rewards import RewardList
from gateway.store.rows import EncodedCompletion

_LENGTH = struct.Struct("<Q")

Submission = tuple[int, list[tuple[int, Any]]]
"""Gateway → process: requests that are being answered and have not submitted anything yet, and
works by number, as `sent` makes them."""

Status = tuple[int, int, tuple[int, ...], float, JournalState | None]
"""How the process is: commits, writes in them, the counts of the histogram of commits and its sum
in seconds; of the journal, if there is one, how much is in it."""

Answer = tuple[list[tuple[int, Any]], Status | None]
"""Process → gateway: results by number, exceptions among them, and now and then how it is."""


class Orphaned(Exception):
    """A completion shares text with a turn that is gone, and has to be sent whole."""


class SentCompletion(EncodedCompletion):
    """A completion whose request and answer are in the gateway that sent its rows."""

    __slots__ = ()

    def detach(self) -> None:
        """Ask for it whole."""
        raise Orphaned(self.completion["id"])


def sent(work: EncodedCompletion | RewardList) -> Any:
    """What goes to the process: of a completion its rows, and not what it was made of."""
    if isinstance(work, RewardList):
        return work
    return work.trajectory, work.group, work.completion, work.choices, work.continued


def received(thing: Any) -> Work:
    """The work again."""
    if isinstance(thing, RewardList):
        return thing
    trajectory, group, completion, choices, continued = thing
    return SentCompletion(trajectory, group, completion, choices, continued, {})


def framed(message: Submission | Answer) -> bytes:
    """The bytes of a frame.

    Raises:
        Exception: something in it cannot be pickled.
    """
    body = pickle.dumps(message, 5)
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Puts frames together again from the pieces in which they come."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, piece: bytes | memoryview) -> Iterator[Any]:
        """The messages that are whole with this piece."""
        held: bytes | bytearray | memoryview = piece
        if self._bytes:
            self._bytes += piece
            held = self._bytes
        start = 0
        with memoryview(held) as view:
            while len(held) - start >= _LENGTH.size:
                end = start + _LENGTH.size + _LENGTH.unpack_from(held, start)[0]
                if len(held) < end:
                    break
                message = pickle.loads(view[start + _LENGTH.size : end])
                start = end
                yield message
        if held is not self._bytes or start:
            self._bytes = bytearray(held[start:])
