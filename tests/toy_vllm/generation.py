"""Answers of the fake vLLM: checks a request as vLLM 0.32 does, and samples from the toy model."""

import random
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.toy_vllm.model import (
    END,
    VOCAB,
    chat_prompt,
    decode,
    encode,
    log_softmax,
    next_logprobs,
    tool_call_text,
)
from tests.toy_vllm.play import calls_due, formatted
from tests.toy_vllm.replies import Choice, Reply, Step
from tests.toy_vllm.requests import ApiError, ChatRequest, CompletionRequest, Request

MASKED = -9999.0
"""What vLLM reports for a token that top-p or top-k took out."""


def answer_chat(
    request: ChatRequest,
    mark: bytes,
    seed: int,
    max_model_len: int,
    tool_parser: bool,
    thoughts: str = "",
) -> Reply:
    """Sample `n` answers to a conversation; `tests.toy_vllm.play` says when tools are called."""
    if not request.messages:
        raise ApiError(
            "Cannot apply chat template to an empty conversation. Provide at least one message."
        )
    if request.top_logprobs and not request.logprobs:
        raise ApiError(
            "when using `top_logprobs`, `logprobs` must be set to true. (parameter=top_logprobs)",
            param="top_logprobs",
        )
    choice = request.tool_choice or ("auto" if request.tools else "none")
    if choice == "auto" and not tool_parser:
        raise ApiError(
            '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
        )
    if choice not in ("none", "auto") and not tool_parser:
        named = choice if isinstance(choice, str) else choice["function"]["name"]
        said = f'"{named}"' if isinstance(choice, str) else f'function "{named}"'
        raise ApiError(f"tool_choice={said} requires --tool-call-parser to be set")
    _check(request, max_model_len)
    prompt = chat_prompt(request.messages, request.tools)
    limit = _room(request, prompt, max_model_len)
    choices = []
    for index in range(request.n):
        one = Choice(index, prompt, _prompt_logprobs(request, prompt, mark))
        if thoughts:
            _think(one, request, mark, limit, thoughts)
        left = limit - len(one.token_ids)
        calls = calls_due(request, choice)
        text = formatted(request)
        if calls and left:
            _write_calls(one, request, mark, left, calls)
        elif text is not None and left:
            _write_text(one, request, mark, left, text)
        else:
            _sample(one, request, mark, random.Random(f"{_number(request, seed)}/{index}"), left)
        choices.append(one)
    return Reply(request, choices)


def answer_completion(
    request: CompletionRequest, mark: bytes, seed: int, max_model_len: int
) -> Reply:
    """Sample `n` continuations of each prompt."""
    _check(request, max_model_len)
    choices: list[Choice] = []
    for given in request.prompts():
        prompt = encode(given) if isinstance(given, str) else given
        if not prompt:
            raise ApiError("You must pass at least one prompt")
        if max(prompt) >= VOCAB:
            raise ApiError(f"Token id {max(prompt)} is out of vocabulary")
        limit = _room(request, prompt, max_model_len)
        for _ in range(request.n):
            index = len(choices)
            one = Choice(index, prompt, _prompt_logprobs(request, prompt, mark))
            _sample(one, request, mark, random.Random(f"{_number(request, seed)}/{index}"), limit)
            choices.append(one)
    return Reply(request, choices)


def _number(request: Request, seed: int) -> int:
    return seed if request.seed is None else request.seed


