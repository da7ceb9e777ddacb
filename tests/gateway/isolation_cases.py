"""The requests of `test_isolation`: for every route what names something of another project."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

POLICY, TRAJECTORY, GROUP = "hidden-policy", "hidden-trajectory", "hidden-group"
PROMPT, COMMENT, OWNER = "hidden-prompt", "hidden-comment", "hidden-owner"
KIND = "hidden_kind"
SERVED = f"ours/{POLICY}@0"

Body = dict[str, Any] | list[Any] | None


@dataclass(frozen=True)
class Case:
    """One request. Names in braces are those of what the first project has."""

    method: str
    path: str
    """Of the route, as the application names it."""
    ask: str = ""
    """What is asked; empty: `path`, filled in."""
    body: Body = None
    form: dict[str, str] | None = None
    headers: dict[str, str] = field(default_factory=dict)
    theirs: tuple[int, ...] = (404,)
    """What the other project gets; 2xx where the answer is about its own things alone."""
    ours: int | None = 200
    """What the first one gets; None: it is not asked."""

    @property
    def makes(self) -> bool:
        """Whether the other project gets something of its own, of the same name."""
        return self.method == "POST" and self.theirs[0] < 300


def chat(model: str = POLICY, **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "?"}], "max_tokens": 3, **more}


def text(model: str = POLICY, **more: Any) -> dict[str, Any]:
    return {"model": model, "prompt": "?", "max_tokens": 3, **more}


def response(model: str = POLICY, **more: Any) -> dict[str, Any]:
    return {"model": model, "input": "?", **more}


def embed(model: str) -> dict[str, Any]:
    return {"model": model, "input": "?"}


CONTINUED = {"thread": {"type": "continue", "previous_message_id": "{message_id}"}}
IN_IT = {"metadata": {"trajectory_id": TRAJECTORY, "group_id": GROUP}}
BY_HEADER = {"x-strop-trajectory": TRAJECTORY, "x-strop-group": GROUP}
UNDER = f"/rollouts/{GROUP}/{TRAJECTORY}"
ROLLOUT = "/rollouts/{group}/{trajectory}"
# Their own policy under names of ours: they get things of their own of the same names.
OWN = (200,)


def surface(name: str, asked: Any, **more: Any) -> Iterator[Case]:
    """A surface under both of its paths: our policy's names, and our trajectory's."""
    for path, prefix in ((f"/v1/{name}", "/v1"), (f"{ROLLOUT}/v1/{name}", f"{UNDER}/v1")):
        ask = f"{prefix}/{name}"
        for model in (POLICY, f"{POLICY}@0"):
            yield Case("POST", path, ask, {**asked(model), **more}, headers=BY_HEADER)
        yield Case("POST", path, ask, {**asked(SERVED), **more}, ours=404)
        yield Case("POST", path, ask, {**asked("agent"), **more}, headers=BY_HEADER, theirs=OWN)


def page(path: str, ask: str = "", **more: Any) -> Case:
    return Case("GET", path, ask, **{"theirs": OWN, **more})


INFERENCE = [
    *surface("chat/completions", chat),
    *surface("chat/completions", chat, stream=True, **IN_IT),
    *surface("completions", text),
    *surface("responses", response),
    *surface("responses/input_tokens", response),
    *surface("messages", chat),
    *surface("messages/count_tokens", chat),
    *surface("embeddings", embed),
    # By the id of what it continues.
    *(
        Case("POST", f"{way}/v1/{name}", f"{under}/v1/{name}", body, theirs=(400, 404))
        for way, under in (("", ""), (ROLLOUT, UNDER))
        for name, body in (
            ("responses", response("agent", previous_response_id="{response_id}")),
            ("responses/input_tokens", response("agent", previous_response_id="{response_id}")),
            ("messages", chat("agent", **CONTINUED)),
            ("messages/count_tokens", chat("agent", **CONTINUED)),
        )
    ),
]

READING = [
    page("/v1/models"),
    page(f"{ROLLOUT}/v1/models", f"{UNDER}/v1/models"),
    *(
        Case("GET", path, f"/v1/models/{name}")
        for path in ("/v1/models/{model:path}", "/v1/models/{model}")
        for name in (POLICY, f"{POLICY}@0")
    ),
    Case("GET", "/v1/models/{model:path}", f"/v1/models/{SERVED}", ours=404),
    page("/v1/chat/completions"),
    page("/v1/chat/completions", f"/v1/chat/completions?metadata[owner]={OWNER}&status=any"),
    page("/v1/chat/completions", f"/v1/chat/completions?model={POLICY}"),
    Case("GET", "/v1/chat/completions", "/v1/chat/completions?after={completion_id}",
         theirs=OWN),
    Case("GET", "/v1/chat/completions/{completion_id}"),
    Case("GET", "/v1/chat/completions/{completion_id}", "/v1/chat/completions/{response_id}"),
    Case("GET", "/v1/chat/completions/{completion_id}/messages"),
    Case("GET", "/v1/responses/{id}", "/v1/responses/{response_id}"),
    Case("GET", "/v1/responses/{id}", "/v1/responses/{completion_id}"),
    Case("GET", "/v1/responses/{id}/input_items", "/v1/responses/{response_id}/input_items"),
    Case("POST", "/v1/responses/{id}/cancel", "/v1/responses/{response_id}/cancel", ours=400),
    Case("GET", "/v1/rewards", "/v1/rewards?completion_id={completion_id}"),
    Case("GET", "/v1/rewards", f"/v1/rewards?trajectory_id={TRAJECTORY}"),
    Case("GET", "/v1/trajectories/{trajectory_id}"),
    Case("GET", "/v1/trajectories/{trajectory_id}", f"/v1/trajectories/{TRAJECTORY}?tokens=true"),
    page("/v1/groups"),
    page("/v1/groups", f"/v1/groups?policy={POLICY}"),
    Case("GET", "/v1/groups/{group_id}"),
    Case("GET", "/v1/groups/{group_id}", f"/v1/groups/{GROUP}?policy={POLICY}"),
    page("/v1/policies"),
    *(Case("GET", "/v1/policies/{name}" + what) for what in ("", "/versions", "/steps", "/events")),
    Case("GET", "/v1/steps/{step_id}"),
    *(
        Case("GET", path, f"/v1/why/{name}")
        for path in ("/v1/why/{id:path}", "/v1/why/{id}")
        for name in ("{completion_id}", "{message_id}", TRAJECTORY, GROUP)
    ),
    page("/v1/export"),
    page("/v1/export", f"/v1/export?format=openai&policy={POLICY}"),
    page("/v1/export", "/v1/export?min_reward=0"),
    page("/v1/export", "/v1/export?format=parquet"),
    page("/v1/replicas"),
    page("/v1/retention"),
    page("/v1/events", headers={"last-event-id": "0"}),
    page("/metrics"),
    page("/healthz"),
    page("/readyz"),
    page("/docs"),
    page("/docs/oauth2-redirect"),
    page("/redoc"),
    page("/openapi.json"),
    page("/"),
    page("/groups"),
    page("/groups", f"/groups?policy={POLICY}"),
    Case("GET", "/policies/{name}"),
    Case("GET", "/groups/{policy}/{group_id:path}", f"/groups/{POLICY}/{GROUP}"),
    Case("GET", "/trajectories/{trajectory_id:path}", f"/trajectories/{TRAJECTORY}"),
    page("/steps"),
    page("/steps", f"/steps?policy={POLICY}"),
    Case("GET", "/steps/{step_id}"),
    Case("GET", "/ui/tokens/{completion_id}/{choice}", "/ui/tokens/{completion_id}/0"),
    page("/ui/live"),
    page("/ui/login"),
    page("/ui/static/{name}", "/ui/static/none.js", theirs=(404,), ours=404),
]  # fmt: skip

CHANGING = [
    Case("POST", "/v1/rewards", body={"completion_id": "{completion_id}", "reward": 1}, ours=201),
    Case("POST", "/v1/rewards", body={"completion_id": "{message_id}", "reward": 1}, ours=201),
    Case("POST", "/v1/rewards", body={"trajectory_id": TRAJECTORY, "reward": 1}, ours=201),
    Case(
        "POST",
        "/v1/rewards",
        body=[
            {"completion_id": "{their_completion_id}", "reward": 1},
            {"completion_id": "{completion_id}", "reward": 1},
        ],
        ours=404,
    ),
    Case(
        "POST",
        "/v1/chat/completions/{completion_id}",
        body={"metadata": {"owner": "me"}},
    ),
    Case("POST", "/v1/groups/{group_id}/close"),
    Case("POST", "/v1/import", f"/v1/import?created=1000&policy={POLICY}", theirs=OWN, body={
        "messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}],
        "reward": 1,
    }),
    # The same name is another policy; a version of ours is not forked.
    Case("POST", "/v1/policies", body={"name": POLICY}, theirs=(201,), ours=409),
    Case("POST", "/v1/policies/{name}/fork", body={"version": 0, "name": "copy"}, ours=201),
    Case("POST", "/v1/policies/{name}/pause"),
    Case("POST", "/v1/policies/{name}/resume"),
    Case("POST", "/v1/policies/{name}/promote", ours=409),
    Case("POST", "/v1/policies/{name}/drop", ours=409),
    Case("POST", "/v1/policies/{name}/rollback", body={"version": 0}),
    # Replicas are no project's own, and are drained by the operator's keys alone.
    Case("POST", "/v1/replicas/{name}/drain", "/v1/replicas/{replica}/drain",
         theirs=(403,), ours=403),
    Case("POST", "/v1/replicas/{name}/resume", "/v1/replicas/{replica}/resume",
         theirs=(403,), ours=403),
    Case("PUT", "/v1/retention", body={"days": 40}, theirs=OWN),
    Case("DELETE", "/v1/retention", theirs=OWN),
    Case("POST", "/ui/reward", form={"trajectory": TRAJECTORY, "thumb": "1"}),
    Case("POST", "/ui/reward",
         form={"trajectory": TRAJECTORY, "target": "{completion_id}", "number": "0.5"}),
    *(
        Case("POST", "/ui/policies/{name}/{action}", f"/ui/policies/{POLICY}/{action}",
             form={"version": "0"}, ours=ours)
        for action, ours in (
            ("rollback", 200), ("pause", 200), ("resume", 200), ("promote", 409), ("drop", 409)
        )
    ),
    Case("POST", "/ui/login", form={"key": "sk-strop-guess"}, theirs=(401, 403), ours=None),
    Case("POST", "/ui/logout", form={}, theirs=(200,)),
    page("/v1/chat/completions", f"/v1/chat/completions?metadata[owner]={OWNER}"),
    # Last: what they name is gone afterwards.
    Case("DELETE", "/v1/responses/{id}", "/v1/responses/{response_id}"),
    Case("DELETE", "/v1/chat/completions/{completion_id}",
         "/v1/chat/completions/{second_completion_id}"),
    Case("DELETE", "/v1/chat/completions", f"/v1/chat/completions?metadata[owner]={OWNER}",
         theirs=OWN),
    Case("DELETE", "/v1/trajectories/{trajectory_id}"),
    Case("DELETE", "/v1/trajectories", "/v1/trajectories?before=4000000000", theirs=OWN),
]  # fmt: skip

CASES = [*INFERENCE, *READING, *CHANGING]
