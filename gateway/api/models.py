"""`GET /v1/models`: the names that clients may use."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends

from gateway.errors import model_not_found
from gateway.gateway import Gateway, gateway_of

router = APIRouter(tags=["models"])
Strop = Annotated[Gateway, Depends(gateway_of)]


def _listing(gateway: Gateway) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for policy in gateway.publisher.catalog.of(gateway.project):
        names = [(policy.name, policy.alias)]
        names += [(f"{policy.name}@{number}", number) for number in sorted(policy.loaded)]
        for name, version in names:
            found[name] = {
                "id": name,
                "object": "model",
                "created": policy.created,
                "owned_by": "strop",
                "root": policy.base_model,
                "version": version,
            }
    for name, provider in gateway.settings.providers.items():
        found[name] = {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": provider.model.partition("/")[0],
        }
    return found


@router.get("/v1/models")
@router.get("/rollouts/{group}/{trajectory}/v1/models", include_in_schema=False)
async def list_models(gateway: Strop) -> dict[str, Any]:
    """Policies, and the versions of them that are loaded."""
    return {"object": "list", "data": list(_listing(gateway).values())}


@router.get("/v1/models/{model:path}")
async def retrieve_model(model: str, gateway: Strop) -> dict[str, Any]:
    """One of them."""
    listing = _listing(gateway)
    if model not in listing:
        raise model_not_found(model, list(listing))
    return listing[model]
