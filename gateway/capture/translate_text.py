"""Taking the tokens out of vLLM's answers to `/v1/completions`, as `Capture` does for chat."""

from typing import Any

from gateway.capture.request import Wants
from gateway.capture.tokens import Capture, Json


class TextCapture(Capture):
    """What one prompt brought back.

    Choices go through `Capture` in the form that chat gives them, so tokens are taken and checked
    in one place. With `echo` vLLM puts the prompt's logprobs first; the sampled ones are as many
    as there are ids.
    """

    def __init__(
        self, completion_id: str, wants: Wants, served_model: str, shown: str, n: int, first: int
    ):
        """Nothing has come yet.

        Args:
            first: the index that the client sees for the first of the `n` choices.
        """
        super().__init__(completion_id, wants, served_model, shown, n)
        self._first = first
        self._logprobs: dict[int, Json] = {}
        self._stop_reasons: dict[int, Any] = {}

    def take_body(self, body: Json) -> None:
        """Take a whole answer in."""
        super().take_chunk(_as_chat(body, body["choices"]))
        for choice in body["choices"]:
            self._keep(choice)
        self.response["created"] = body.get("created")
        self.assemble()

    def take_chunk(self, chunk: Json) -> bool:
        """Take a chunk in and make it the client's; returns whether the client should see it."""
        choices = chunk.get("choices") or []
        visible = super().take_chunk(_as_chat(chunk, choices))
        for choice in choices:
            self._keep(choice)
        shown = [self._shown(choice) for choice in choices]
        chunk.update(id=self.id, model=self.shown, choices=shown)
        chunk.pop("usage", None)
        return visible

    def assemble(self) -> None:
        """Build `response` out of what was taken."""
        self.response = {
            "id": self.id,
            "object": "text_completion",
            "created": self.response.get("created"),
            "model": self.shown,
            "choices": [
                self._shown(
                    {
                        "index": index,
                        "text": self.messages[index].get("content") or "",
                        "logprobs": self._logprobs.get(index),
                        "finish_reason": choice.finish_reason,
                        "stop_reason": self._stop_reasons.get(index),
                        "token_ids": choice.token_ids,
                        "prompt_token_ids": self.prompt_ids,
                    }
                )
                for index, choice in sorted(self.choices.items())
            ],
            "usage": self.usage,
        }

    def _keep(self, choice: Json) -> None:
        index = choice["index"]
        kept = self._logprobs.setdefault(index, {})
        for name, values in (choice.get("logprobs") or {}).items():
            kept[name] = [*kept.get(name, ()), *(values or ())]
        if choice.get("stop_reason") is not None:
            self._stop_reasons[index] = choice["stop_reason"]

    def _shown(self, choice: Json) -> Json:
        """A choice without what the client did not ask for, and with what a reward can name.

        A list of prompts is logged as a completion for each, so each choice says where it is.
        """
        shown = {**choice, "index": self._first + choice["index"]}
        if not self.wants.logprobs:
            shown["logprobs"] = None
        if not self.wants.token_ids:
            shown.pop("token_ids", None)
            shown.pop("prompt_token_ids", None)
        return {**shown, "completion_id": self.id, "completion_choice": choice["index"]}


def _as_chat(answer: Json, choices: list[Json]) -> Json:
    # vLLM repeats the prompt's ids in each choice.
    prompts = [c["prompt_token_ids"] for c in choices if c.get("prompt_token_ids") is not None]
    prompt_ids = prompts[0] if prompts else None
    return {**answer, "prompt_token_ids": prompt_ids, "choices": [_chat_choice(c) for c in choices]}


def _chat_choice(choice: Json) -> Json:
    ids = choice.get("token_ids")
    values = (choice.get("logprobs") or {}).get("token_logprobs")
    if values is not None and ids is not None and len(values) > len(ids):
        values = values[len(values) - len(ids) :]
    return {
        "index": choice["index"],
        "delta": {"content": choice.get("text")},
        "token_ids": ids,
        "logprobs": {"content": [{"logprob": value} for value in values]} if values else None,
        "finish_reason": choice.get("finish_reason"),
    }
