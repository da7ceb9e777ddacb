"""vLLM's HTTP API over a toy model: starts in milliseconds, and misbehaves when it is told to.

In a test:

    async with FakeVllm() as vllm:
        client = AsyncOpenAI(base_url=vllm.url + "/v1", api_key="none")

or on its own: `python tests/fake_vllm.py --port 8000`.

Shapes, status codes and error bodies are those of vLLM 0.32, and tests/contract holds them to it.
Faults are set on `vllm.faults`, or by POSTing them to `/_faults`; counters are at `/_stats`.
"""

import argparse
import asyncio
import json
import sys
import time
import uuid
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Self

import orjson
from aiohttp import web
from pydantic import ValidationError

if not __package__:  # run as a script: make `tests` importable
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.toy_vllm.faults import Faults
from tests.toy_vllm.generation import answer_chat, answer_completion
from tests.toy_vllm.model import chat_prompt, fingerprint, toy_logprobs
from tests.toy_vllm.replies import (
    Reply,
    chat_chunks,
    chat_reply,
    completion_chunks,
    completion_reply,
    embeddings,
    model_card,
)
from tests.toy_vllm.requests import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    Request,
    check_texts,
    validation_error,
)

__all__ = ["FakeVllm", "Faults", "toy_logprobs"]

Handler = Callable[[web.Request], Coroutine[Any, Any, web.StreamResponse]]