def _check(request: Request, max_model_len: int) -> None:
    """Refuse what vLLM refuses, in its words."""
    temperature = 1.0 if request.temperature is None else request.temperature
    top_p = 1.0 if request.top_p is None else request.top_p
    if request.stream_options and not request.stream:
        raise _bad("stream_options", "Stream options can only be defined when `stream=True`.")
    if request.n < 1:
        raise ApiError(f"n must be at least 1, got {request.n}.")
    if temperature < 0:
        raise _bad(
            "temperature", f"temperature must be non-negative, got {temperature}.", temperature
        )
    if temperature > 2:
        raise _bad("temperature", f"temperature must be in [0, 2], got {temperature}.", temperature)
    if not 0 < top_p <= 1:
        raise _bad("top_p", f"top_p must be in (0, 1], got {top_p}.", top_p)
    limit = request.limit()
    if limit is not None and limit < 1:
        raise _bad("max_tokens", f"max_tokens must be at least 1, got {limit}.", limit)
    if temperature == 0 and request.n > 1:
        raise ApiError(f"n must be 1 when using greedy sampling, got {request.n}.")
    if (top := request.top()) and top > 20:
        raise _bad(
            "logprobs",
            f"Requested sample logprobs of {top}, which is greater than max allowed: 20",
            top,
        )
    if limit is not None and limit > max_model_len:
        raise _bad(
            "max_tokens",
            f"max_tokens={limit} cannot be greater than max_model_len={max_model_len}. "
            "Please request fewer output tokens.",
            limit,
        )


def _bad(parameter: str, text: str, value: Any = None) -> ApiError:
    shown = f"parameter={parameter}" + ("" if value is None else f", value={value}")
    return ApiError(f"{text} ({shown})", param=parameter)


def _room(request: Request, prompt: list[int], max_model_len: int) -> int:
    """How many tokens may be sampled."""
    if len(prompt) >= max_model_len:
        raise _bad(
            "input_tokens",
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt "
            f"contains at least {max_model_len + 1} input tokens, which exceeds this limit even "
            "without any output tokens. Please reduce the length of the input prompt.",
            max_model_len + 1,
        )
    return min(request.limit() or max_model_len, max_model_len - len(prompt))


def _sample(choice: Choice, request: Request, mark: bytes, dice: random.Random, limit: int) -> None:
    stops, sent, searched = request.stops(), 0, 0
    # Text that may turn out to be the beginning of a stop string is held back.
    held = max(map(len, stops), default=1) - 1
    ids = [*choice.prompt_ids, *choice.token_ids]
    begin = len(ids)
    for position in range(limit):
        chances = _processed(next_logprobs(mark, ids), request, position)
        if request.temperature == 0:
            token = int(chances.argmax())
        else:
            token = int(np.searchsorted(np.exp(chances).cumsum(), dice.random()))
            token = min(token, VOCAB - 1)
        ids.append(token)
        step = _step(request, chances, token)
        choice.steps.append(step)
        text = decode(ids[begin:])
        if token == END and not request.ignore_eos:
            choice.finish_reason = "stop"
        elif token in (request.stop_token_ids or []):
            choice.finish_reason, choice.stop_reason = "stop", token
        elif position < request.min_tokens:
            searched = len(text)  # vLLM does not look for stop strings in the first min_tokens
        elif found := min(
            ((text.find(s, searched), s) for s in stops if s in text[searched:]), default=None
        ):
            choice.finish_reason, choice.stop_reason = "stop", found[1]
            kept = len(found[1]) if request.include_stop_str_in_output else 0
            text = text[: found[0] + kept]
        done = choice.finish_reason == "stop" or position == limit - 1
        visible = text if done else text[: max(sent, len(text) - held)]
        step.text, sent = visible[sent:], len(visible)
        if choice.finish_reason == "stop":
            return


def _processed(raw: NDArray[np.float64], request: Request, position: int) -> NDArray[np.float64]:
    """The distribution that is sampled from, renormalised, as --logprobs-mode processed_logprobs."""
    logits = raw.copy()
    if position < request.min_tokens:
        logits[END] = MASKED
    if request.temperature not in (None, 0, 1):
        logits = logits / request.temperature
    order = np.argsort(-logits)
    if request.top_k and request.top_k > 0:
        logits[order[request.top_k :]] = MASKED
    if request.top_p is not None and request.top_p < 1:
        before = np.exp(log_softmax(logits))[order].cumsum() - np.exp(log_softmax(logits))[order]
        logits[order[before >= request.top_p]] = MASKED
    return np.maximum(log_softmax(logits), MASKED)


