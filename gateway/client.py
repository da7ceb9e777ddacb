"""A small client of strop's own routes, for the command line."""

import json
import os
import urllib.error
import urllib.request
from typing import Any


class ApiFailed(Exception):
    """The gateway answered with an error, or not at all."""


def call(
    base_url: str,
    path: str,
    body: Any = None,
    *,
    method: str | None = None,
    timeout: float = 30.0,
) -> Any:
    """Ask, and return the JSON answer. `STROP_API_KEY` is sent along.

    Args:
        method: None: GET, or POST where there is a body.

    Raises:
        ApiFailed: with the gateway's own message.
    """
    data = json.dumps(body).encode() if body is not None else None
    headers = {"content-type": "application/json"}
    if key := os.environ.get("STROP_API_KEY"):
        headers["authorization"] = f"Bearer {key}"
    request = urllib.request.Request(base_url.rstrip("/") + path, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        raw = error.read()
        try:
            answer = json.loads(raw)
        except ValueError:
            answer = {}
        if path == "/readyz" and "problems" in answer:
            return answer
        message = answer.get("error", {}).get("message") or raw.decode(errors="replace")
        raise ApiFailed(message) from None
    except OSError as error:
        raise ApiFailed(
            f"no gateway at {base_url} ({error}). Start one with `strop up`, or name another with "
            "--url or STROP_URL."
        ) from None
