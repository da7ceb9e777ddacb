"""One completion, several names: each surface shows an id of the shape that its clients know."""

_STORED = "chatcmpl-"
_SHOWN = ("resp_", "msg_")


def completion_id(name: str) -> str:
    """The id under which a completion is stored, from any id that a client was given for it."""
    for prefix in _SHOWN:
        if name.startswith(prefix):
            return _STORED + name.removeprefix(prefix)
    return name


def response_id(stored: str) -> str:
    """The completion's id as `/v1/responses` shows it."""
    return "resp_" + stored.removeprefix(_STORED)


def message_id(stored: str) -> str:
    """The completion's id as `/v1/messages` shows it."""
    return "msg_" + stored.removeprefix(_STORED)
