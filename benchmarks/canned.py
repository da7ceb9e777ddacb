"""A vLLM that costs next to nothing: it answers every chat request with bytes made beforehand.

    python -m benchmarks.canned --port 9000 --chunks 64 --gap 20

Its answers have token ids, logprobs and usage that agree, so a gateway stores them like real ones.
"""

import argparse
import asyncio
from typing import Any

import orjson

MODEL = "agent@0"
_JSON_TOKENS = 16
PROMPT_IDS = list(range(100, 140))


def reply(tokens: int) -> dict[str, Any]:
    """A chat completion of so many tokens."""
    content = [{"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}] * tokens
    return {
        "id": "chatcmpl-upstream",
        "object": "chat.completion",
        "created": 1,
        "model": MODEL,
        "prompt_token_ids": PROMPT_IDS,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "a" * tokens},
                "logprobs": {"content": content},
                "finish_reason": "stop",
                "token_ids": [7] * tokens,
            }
        ],
        "usage": {
            "prompt_tokens": len(PROMPT_IDS),
            "completion_tokens": tokens,
            "total_tokens": len(PROMPT_IDS) + tokens,
        },
    }


def chunks(tokens: int) -> list[bytes]:
    """The same as a stream, one token a chunk."""
    base = {"id": "chatcmpl-upstream", "object": "chat.completion.chunk", "created": 1}
    found: list[dict[str, Any]] = []
    for index in range(tokens):
        entry = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}
        choice = {
            "index": 0,
            "delta": {"content": "a"},
            "logprobs": {"content": [entry]},
            "finish_reason": "stop" if index == tokens - 1 else None,
            "token_ids": [7],
        }
        found.append({**base, "model": MODEL, "choices": [choice]})
    found[0]["prompt_token_ids"] = PROMPT_IDS
    found.append({**base, "model": MODEL, "choices": [], "usage": reply(tokens)["usage"]})
    return [b"data: " + orjson.dumps(chunk) + b"\n\n" for chunk in found] + [b"data: [DONE]\n\n"]


class Canned(asyncio.Protocol):
    """HTTP/1.1, as far as the benchmark needs it."""

    def __init__(self, tokens: int, gap: float = 0.0):
        """Answers of so many tokens; streams send one every `gap` seconds."""
        self._gap = gap
        models = {"object": "list", "data": [{"id": MODEL, "object": "model"}]}
        self._models = _whole(orjson.dumps(models))
        self._json = _whole(orjson.dumps(reply(_JSON_TOKENS)))
        self._chunks = chunks(tokens)
        self._buffer = b""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end].lower()
            length = 0
            if (at := head.find(b"content-length:")) >= 0:
                length = int(head[at + 15 :].split(b"\r\n", 1)[0])
            if len(self._buffer) < end + 4 + length:
                return
            body = self._buffer[end + 4 : end + 4 + length]
            self._buffer = self._buffer[end + 4 + length :]
            if b"/chat/completions" not in head.split(b"\r\n", 1)[0]:
                self._transport.write(self._models)
            elif b'"stream":true' in body.replace(b" ", b""):
                self._task = asyncio.ensure_future(self._stream())
            else:
                self._transport.write(self._json)

    async def _stream(self) -> None:
        self._transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        for chunk in self._chunks:
            self._transport.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
            # Each chunk is a write of its own, as vLLM's are.
            await asyncio.sleep(self._gap)
        self._transport.write(b"0\r\n\r\n")


def _whole(body: bytes) -> bytes:
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


async def serve(port: int, tokens: int, gap: float) -> None:
    """Answer until cancelled."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Canned(tokens, gap), "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    import uvloop

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--chunks", type=int, default=16)
    parser.add_argument("--gap", type=float, default=0.0, help="milliseconds between two chunks")
    options = parser.parse_args()
    uvloop.run(serve(options.port, options.chunks, options.gap / 1e3))
