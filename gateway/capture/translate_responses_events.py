"""The events of a streamed response.

LiteLLM has an iterator for this, which is not used: it sends reasoning as a summary without the
events that open one, ends a message only after the tool calls that follow it, sends the raw
arguments of custom tools, and builds the last event by counting tokens again. The last event here
is the one that `translate_responses.response` makes of the whole answer, and the others are parts
of it.
"""

import time
from typing import Any

from gateway.capture.tokens import merge_delta
from gateway.capture.translate import Json, parts
from gateway.capture.translate_responses import item_id, response, shell
from gateway.errors import ApiError


class ResponsesSurface:
    """One response; see `gateway.capture.translate.Surface`."""

    def __init__(self, module: Any, request: Json):
        self._module = module
        self._request = request
        self._custom = {
            tool["name"] for tool in request.get("tools") or () if tool["type"] == "custom"
        }
        self._chat: Json = {}
        """The answer so far, as a chat completion's body."""
        self._message: Json = {}
        self._finish_reason: str | None = None
        self._number = 0
        self._items: list[Json] = []
        """Those that were begun; only the last may still be open."""
        self._open: Json | None = None
        self._calls = 0
        self._logprobs: list[Json] = []
        """Those whose text has not been shown."""

    def answer(self, chat: Json) -> Json:
        """The response object, not streamed."""
        done = response(self._module, chat, self._request)
        done["completed_at"] = int(time.time())
        return done

    def error(self, error: ApiError) -> Json:
        """An error in OpenAI's format."""
        return error.body()

    def chunk(self, chunk: Json) -> list[Json]:
        """Deltas, and the events that begin and end what they belong to."""
        events: list[Json] = []
        if not self._chat:
            self._chat = {name: chunk[name] for name in ("id", "created", "model")}
            for kind in ("created", "in_progress"):
                events.append(self._event(f"response.{kind}", response=self._shell()))
        self._chat["usage"] = chunk.get("usage") or self._chat.get("usage")
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            merge_delta(self._message, delta)
            self._logprobs += (choice.get("logprobs") or {}).get("content") or ()
            for kind, value in parts(delta):
                events += getattr(self, f"_{kind}")(value)
            self._finish_reason = choice.get("finish_reason") or self._finish_reason
        return events

    def end(self) -> list[Json]:
        """The end of the last item, and the whole response."""
        choice = {"message": self._message, "finish_reason": self._finish_reason}
        self._message.setdefault("content", None)
        done = self.answer({**self._chat, "choices": [choice]})
        events = self._close(done["status"])
        for item in done["output"]:
            # The whole answer does not say which of its logprobs are those of its text.
            shown = [i for i in self._items if i["id"] == item["id"] and i["type"] == "message"]
            if shown and item["content"][0]["type"] == "output_text":
                item["content"][0]["logprobs"] = shown[-1]["content"][0]["logprobs"]
        order = {item["id"]: index for index, item in enumerate(self._items)}
        done["output"].sort(key=lambda item: order.get(item["id"], len(order)))
        return [*events, self._event(f"response.{done['status']}", response=done)]

    def failed(self, error: ApiError) -> list[Json]:
        """The stream broke off."""
        failed = self._shell()
        failed["status"] = "failed"
        failed["error"] = {"code": "server_error", "message": error.message}
        failed["output"] = [item for item in self._items if item is not self._open]
        return [self._event("response.failed", response=failed)]

    def _shell(self) -> Json:
        chat = self._chat or {"id": "", "created": int(time.time()), "model": ""}
        return shell(self._request, chat["id"], chat["created"], chat["model"])

    def _event(self, kind: str, **fields: Any) -> Json:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return event

    def _part_event(self, kind: str, **fields: Any) -> Json:
        """An event inside the open item."""
        assert self._open is not None
        place = {"item_id": self._open["id"], "output_index": len(self._items) - 1}
        return self._event(f"response.{kind}", **place, **fields)

    def _begin(self, kind: str, **fields: Any) -> list[Json]:
        events = self._close("completed")
        self._open = {
            "id": item_id(kind, self._chat["id"], self._calls),
            "type": kind,
            **fields,
            "status": "in_progress",
        }
        self._items.append(self._open)
        self._calls += kind.endswith("_call")
        # Copied, because the item is filled while its event may still be waiting to be sent.
        shown = {**self._open}
        index = len(self._items) - 1
        return [
            *events,
            self._event("response.output_item.added", output_index=index, item=shown),
        ]

    def _reasoning(self, text: str) -> list[Json]:
        events = []
        if self._open is None or self._open["type"] != "reasoning":
            events = self._begin("reasoning", summary=[], content=[])
            part = {"type": "reasoning_text", "text": ""}
            events.append(self._part_event("content_part.added", content_index=0, part=part))
            assert self._open is not None
            self._open["content"] = [{**part}]
        return [*events, self._delta("reasoning_text.delta", text)]

    def _text(self, text: str) -> list[Json]:
        events = []
        if self._open is None or self._open["type"] != "message":
            events = self._begin("message", role="assistant", content=[])
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            events.append(self._part_event("content_part.added", content_index=0, part=part))
            assert self._open is not None
            self._open["content"] = [{**part, "logprobs": []}]
        assert self._open is not None
        logprobs, self._logprobs = self._logprobs, []
        self._open["content"][0]["logprobs"] += logprobs
        return [*events, self._delta("output_text.delta", text, logprobs=logprobs)]

    def _delta(self, kind: str, text: str, **fields: Any) -> Json:
        assert self._open is not None
        self._open["content"][0]["text"] += text
        return self._part_event(kind, content_index=0, delta=text, **fields)

    def _call(self, call: Json) -> list[Json]:
        events = []
        function = call.get("function") or {}
        if call.get("id"):
            name = function.get("name") or ""
            kind = "custom_tool_call" if name in self._custom else "function_call"
            field = "input" if name in self._custom else "arguments"
            events = self._begin(kind, call_id=call["id"], name=name, **{field: ""})
        arguments = function.get("arguments")
        if arguments and self._open is not None:
            if self._open["type"] == "function_call":
                self._open["arguments"] += arguments
                events.append(self._part_event("function_call_arguments.delta", delta=arguments))
            else:
                # JSON around the input, of which nothing can be shown before it is whole.
                self._open["input"] += arguments
        return events

    def _close(self, status: str) -> list[Json]:
        item = self._open
        if item is None:
            return []
        events = []
        if item["type"] in ("message", "reasoning"):
            part = item["content"][0]
            if item["type"] == "message":
                part["logprobs"] += self._logprobs
                self._logprobs = []
            kind, text = part["type"], {"text": part["text"]}
            extra: Json = {"logprobs": part["logprobs"]} if kind == "output_text" else {}
            events = [
                self._part_event(f"{kind}.done", content_index=0, **text, **extra),
                self._part_event("content_part.done", content_index=0, part={**part}),
            ]
        elif item["type"] == "function_call":
            name, arguments = item["name"], item["arguments"]
            events = [
                self._part_event("function_call_arguments.done", name=name, arguments=arguments)
            ]
        else:
            item["input"] = self._module.unwrap_custom_tool_arguments(item["input"])
            events = [
                self._part_event("custom_tool_call_input.delta", delta=item["input"]),
                self._part_event("custom_tool_call_input.done", input=item["input"]),
            ]
        item["status"] = status
        index = len(self._items) - 1
        events.append(self._event("response.output_item.done", output_index=index, item={**item}))
        self._open = None
        return events
