"""`/v1/policies`: what is being trained, its versions, and the way back."""

import asyncio
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from pydantic import BaseModel, ConfigDict, Field

from gateway import adapters
from gateway.backends.vllm import ReplicaRefused, ReplicaUnavailable
from gateway.errors import ApiError, invalid, not_found
from gateway.gateway import Gateway, gateway_of
from gateway.proofs import ProbeFailed
from gateway.store import policies, queries, statistics
from gateway.store.fingerprint import base_digest, changed
from gateway.store.policy_settings import Lora, PolicySettings

router = APIRouter(tags=["policies"])
Strop = Annotated[Gateway, Depends(gateway_of)]

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"


class NewPolicy(BaseModel):
    """A policy to create."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(pattern=NAME)
    lora: Lora = Field(default_factory=Lora)
    settings: PolicySettings = Field(default_factory=PolicySettings)


class Rollback(BaseModel):
    """The version to go back to."""

    model_config = ConfigDict(extra="forbid")

    version: int = Field(ge=0)


def policy_json(row: queries.Row, gateway: Gateway) -> dict[str, Any]:
    """A policy as the API shows it."""
    served = gateway.publisher.catalog.policies.get((row["project"], row["name"]))
    return {
        "object": "policy",
        "name": row["name"],
        "base_model": row["base_model"],
        "alias": row["alias"],
        "head": row["head"],
        "state": row["state"],
        "state_reason": row["state_reason"],
        "canary": canary_json(row),
        "learning_rate_factor": row["rate_factor"],
        "forked_from": row["forked_from"],
        "loaded": sorted(served.loaded) if served else [],
        "lora": row["lora"],
        "settings": row["settings"],
        "created_at": row["created_at"],
    }


def canary_json(row: queries.Row) -> dict[str, Any] | None:
    """The version on trial."""
    if row["canary"] is None:
        return None
    settings = row["settings"].get("canary", {})
    return {
        "version": row["canary"],
        "share": settings.get("share", 0.0),
        "since": row["canary_since"],
        "trajectories": settings.get("trajectories"),
    }


def _version_json(row: queries.Row, rewards: list[statistics.VersionReward]) -> dict[str, Any]:
    names = ("number", "parent", "state", "adapter_path", "probe_result", "step_id", "looked")
    return {
        "object": "version",
        "id": f"{row['policy']}@{row['number']}",
        **{name: row[name] for name in (*names, "created_at", "published_at", "deleted_at")},
        "rewards": {
            reward.split: {
                "mean": reward.mean,
                "standard_error": reward.standard_error,
                "trajectories": reward.trajectories,
            }
            for reward in rewards
            if reward.version == row["number"]
        },
    }


async def ensure_policy(gateway: Gateway, name: str, lora: Lora, settings: PolicySettings) -> bool:
    """Create a policy if there is none of that name; True if it was created.

    Raises:
        BrokenAdapter: the base model has no layers for such adapters.
    """
    model = gateway.settings.model()
    folder = gateway.settings.artifacts() / gateway.project / name / "000000"
    adapter = await asyncio.to_thread(_zero_adapter, folder, Path(model), lora)
    digest = await asyncio.to_thread(base_digest, Path(model))
    return await gateway.writer.run(
        lambda connection: policies.create(
            connection,
            gateway.project,
            name,
            base_model=model,
            base_served=gateway.settings.vllm.served_name,
            lora=lora,
            settings=settings,
            adapter_path=adapter,
            base_digest=digest,
        )
    )


def _zero_adapter(folder: Path, model: Path, lora: Lora) -> str | None:
    # Of a model that only vLLM can reach the shapes are not known; it is served as it is.
    if not model.is_dir():
        return None
    adapters.write_zero(folder, model, lora)
    return str(folder)


class OtherBaseModel(Exception):
    """The database's policy was trained on another base model than the settings name."""


async def check_base(gateway: Gateway, name: str) -> None:
    """Refuse to serve a policy's adapters on a base model that they were not made for.

    Raises:
        OtherBaseModel: saying what to do.
    """
    row, model = await find_policy(gateway, name), gateway.settings.model()
    if row["base_model"] != model:
        raise OtherBaseModel(
            f"the policy {name!r} in this database was made for the base model "
            f"{row['base_model']}, the settings name {model}. Set base_model back, give the policy "
            "another name, or use another data_dir or database_url"
        )
    if await asyncio.to_thread(changed, model, row["base_digest"]):
        raise OtherBaseModel(
            f"the files in {model} are not those that the policy {name!r} was trained on. Put them "
            "back, or give the policy another name"
        )


