"""What a model's chat template tells about the way in which it calls tools."""

import json
from pathlib import Path

_MARKS = (
    # The first that is in the template; `<tool_call>` is in both of the first two.
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3_json"),
)
"""What the template has a tool call begin with → the name of vLLM's parser for it."""


def tool_parser_of(model: str) -> str | None:
    """vLLM's parser for the tool calls of a model in a folder; None where the folder does not say.

    A template that does not mention tools says nothing, whatever the model may write.
    """
    template = _chat_template(Path(model).expanduser())
    if "tools" not in template:
        return None
    return next((parser for mark, parser in _MARKS if mark in template), None)


def _chat_template(folder: Path) -> str:
    try:
        return (folder / "chat_template.jinja").read_text()
    except OSError:
        pass
    try:
        found = json.loads((folder / "tokenizer_config.json").read_text()).get("chat_template")
    except (OSError, ValueError):
        return ""
    if isinstance(found, list):
        # Several by name; one of them may be for tools alone.
        found = "".join(str(one.get("template", "")) for one in found)
    return found if isinstance(found, str) else ""
