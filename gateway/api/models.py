"""`GET /v1/models`: the names that clients may use."""

from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Depends

from gateway.errors import model_not_found
from gateway.gateway import Gateway, gateway_of
from gateway.naming import unless_new

router = APIRouter(tags=["models"])
Strop = Annotated[Gateway, Depends(gateway_of)]


def _card(name: str, created: int, owner: str, **more: Any) -> dict[str, Any]:
    """A model as OpenAI shows one, with what Anthropic's clients read beside it."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": owner,
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z"),
        **more,
    }


def _listing(gateway: Gateway) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for policy in gateway.publisher.catalog.of(gateway.project):
        names = [(policy.name, policy.alias)]
        names += [(f"{policy.name}@{number}", number) for number in sorted(policy.loaded)]
        for name, version in names:
            found[name] = _card(
                name, policy.created, "strop", root=policy.base_model, version=version
            )
    for name, provider in gateway.settings.providers.items():
        found[name] = _card(name, 0, provider.model.partition("/")[0])
    return found


@router.get("/v1/models")
@router.get("/rollouts/{group}/{trajectory}/v1/models", include_in_schema=False)
async def list_models(gateway: Strop) -> dict[str, Any]:
    """Policies, and the versions of them that are loaded."""
    listing = _listing(gateway)
    names: list[str | None] = [*listing] or [None]
    page = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
    return {"object": "list", "data": list(listing.values()), **page}


@router.get("/v1/models/{model:path}")
async def retrieve_model(model: str, gateway: Strop) -> dict[str, Any]:
    """One of them."""
    listing = _listing(gateway)
    if model not in listing:
        raise await unless_new(gateway, model, model_not_found(model, list(listing)))
    return listing[model]
