"""Requests as vLLM 0.32 reads them, and the bodies of its errors."""

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator


class ApiError(Exception):
    """An error with the body that vLLM gives it."""

    def __init__(
        self,
        message: str,
        kind: str = "BadRequestError",
        *,
        param: str | None = None,
        code: int = 400,
    ) -> None:
        super().__init__(message)
        self.message, self.kind, self.param, self.code = message, kind, param, code

    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}


def validation_error(error: ValidationError) -> ApiError:
    """A field of the wrong type, said the way vLLM says it."""
    found = error.errors(include_url=False, include_context=False)
    lines, where = [], [".".join(["body", *map(str, item["loc"])]) for item in found]
    for item, loc in zip(found, where, strict=True):
        given = item["input"]
        shown = f"<dict of {len(given)} items>" if isinstance(given, dict) else given
        parts = {"type": item["type"], "loc": loc, "msg": item["msg"], "input": shown}
        lines.append(f"  {parts}")
    plural = "s" if len(found) > 1 else ""
    head = f"{len(found)} validation error{plural}:\n"
    return ApiError(head + "\n".join(lines), "Bad Request", param=where[0])


class Request(BaseModel):
    """The fields that both completion routes share; unknown ones are accepted and ignored."""

    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    n: int = 1
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    stream: bool | None = False
    stream_options: dict[str, Any] | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None

    def limit(self) -> int | None:
        return self.max_tokens

    def top(self) -> int | None:
        """How many alternatives per token were asked for; None: no logprobs at all."""
        raise NotImplementedError

    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


def check_texts(messages: list[dict[str, Any]]) -> None:
    """Refuse a part of a message whose text is none."""
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            text = part.get("text") if isinstance(part, dict) else None
            if text is not None and not isinstance(text, str):
                raise ApiError("Input should be a valid string", "Bad Request")


class ChatRequest(Request):
    """`POST /v1/chat/completions`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None

    @field_validator("messages")
    @classmethod
    def _texts(cls, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        check_texts(messages)
        return messages

    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(Request):
    """`POST /v1/completions`."""

    prompt: list[int] | list[list[int]] | str | list[str]
    max_tokens: int | None = 16
    logprobs: int | None = None

    def top(self) -> int | None:
        return self.logprobs

    def prompts(self) -> list[list[int] | str]:
        several = isinstance(self.prompt, list) and not isinstance(next(iter(self.prompt), 0), int)
        return list(self.prompt) if several else [self.prompt]  # type: ignore[arg-type, list-item]