class FakeVllm:
    """One fake server. Its counters, faults and adapters may be read and changed while it runs."""

    def __init__(
        self,
        *,
        model: str = "base",
        max_model_len: int = 4096,
        max_lora_rank: int = 64,
        tool_parser: bool = True,
        seed: int = 0,
        port: int = 0,
        faults: Faults | None = None,
    ) -> None:
        self.model = model
        self.max_model_len = max_model_len
        self.max_lora_rank = max_lora_rank
        self.tool_parser = tool_parser
        self.seed = seed
        self.port = port
        self.faults = faults or Faults()
        self.adapters: dict[str, str] = {}
        self.thoughts = ""
        """What it thinks before each chat answer, and shows as `reasoning`."""
        self.cached_tokens: int | None = None
        """How many tokens of each prompt it claims to have had in its prefix cache."""
        self.stats: Counter[str] = Counter()
        self.requests: deque[dict[str, Any]] = deque(maxlen=1000)
        """Bodies of the newest requests for completions, oldest first, headers under `_headers`."""
        self._runner: web.AppRunner | None = None
        self._started = int(time.time())

    @property
    def url(self) -> str:
        """Where it listens, without a path."""
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen; a port of 0 becomes a free one. Adapters are forgotten, as by a real restart."""
        self.adapters.clear()
        # Without handler_cancellation a client that hangs up is noticed only at the next write.
        self._runner = web.AppRunner(self._app(), handler_cancellation=True, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, shutdown_timeout=0.5)
        await site.start()
        server = site._server
        assert isinstance(server, asyncio.Server)
        self.port = server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Close every connection and free the port; `start` may be called again."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=64 * 2**20)
        app.router.add_get("/health", self._health)
        app.router.add_get("/ping", self._health)
        app.router.add_get("/version", self._version)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/load_lora_adapter", self._guard(self._load))
        app.router.add_post("/v1/unload_lora_adapter", self._guard(self._unload))
        app.router.add_post("/v1/chat/completions", self._guard(self._chat))
        app.router.add_post("/v1/completions", self._guard(self._completion))
        app.router.add_post("/v1/embeddings", self._guard(self._embeddings))
        app.router.add_post("/tokenize", self._guard(self._tokenize))
        app.router.add_get("/_stats", self._get_stats)
        app.router.add_post("/_faults", self._set_faults)
        return app

    def _guard(self, handler: Handler) -> Handler:
        """Turn errors into vLLM's error bodies."""

        async def guarded(request: web.Request) -> web.StreamResponse:
            try:
                if request.content_type != "application/json":
                    raise ApiError(
                        "1 validation error:\n"
                        "  Unsupported Media Type: Only 'application/json' is allowed",
                        "Bad Request",
                    )
                return await handler(request)
            except ValidationError as error:
                return _json(validation_error(error).body(), 400)
            except ApiError as error:
                return _json(error.body(), error.code)

        return guarded

    # -- completions -------------------------------------------------------------------------

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request)

        def answer() -> Reply:
            parsed = ChatRequest.model_validate(body)
            mark = self._mark(parsed.model)
            return answer_chat(
                parsed, mark, self._seed(), self.max_model_len, self.tool_parser, self.thoughts
            )

        return await self._completed(request, answer, chat_reply, chat_chunks)

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request)

        def answer() -> Reply:
            parsed = CompletionRequest.model_validate(body)
            mark = self._mark(parsed.model)
            return answer_completion(parsed, mark, self._seed(), self.max_model_len)

        return await self._completed(request, answer, completion_reply, completion_chunks)

    async def _tokenize(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request)
        self._mark(body.get("model"))
        check_texts(body["messages"])
        tokens = chat_prompt(body["messages"], body.get("tools"))
        answer = {"count": len(tokens), "max_model_len": self.max_model_len, "tokens": tokens}
        return _json({**answer, "token_strs": None})

    async def _embeddings(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request)
        self.faults.refuse()
        if self.faults.die_mid_stream is not None and request.transport is not None:
            request.transport.abort()
        self._mark(body.get("model"))
        texts = body["input"] if isinstance(body["input"], list) else [body["input"]]
        if not texts or not all(isinstance(text, str) for text in texts):
            raise ApiError("input must be a text or a list of texts")
        return _json(embeddings(body["input"], body.get("model") or self.model))

    async def _completed(
        self,
        request: web.Request,
        answer: Callable[[], Reply],
        to_reply: Callable[[Reply], dict[str, Any]],
        to_chunks: Callable[[Reply], list[dict[str, Any]]],
    ) -> web.StreamResponse:
        self.stats["in_flight"] += 1
        try:
            self.faults.refuse()
            reply = answer()
            reply.model = reply.request.model or self.model
            reply.cached_tokens = self.cached_tokens
            self.faults.distort(reply)
            if reply.request.stream:
                response = await self._stream(request, reply.request, to_chunks(reply))
            else:
                await asyncio.sleep(self.faults.slow * max(len(c.steps) for c in reply.choices))
                response = _json(to_reply(reply), broken=self.faults.broken_json)
            self.stats["completed"] += 1
            return response
        except (asyncio.CancelledError, ConnectionError):
            self.stats["aborted"] += 1
            raise
        finally:
            self.stats["in_flight"] -= 1

    async def _stream(
        self, request: web.Request, parsed: Request, chunks: list[dict[str, Any]]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        async for number, line in self._lines(chunks):
            if number == self.faults.die_mid_stream:
                assert request.transport is not None
                request.transport.abort()
                return response
            await response.write(b"data: " + line + b"\n\n")
            self.stats["chunks"] += 1
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _lines(self, chunks: list[dict[str, Any]]) -> AsyncIterator[tuple[int, bytes]]:
        for number, chunk in enumerate(chunks):
            await asyncio.sleep(self.faults.slow)
            if number == self.faults.error_mid_stream:
                error = ApiError(
                    "EngineCore encountered an issue.", "InternalServerError", code=500
                )
                yield number, orjson.dumps(error.body())
                return
            line = orjson.dumps(chunk)
            yield number, line[: len(line) // 2] if self.faults.broken_json else line

    async def _body(self, request: web.Request) -> Any:
        self.stats["requests"] += 1
        body = await _read_json(request)
        if isinstance(body, dict):
            self.requests.append({**body, "_headers": dict(request.headers)})
        return body

    def _mark(self, name: str | None) -> bytes:
        """Which weights answer to a name."""
        if not name or name == self.model:
            return b""
        if name not in self.adapters:
            raise ApiError(
                f"The model `{name}` does not exist. Valid aliases: {self.model}.",
                "NotFoundError",
                param="model",
                code=404,
            )
        return b"" if self.faults.ignore_adapters else fingerprint(self.adapters[name])

    def _seed(self) -> int:
        """Requests without a seed of their own get one from their number in order."""
        return self.seed * 1_000_003 + self.stats["requests"]

    # -- adapters and the rest ---------------------------------------------------------------

    async def _load(self, request: web.Request) -> web.StreamResponse:
        self.stats["loads"] += 1
        body = await _read_json(request)
        for name in ("lora_name", "lora_path"):
            if name not in body:
                raise ApiError(
                    f"1 validation error:\n  {{'type': 'missing', 'loc': 'body.{name}', "
                    f"'msg': 'Field required', 'input': '<dict of {len(body)} items>'}}",
                    "Bad Request",
                    param=f"body.{name}",
                )
        name, path = body["lora_name"], body["lora_path"]
        await asyncio.sleep(self.faults.load_slow)
        if self.faults.load_times:
            self.faults.load_times -= 1
            raise ApiError("told to fail", "InternalServerError", code=self.faults.load_status)
        if not name or not path:
            raise ApiError("Both 'lora_name' and 'lora_path' must be provided.", "InvalidUserInput")
        if name == self.model:
            raise ApiError(
                f"The lora adapter '{name}' conflicts with a served base model.",
                "InvalidUserInput",
            )
        if name in self.adapters and not body.get("load_inplace"):
            raise ApiError(
                f"The lora adapter '{name}' has already been loaded. If you want to load the "
                "adapter in place, set 'load_inplace' to True.",
                "InvalidUserInput",
            )
        self._check_adapter(name, Path(path))
        self.adapters[name] = path
        return web.Response(body=f"Success: LoRA adapter '{name}' added successfully.".encode())

    def _check_adapter(self, name: str, path: Path) -> None:
        config = path / "adapter_config.json"
        if not config.is_file():
            raise ApiError(
                f"Loading lora {name} failed: No adapter found for <path>",
                "NotFoundError",
                code=404,
            )
        try:
            rank = json.loads(config.read_text())["r"]
            if rank > self.max_lora_rank:
                raise ValueError(
                    f"LoRA rank {rank} is greater than max_lora_rank {self.max_lora_rank}."
                )
            if not (path / "adapter_model.safetensors").is_file():
                raise ValueError("<path> doesn't contain tensors")
            fingerprint(path)
        except Exception as error:
            message = f"Call to add_lora method failed: {error}"
            raise ApiError(message, "InternalServerError", code=500) from None

    async def _unload(self, request: web.Request) -> web.StreamResponse:
        self.stats["unloads"] += 1
        name = (await _read_json(request)).get("lora_name", "")
        if name not in self.adapters:
            raise ApiError(f"The lora adapter '{name}' cannot be found.", "NotFoundError", code=404)
        del self.adapters[name]
        return web.Response(body=f"Success: LoRA adapter '{name}' removed successfully.".encode())

    async def _models(self, _: web.Request) -> web.StreamResponse:
        base = model_card(self.model, self._started, root=self.model, length=self.max_model_len)
        cards = [
            model_card(name, int(time.time()), root=path, parent=self.model)
            for name, path in self.adapters.items()
        ]
        return _json({"object": "list", "data": [base, *cards]})

    async def _health(self, _: web.Request) -> web.StreamResponse:
        return web.Response(status=503 if self.faults.unhealthy else 200)

    async def _version(self, _: web.Request) -> web.StreamResponse:
        return _json({"version": "0.32.0"})

    async def _get_stats(self, _: web.Request) -> web.StreamResponse:
        names = ("requests", "completed", "aborted", "in_flight", "chunks", "loads", "unloads")
        return _json({name: self.stats[name] for name in names})

    async def _set_faults(self, request: web.Request) -> web.StreamResponse:
        body = await _read_json(request)
        known = {field.name for field in fields(Faults)}
        if unknown := set(body) - known:
            raise web.HTTPBadRequest(text=f"no such fault: {', '.join(sorted(unknown))}")
        for name, value in body.items():
            setattr(self.faults, name, value)
        return _json(asdict(self.faults))


async def _read_json(request: web.Request) -> Any:
    try:
        return orjson.loads(await request.read())
    except orjson.JSONDecodeError:
        raise ApiError(
            "1 validation error:\n  {'type': 'json_invalid', 'loc': 'body.1', "
            "'msg': 'JSON decode error', 'input': '<dict of 0 items>', "
            "'ctx': {'error': 'Expecting property name enclosed in double quotes'}}",
            "Bad Request",
            param="body.1",
        ) from None


def _json(body: dict[str, Any], status: int = 200, *, broken: bool = False) -> web.Response:
    raw = orjson.dumps(body)
    if broken:
        raw = raw[: len(raw) // 2]
    return web.Response(body=raw, status=status, content_type="application/json")


async def _serve(port: int, model: str) -> None:
    async with FakeVllm(port=port, model=model, seed=uuid.uuid4().int % 1000) as vllm:
        print(f"fake vLLM on {vllm.url}", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--model", default="base")
    options = parser.parse_args()
    asyncio.run(_serve(options.port, options.model))
