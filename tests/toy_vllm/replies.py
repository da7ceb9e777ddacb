"""Replies, chunks and lists as vLLM 0.32 writes them."""

import time
import uuid
from dataclasses import dataclass, field
from typing import Any, Self

from tests.toy_vllm.model import TOKENS, decode
from tests.toy_vllm.requests import ChatRequest, CompletionRequest

FINGERPRINT = "vllm-0.32.0-00000000"


@dataclass
class Step:
    """What one chunk of a stream brings: usually a token, and the text that it made visible."""

    token_ids: list[int]
    logprobs: list[float]
    tops: list[list[tuple[int, float]]]
    text: str = ""
    delta: dict[str, Any] | None = None
    """Sent instead of the text."""

    @classmethod
    def joined(cls, steps: list[Self]) -> Self:
        """Several steps in one chunk, as vLLM sends them when it falls behind."""
        return cls(
            [token for step in steps for token in step.token_ids],
            [value for step in steps for value in step.logprobs],
            [tops for step in steps for tops in step.tops],
            "".join(step.text for step in steps),
        )


@dataclass
class Choice:
    """One sampled answer to one prompt."""

    index: int
    prompt_ids: list[int]
    prompt_logprobs: list[dict[str, Any] | None] | None
    steps: list[Step] = field(default_factory=list)
    finish_reason: str = "length"
    stop_reason: str | int | None = None
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    reasoning: str | None = None

    @property
    def text(self) -> str:
        return "".join(step.text for step in self.steps)

    @property
    def token_ids(self) -> list[int]:
        return [token for step in self.steps for token in step.token_ids]


@dataclass
class Reply:
    """Everything that answers one request."""

    request: ChatRequest | CompletionRequest
    choices: list[Choice]
    model: str = ""
    extra_usage: int = 0
    cached_tokens: int | None = None
    """Told in `usage` if the server was started with --enable-prompt-tokens-details."""
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:16])
    created: int = field(default_factory=lambda: int(time.time()))

    def usage(self) -> dict[str, Any]:
        # Each prompt is counted once, whatever n is.
        prompt = sum(len(c.prompt_ids) for c in self.choices[:: max(self.request.n, 1)])
        sampled = sum(len(step.logprobs) for c in self.choices for step in c.steps)
        sampled += self.extra_usage
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "total_tokens": prompt + sampled,
            "completion_tokens": sampled,
        }
        if self.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
        return usage

    def ids(self, token_ids: list[int]) -> list[int] | None:
        """Token ids, if they were asked for."""
        return token_ids if self.request.return_token_ids else None

    def full_usage(self) -> dict[str, Any]:
        empty = {"prompt_tokens_details": None, "completion_tokens_details": None}
        return {**empty, **self.usage()}

    def head(self, prefix: str, kind: str) -> dict[str, Any]:
        return {
            "id": f"{prefix}-{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
        }


def model_card(
    name: str, created: int, *, root: str, parent: str | None = None, length: int | None = None
) -> dict[str, Any]:
    """One entry of `/v1/models`; adapters have a parent and no length."""
    permission = {
        "id": f"modelperm-{uuid.uuid4().hex[:16]}",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "vllm",
        "root": root,
        "parent": parent,
        "max_model_len": length,
        "permission": [permission],
    }


def embeddings(given: str | list[str], model: str) -> dict[str, Any]:
    """The body of embeddings: how often each of four letters is in a text."""
    texts = [given] if isinstance(given, str) else given
    data = [
        {"index": index, "object": "embedding", "embedding": [float(text.count(c)) for c in "aeio"]}
        for index, text in enumerate(texts)
    ]
    length = sum(map(len, texts))
    usage = {"prompt_tokens": length, "total_tokens": length, "completion_tokens": 0}
    head = {"id": f"embd-{uuid.uuid4().hex[:16]}", "object": "list", "created": int(time.time())}
    return {**head, "model": model, "data": data, "usage": {**usage, "prompt_tokens_details": None}}


def _token(token: int, logprob: float) -> dict[str, Any]:
    raw = TOKENS[token]
    return {"token": raw.decode(errors="replace"), "logprob": logprob, "bytes": list(raw)}


def _chat_logprobs(reply: Reply, steps: list[Step]) -> dict[str, Any] | None:
    if reply.request.top() is None:
        return None
    sampled = [
        (tops[0][0], value, tops)
        for step in steps
        for value, tops in zip(step.logprobs, step.tops, strict=True)
    ]
    wanted = reply.request.top() or 0
    return {
        "content": [
            {**_token(token, value), "top_logprobs": [_token(*top) for top in tops[:wanted]]}
            for token, value, tops in sampled
        ]
    }