async def reconfigure(gateway: Gateway, name: str, settings: PolicySettings) -> None:
    """Give a policy the settings of the configuration file."""
    await gateway.writer.run(
        lambda connection: policies.configure(connection, gateway.project, name, settings)
    )


async def find_policy(gateway: Gateway, name: str) -> queries.Row:
    """A policy of the project.

    Raises:
        ApiError: 404.
    """

    def read() -> queries.Row | None:
        with gateway.database.read() as connection:
            return queries.policy(connection, gateway.project, name)

    found = await asyncio.to_thread(read)
    if found is None:
        raise not_found("policy", name, "GET /v1/policies lists them.")
    return found


@router.get("/v1/policies")
async def list_policies(gateway: Strop) -> dict[str, Any]:
    """All policies."""

    def read() -> list[dict[str, Any]]:
        with gateway.database.read() as connection:
            rows = queries.policies(connection, gateway.project)
            return [policy_json(row, gateway) for row in rows]

    return {"object": "list", "data": await asyncio.to_thread(read)}


@router.post("/v1/policies", status_code=201)
async def create_policy(body: NewPolicy, gateway: Strop) -> dict[str, Any]:
    """Create a policy; its version 0 is the base model."""
    limit = gateway.settings.vllm.max_lora_rank
    if limit is not None and body.lora.rank > limit:
        raise invalid(
            f"lora.rank is {body.lora.rank}, vLLM runs with --max-lora-rank {limit}. Choose a "
            "smaller rank, or start vLLM with a larger one.",
            "lora.rank",
        )
    try:
        created = await ensure_policy(gateway, body.name, body.lora, body.settings)
    except adapters.BrokenAdapter as error:
        raise invalid(f"The policy cannot be created: {error}.", "lora") from None
    if not created:
        raise ApiError(
            409, f"There is a policy {body.name!r} already.", param="name", code="policy_exists"
        )
    await gateway.publisher.reconcile()
    return policy_json(await find_policy(gateway, body.name), gateway)


@router.get("/v1/policies/{name}")
async def retrieve_policy(name: str, gateway: Strop) -> dict[str, Any]:
    """One policy."""
    return policy_json(await find_policy(gateway, name), gateway)


@router.get("/v1/policies/{name}/versions")
async def list_versions(name: str, gateway: Strop) -> dict[str, Any]:
    """The versions of a policy, oldest first, with their probes and what they earned."""
    await find_policy(gateway, name)

    def read() -> list[dict[str, Any]]:
        with gateway.database.read() as connection:
            rows = queries.versions(connection, gateway.project, name)
            rewards = statistics.rewards_by_version(connection, gateway.project, name)
            return [_version_json(row, rewards) for row in rows]

    return {"object": "list", "data": await asyncio.to_thread(read)}


@router.post("/v1/policies/{name}/rollback")
async def roll_back(name: str, body: Rollback, gateway: Strop) -> dict[str, Any]:
    """Serve an earlier version from now on, and let training go on from it."""
    await find_policy(gateway, name)

    def read() -> queries.Row | None:
        with gateway.database.read() as connection:
            return queries.version(connection, gateway.project, name, body.version)

    version = await asyncio.to_thread(read)
    if version is None:
        raise not_found(
            "version", f"{name}@{body.version}", f"GET /v1/policies/{name}/versions lists them."
        )
    if version["deleted_at"] is not None:
        raise ApiError(
            409,
            f"The files of {name}@{body.version} are deleted (see the policy's `keep` settings); "
            f"GET /v1/policies/{name}/versions says which are there.",
            param="version",
            code="version_deleted",
        )
    if version["state"] not in ("serving", "retired"):
        raise ApiError(
            409,
            f"{name}@{body.version} is {version['state']}; only a version that was served can be "
            "gone back to.",
            param="version",
            code="version_not_served",
        )
    try:
        await gateway.publisher.restore(gateway.project, name, body.version)
    except (ProbeFailed, ReplicaRefused, ReplicaUnavailable, adapters.BrokenAdapter) as error:
        raise ApiError(
            503,
            f"{name}@{body.version} cannot be served: {error}. The alias stays where it was.",
            code="version_not_served",
            retry_after=5,
        ) from error
    await gateway.writer.run(
        lambda connection: policies.rolled_back(connection, gateway.project, name, body.version)
    )
    await gateway.publisher.reconcile()
    return policy_json(await find_policy(gateway, name), gateway)
