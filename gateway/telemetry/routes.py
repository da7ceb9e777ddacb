"""Which route a request came to, as a label: one of few, whatever a client puts into its path."""

from starlette.types import Scope

_METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})
UNKNOWN = "unknown"


def route_of(scope: Scope) -> str:
    """Method and path with its parameters left open, such as `POST /v1/chat/completions`.

    Both ways to a surface, plain and under `/rollouts/…`, are one route. `unknown` where there is
    no such route, or the request was refused before it came to one.
    """
    if "endpoint" not in scope or scope["method"] not in _METHODS:
        return UNKNOWN
    path = str(getattr(scope.get("route"), "path", scope["path"]))
    if path.startswith("/rollouts/"):
        path = "/v1/" + path.partition("/v1/")[2]
    return f"{scope['method']} {path}"