def chat_reply(reply: Reply) -> dict[str, Any]:
    """The body of a chat completion that is not streamed."""
    choices = []
    for choice in reply.choices:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if choice.tool_calls else choice.text,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "reasoning": choice.reasoning,
        }
        if choice.tool_calls:
            message["tool_calls"] = choice.tool_calls
        choices.append(
            {
                "index": choice.index,
                "message": message,
                "logprobs": _chat_logprobs(reply, choice.steps),
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
                "token_ids": reply.ids(choice.token_ids),
                "routed_experts": None,
            }
        )
    return {
        **reply.head("chatcmpl", "chat.completion"),
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": FINGERPRINT,
        "usage": reply.full_usage(),
        "prompt_logprobs": reply.choices[0].prompt_logprobs,
        "prompt_token_ids": reply.ids(reply.choices[0].prompt_ids),
        "prompt_text": None,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": None,
    }


def chat_chunks(reply: Reply) -> list[dict[str, Any]]:
    """The chunks of a streamed chat completion: a role each, then the choices in turn, then usage."""
    head = reply.head("chatcmpl", "chat.completion.chunk")
    chunks = [
        {
            **head,
            "choices": [
                {
                    "index": choice.index,
                    "delta": {"role": "assistant", "content": ""},
                    "logprobs": None,
                    "finish_reason": None,
                }
            ],
            "prompt_token_ids": reply.ids(choice.prompt_ids),
            "prompt_text": None,
        }
        for choice in reply.choices
    ]
    for choice, step, last in _interleaved(reply.choices):
        entry: dict[str, Any] = {
            "index": choice.index,
            "delta": step.delta if step.delta is not None else {"content": step.text},
            "logprobs": _chat_logprobs(reply, [step]),
            "finish_reason": choice.finish_reason if last else None,
        }
        if last:
            entry["stop_reason"] = choice.stop_reason
        entry["token_ids"] = reply.ids(step.token_ids)
        chunks.append({**head, "choices": [entry]})
    return _with_usage(reply, head, chunks)


def completion_reply(reply: Reply) -> dict[str, Any]:
    """The body of a text completion that is not streamed."""
    choices = [
        {
            "index": choice.index,
            "text": choice.text,
            "logprobs": _text_logprobs(reply, choice.steps),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "token_ids": reply.ids(choice.token_ids),
            "prompt_logprobs": choice.prompt_logprobs,
            "prompt_token_ids": reply.ids(choice.prompt_ids),
            "routed_experts": None,
        }
        for choice in reply.choices
    ]
    return {
        **reply.head("cmpl", "text_completion"),
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": FINGERPRINT,
        "usage": reply.full_usage(),
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": None,
    }


def completion_chunks(reply: Reply) -> list[dict[str, Any]]:
    """The chunks of a streamed text completion."""
    head = reply.head("cmpl", "text_completion")
    chunks: list[dict[str, Any]] = []
    for choice, step, last in _interleaved(reply.choices):
        first = step is choice.steps[0]
        entry = {
            "index": choice.index,
            "text": step.text,
            "logprobs": _text_logprobs(reply, [step]),
            "finish_reason": choice.finish_reason if last else None,
            "stop_reason": choice.stop_reason if last else None,
            "prompt_token_ids": reply.ids(choice.prompt_ids) if first else None,
            "token_ids": reply.ids(step.token_ids),
        }
        chunks.append({**head, "choices": [entry]})
    return _with_usage(reply, head, chunks)


def _text_logprobs(reply: Reply, steps: list[Step]) -> dict[str, Any] | None:
    if reply.request.top() is None:
        return None
    offset, offsets, names, values, alternatives = 0, [], [], [], []
    for step in steps:
        for value, tops in zip(step.logprobs, step.tops, strict=True):
            name = decode([tops[0][0]], skip_special=False)
            offsets.append(offset)
            offset += len(name)
            names.append(name)
            values.append(value)
            alternatives.append({decode([t], skip_special=False): v for t, v in tops})
    return {
        "text_offset": offsets,
        "token_logprobs": values,
        "tokens": names,
        "top_logprobs": alternatives,
    }


def _interleaved(choices: list[Choice]) -> list[tuple[Choice, Step, bool]]:
    longest = max(len(choice.steps) for choice in choices)
    return [
        (choice, choice.steps[at], at == len(choice.steps) - 1)
        for at in range(longest)
        for choice in choices
        if at < len(choice.steps)
    ]


def _with_usage(
    reply: Reply, head: dict[str, Any], chunks: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    options = reply.request.stream_options or {}
    if options.get("include_usage") and options.get("continuous_usage_stats"):
        # Counted as it comes, and without details.
        prompt, sampled = reply.usage()["prompt_tokens"], 0
        for chunk in chunks:
            sampled += sum(len(_sampled(choice)) for choice in chunk["choices"])
            chunk["usage"] = {
                "prompt_tokens": prompt,
                "total_tokens": prompt + sampled,
                "completion_tokens": sampled,
            }
    if options.get("include_usage"):
        chunks.append({**head, "choices": [], "usage": reply.usage()})
    chunks[-1]["system_fingerprint"] = FINGERPRINT
    return chunks


def _sampled(choice: dict[str, Any]) -> list[Any]:
    """The logprobs of a chunk's choice, one for each token."""
    logprobs = choice["logprobs"] or {}
    return logprobs.get("content") or logprobs.get("token_logprobs") or []
