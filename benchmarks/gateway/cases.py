"""What is asked: short requests, streams, and an agent's conversation that grows to 60 KB."""

import json
from dataclasses import dataclass
from typing import Any

MODEL = "agent@0"
SHORT = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "How much does Omar want for the sofa?"},
]
TURNS = 32
_TURN_BYTES = 1850
"""Of what the user adds in a turn, so that the last request of a conversation has 60 KB."""


@dataclass(frozen=True)
class Case:
    """One thing to measure."""

    kind: str
    """`json`, `stream` or `conversation`."""
    connections: int

    def __str__(self) -> str:
        return f"{self.kind} × {self.connections}"


CASES = [
    *(Case("json", connections) for connections in (1, 16, 128)),
    *(Case("stream", connections) for connections in (1, 32, 256)),
    Case("conversation", 1),
]


def http_request(body: dict[str, Any]) -> bytes:
    """The bytes of a request."""
    raw = json.dumps(body).encode()
    return (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer none\r\n"
        f"content-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
    ).encode() + raw


def short(stream: bool = False) -> bytes:
    """The short request."""
    return http_request({"model": MODEL, "messages": SHORT, "stream": stream})


def conversation(number: int, answer: str) -> list[bytes]:
    """The requests of one conversation's turns, each with all that was said before it."""
    messages: list[dict[str, str]] = [{"role": "system", "content": f"Conversation {number}."}]
    requests = []
    for turn in range(TURNS):
        words = f"Conversation {number}, turn {turn}: look this up for me. " * 40
        messages.append({"role": "user", "content": words[:_TURN_BYTES]})
        requests.append(http_request({"model": MODEL, "messages": messages}))
        messages.append({"role": "assistant", "content": answer})
    return requests
