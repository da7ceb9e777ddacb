"""Taking the exact tokens out of vLLM's answer, and hiding from the client what it did not ask for.

`Capture` is filled either by one JSON body or by the chunks of a stream. What it ends with is the
same: a response as a non-streaming client would have got it, and the choices' token ids and
logprobs, checked against `usage`.
"""

from typing import Any

from gateway.capture.request import Wants
from gateway.store.records import CapturedChoice

Json = dict[str, Any]

_LISTS_BY_INDEX = ("tool_calls",)


class WrongVersion(Exception):
    """vLLM answered with another model than it was asked for."""


class Capture:
    """What one request brought back."""

    def __init__(
        self, completion_id: str, wants: Wants, served_model: str | None, shown: str, n: int
    ):
        """Nothing has come yet.

        Args:
            served_model: what must answer; None where any model may.
        """
        self.id = completion_id
        self.wants = wants
        self.expected = served_model
        self.shown = shown
        """The model name that the client sees: the policy and version."""
        self.n = n
        self.served_model: str | None = None
        self.prompt_ids: list[int] | None = None
        self.choices: dict[int, CapturedChoice] = {}
        self.messages: dict[int, Json] = {}
        self.usage: Json | None = None
        self.response: Json = {}
        self.held: list[bytes] = []
        """Events of a stream that wait until the completion is durable."""
        self._ended = 0
        self._visible_logprobs: dict[int, list[Any]] = {}
        self._stop_reasons: dict[int, Any] = {}
        """Stop strings that ended choices of a stream, as vLLM names them."""

    def take_body(self, body: Json) -> None:
        """Take a non-streamed answer in; `response` is then what the client gets."""
        self._check_model(body)
        prompt_ids = body.pop("prompt_token_ids", None)
        self.prompt_ids = prompt_ids
        self.usage = body.get("usage")
        for choice in body.get("choices", ()):
            index = choice.get("index", 0)
            token_ids = choice.pop("token_ids", None)
            self.choices[index] = CapturedChoice(
                index,
                choice.get("finish_reason"),
                token_ids,
                _logprobs(choice.get("logprobs")),
            )
            self.messages[index] = choice.get("message") or {}
            if not self.wants.logprobs:
                choice["logprobs"] = None
            if self.wants.token_ids:
                choice["token_ids"] = token_ids
        if self.wants.token_ids:
            body["prompt_token_ids"] = prompt_ids
        body["id"] = self.id
        body["model"] = self.shown
        self.response = body

    def take_chunk(self, chunk: Json) -> bool:
        """Take one streamed chunk in and strip it; returns whether the client should see it."""
        if self.served_model is None:
            self._check_model(chunk)
            self.response = {
                "id": self.id,
                "object": "chat.completion",
                "created": chunk.get("created"),
                "model": self.shown,
            }
        chunk["id"] = self.id
        chunk["model"] = self.shown
        prompt_ids = chunk.get("prompt_token_ids")
        if prompt_ids is not None:
            self.prompt_ids = prompt_ids
            if not self.wants.token_ids:
                del chunk["prompt_token_ids"]
        elif not self.wants.token_ids:
            chunk.pop("prompt_token_ids", None)
        usage = chunk.get("usage")
        if usage is not None:
            self.usage = usage
        choices = chunk.get("choices") or ()
        if not self.wants.usage:
            chunk.pop("usage", None)
            if not choices:
                return False
        visible = not choices
        for choice in choices:
            visible |= self._take_choice(choice)
        return visible

    def _check_model(self, answer: Json) -> None:
        self.served_model = answer.get("model")
        if self.expected is not None and self.served_model != self.expected:
            raise WrongVersion(f"asked for {self.expected}, vLLM answered as {self.served_model}")

    def _take_choice(self, choice: Json) -> bool:
        index = choice.get("index", 0)
        captured = self.choices.get(index)
        if captured is None:
            captured = self.choices[index] = CapturedChoice(index)
            self.messages[index] = {}
        delta = choice.get("delta") or {}
        merge_delta(self.messages[index], delta)
        token_ids = choice.get("token_ids")
        if token_ids:
            captured.token_ids = captured.token_ids or []
            captured.token_ids.extend(token_ids)
        logprobs = choice.get("logprobs")
        values = _logprobs(logprobs)
        if values and logprobs is not None:
            captured.logprobs = captured.logprobs or []
            captured.logprobs.extend(values)
            if self.wants.logprobs:
                self._visible_logprobs.setdefault(index, []).extend(logprobs["content"])
        if not self.wants.token_ids:
            choice.pop("token_ids", None)
        if not self.wants.logprobs:
            choice["logprobs"] = None
        finish_reason = choice.get("finish_reason")
        if choice.get("stop_reason") is not None:
            self._stop_reasons[index] = choice["stop_reason"]
        if finish_reason is not None:
            self._ended += captured.finish_reason is None
            captured.finish_reason = finish_reason
        # A chunk that only carried token ids shows the client nothing.
        return bool(
            any(value not in (None, "", []) for value in delta.values())
            or finish_reason is not None
            or (self.wants.logprobs and values)
            or (self.wants.token_ids and token_ids)
        )

    @property
    def finished(self) -> bool:
        """Whether every choice has ended."""
        return self._ended == self.n

    def assemble(self) -> None:
        """Build `response` out of the chunks that were taken."""
        self.response["choices"] = [
            {
                "index": index,
                "message": {"role": "assistant", "content": None, **self.messages[index]},
                "logprobs": {"content": self._visible_logprobs[index]}
                if index in self._visible_logprobs
                else None,
                "finish_reason": choice.finish_reason,
                "stop_reason": self._stop_reasons.get(index),
            }
            for index, choice in sorted(self.choices.items())
        ]
        self.response["usage"] = self.usage

    def disagreement(self) -> str | None:
        """Why ids, logprobs and usage do not fit each other; None if they do."""
        if self.prompt_ids is None:
            return "the prompt's token ids are missing"
        if len(self.choices) != self.n:
            return f"{len(self.choices)} choices came back instead of {self.n}"
        for choice in self.choices.values():
            if choice.token_ids is None:
                return f"the token ids of choice {choice.index} are missing"
            if choice.logprobs is None:
                return f"the logprobs of choice {choice.index} are missing"
            if len(choice.token_ids) != len(choice.logprobs):
                return (
                    f"choice {choice.index} has {len(choice.token_ids)} token ids "
                    f"and {len(choice.logprobs)} logprobs"
                )
        if self.usage is None:
            return "usage is missing"
        prompt, sampled = self.usage.get("prompt_tokens"), self.usage.get("completion_tokens")
        if prompt != len(self.prompt_ids):
            return f"usage counts {prompt} prompt tokens, {len(self.prompt_ids)} ids came"
        ids = sum(len(choice.token_ids or ()) for choice in self.choices.values())
        if sampled != ids:
            return f"usage counts {sampled} sampled tokens, {ids} ids came"
        return None


def _logprobs(logprobs: Any) -> list[float] | None:
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    return [entry["logprob"] for entry in content] if content is not None else None


def merge_delta(message: Json, delta: Json) -> None:
    """Add a streamed delta to the message that it is a part of."""
    for key, value in delta.items():
        if value is None:
            continue
        if key in _LISTS_BY_INDEX:
            _merge_calls(message.setdefault(key, []), value)
        elif isinstance(value, str) and key != "role":
            message[key] = (message.get(key) or "") + value
        else:
            message[key] = value


def _merge_calls(calls: list[Json], deltas: list[Json]) -> None:
    for delta in deltas:
        index = delta.get("index", len(calls))
        while len(calls) <= index:
            calls.append({"function": {"name": "", "arguments": ""}})
        call = calls[index]
        for key in ("id", "type"):
            if delta.get(key):
                call[key] = delta[key]
        function = delta.get("function") or {}
        for key in ("name", "arguments"):
            if function.get(key):
                call["function"][key] += function[key]
