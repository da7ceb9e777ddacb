"""Which trajectory and group a request says it belongs to; see design, "How completions find …"."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from gateway.errors import invalid
from gateway.store import codec

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")
_LONGEST_ID = 256


@dataclass(slots=True)
class Claims:
    """What the request itself says, before anything is looked up."""

    trajectory: str | None = None
    group: str | None = None
    parent: str | None = None
    split: str | None = None
    train: bool | None = None
    """False for a side call, such as one for a title: logged, and never trained on."""
    attribution: str = "new"
    """Which way named the trajectory: path, header, metadata, traceparent or none yet."""
    traceparent: str | None = None
    """The caller's trace context, whatever named the trajectory."""


def read_claims(
    path: Mapping[str, str], headers: Mapping[str, str], metadata: Mapping[str, Any]
) -> Claims:
    """The first of path, headers, metadata and traceparent that names each of the two.

    Raises:
        ApiError: an id is empty, too long or not text; a split is neither train nor eval.
    """
    trace_id = _trace_id(headers.get("traceparent"))
    claims = Claims()
    if trace_id is not None:
        claims.traceparent = headers["traceparent"].strip().lower()
    ways = (
        ("path", path.get("trajectory"), path.get("group")),
        ("header", headers.get("x-strop-trajectory"), headers.get("x-strop-group")),
        ("metadata", metadata.get("trajectory_id"), metadata.get("group_id")),
        ("traceparent", trace_id, None),
    )
    for way, trajectory, group in ways:
        if claims.trajectory is None and trajectory is not None:
            claims.trajectory = _identifier(trajectory, way, "trajectory")
            claims.attribution = way
        if claims.group is None and group is not None:
            claims.group = _identifier(group, way, "group")
    parent = headers.get("x-strop-parent", metadata.get("parent_trajectory_id"))
    if parent is not None:
        claims.parent = _identifier(parent, "header", "parent trajectory")
    split = headers.get("x-strop-split", metadata.get("split"))
    if split not in (None, "train", "eval"):
        raise invalid(f"The split is {split!r}; it must be 'train' or 'eval'.", "metadata.split")
    claims.split = split
    claims.train = _flag(headers.get("x-strop-train", metadata.get("train")))
    return claims


def task_of(messages: list[Any], tools: Any) -> str:
    """The task of a trajectory: what it was asked, before its first answer, and its tools."""
    data = orjson.dumps([messages, tools], option=orjson.OPT_SORT_KEYS)
    return codec.digest(data)[:10].hex()


def _trace_id(traceparent: str | None) -> str | None:
    if traceparent is None:
        return None
    match = _TRACEPARENT.fullmatch(traceparent.strip().lower())
    # W3C: an all-zero trace id, or version ff, is to be ignored as if absent.
    if match is None or traceparent.lower().startswith("ff") or not match[1].strip("0"):
        return None
    return match[1]


def _flag(value: Any) -> bool | None:
    if value is None or isinstance(value, bool):
        return value
    # OpenAI's metadata holds only text.
    if value in ("true", "false"):
        return bool(value == "true")
    raise invalid(f"train is {value!r}; it must be true or false.", "metadata.train")


def _identifier(value: Any, way: str, what: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise invalid(f"The {what} id given by {way} must be text that is not empty.", "metadata")
    if len(value) > _LONGEST_ID or not value.isprintable():
        raise invalid(
            f"The {what} id given by {way} must be at most {_LONGEST_ID} printable characters.",
            "metadata",
        )
    return value