def _step(request: Request, chances: NDArray[np.float64], token: int) -> Step:
    """One token; among its alternatives it comes first itself."""
    best = np.argsort(-chances)[: request.top() or 0]
    tops = [(i, float(chances[i])) for i in dict.fromkeys([token, *map(int, best)])]
    return Step([token], [tops[0][1]], [tops])


def _written(choice: Choice, request: Request, mark: bytes, tokens: list[int]) -> list[Step]:
    """Tokens that are what they are; their logprobs are the model's."""
    ids, steps = [*choice.prompt_ids, *choice.token_ids], []
    for token in tokens:
        steps.append(_step(request, next_logprobs(mark, ids), token))
        ids.append(token)
    return steps


def _in_pieces(steps: list[Step], number: int) -> list[Step]:
    """The steps in so many chunks."""
    cuts = [len(steps) * at // number for at in range(number + 1)]
    return [Step.joined(steps[a:b]) for a, b in pairwise(cuts)]


def _think(choice: Choice, request: Request, mark: bytes, limit: int, thoughts: str) -> None:
    """Thoughts before the answer, which a reasoning parser takes out of the text."""
    tokens = encode(f"<think>\n{thoughts}\n</think>\n\n")[:limit]
    choice.steps = _in_pieces(_written(choice, request, mark, tokens), 2)
    half = len(thoughts) // 2
    for step, piece in zip(choice.steps, (thoughts[:half], thoughts[half:]), strict=True):
        step.delta = {"reasoning": piece}
    choice.reasoning = thoughts


def _write_text(choice: Choice, request: Request, mark: bytes, limit: int, text: str) -> None:
    tokens = [*encode(text), END][:limit]
    steps = _written(choice, request, mark, tokens)
    for step in steps:
        step.text = decode(step.token_ids)
    choice.steps += steps
    choice.finish_reason = "stop" if tokens[-1] == END else "length"


def _write_calls(
    choice: Choice, request: Request, mark: bytes, limit: int, calls: list[dict[str, Any]]
) -> None:
    """Write tool calls; each comes in three chunks: its name, and its arguments in two."""
    texts = [tool_call_text(**call["function"]) for call in calls]
    written = [*encode("".join(texts)), END]
    steps = _written(choice, request, mark, written[:limit])
    if len(written) > limit:
        cut = Step.joined(steps)
        cut.text = decode(cut.token_ids)
        choice.steps.append(cut)
        return
    choice.finish_reason, choice.tool_calls = "tool_calls", calls
    deltas: list[dict[str, Any]] = []
    for index, call in enumerate(calls):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        half = len(arguments) // 2
        deltas.append({"index": index, **call, "function": {"name": name, "arguments": ""}})
        for piece in (arguments[:half], arguments[half:]):
            deltas.append({"index": index, "function": {"arguments": piece}})
    pieces = _in_pieces(steps, len(deltas))
    for step, delta in zip(pieces, deltas, strict=True):
        step.delta = {"tool_calls": [delta]}
    choice.steps += pieces


def _prompt_logprobs(
    request: Request, prompt: list[int], mark: bytes
) -> list[dict[str, Any] | None] | None:
    """Per token of the prompt, keyed by its id; nothing is known about the first."""
    if request.prompt_logprobs is None:
        return None
    entries: list[dict[str, Any] | None] = [None]
    for position in range(1, len(prompt)):
        chances = next_logprobs(mark, prompt[:position])
        order = np.argsort(-chances)
        shown = dict.fromkeys([prompt[position], *map(int, order[: request.prompt_logprobs])])
        entries.append(
            {
                str(token): {
                    "logprob": float(chances[token]),
                    "rank": int(np.flatnonzero(order == token)[0]) + 1,
                    "decoded_token": decode([token], skip_special=False),
                }
                for token in shown
            }
        )
    return entries
