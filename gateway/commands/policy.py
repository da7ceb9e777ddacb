"""`strop policy …`: what is being trained, its versions, and the levers."""

from typing import Annotated, Any

import typer

from gateway.commands.shared import URL, AsJson, PolicyName, Url, ask, listing, right, show, when

policy_app = typer.Typer(help="What is being trained, its versions, and the way back.")


@policy_app.command("list")
def list_policies(url: Url = URL, as_json: AsJson = False) -> None:
    """All policies."""
    answer = ask(url, "/v1/policies")
    table = listing("policy", "serves", "trains from", "loaded", "state", "base model")
    for policy in answer["data"]:
        table.add_row(
            policy["name"],
            f"@{policy['alias']}",
            f"@{policy['head']}",
            " ".join(f"@{number}" for number in policy["loaded"]),
            policy["state"],
            policy["base_model"],
        )
    show(answer, as_json, table)


@policy_app.command("show")
def show_policy(name: PolicyName, url: Url = URL, as_json: AsJson = False) -> None:
    """A policy's versions, with the results of their probes."""
    policy = ask(url, f"/v1/policies/{name}")
    versions = ask(url, f"/v1/policies/{name}/versions")["data"]
    table = listing(right("version"), right("parent"), "state", right("step"), "probe")
    for version in versions:
        table.add_row(
            f"@{version['number']}",
            f"@{version['parent']}" if version["parent"] is not None else "",
            version["state"],
            str(version["step_id"] or ""),
            _probe(version["probe_result"]),
        )
    show({**policy, "versions": versions}, as_json, *_sentences(policy), table)


def _sentences(policy: dict[str, Any]) -> list[str]:
    said = [
        f"{policy['name']} serves @{policy['alias']}, trains from @{policy['head']}, "
        f"base model {policy['base_model']}"
    ]
    if policy["state"] == "paused":
        said.append(f"It is paused: {policy['state_reason']}")
    if (trial := policy["canary"]) is not None:
        share = f"{trial['share']:.0%} of the new trajectories"
        said.append(f"@{trial['version']} is on trial with {share}.")
    if (factor := policy["learning_rate_factor"]) != 1:
        said.append(f"Its learning rate is {factor:g} times the settings'.")
    return said


def _probe(result: dict[str, Any] | None) -> str:
    if not result:
        return ""
    if "error" in result:
        return str(result["error"])
    numbers: dict[str, float] = next(iter(result["replicas"].values()), {})
    if "mean_difference" not in numbers:
        return ""
    text = f"{numbers['mean_difference']:.1e} nats from the trainer's"
    if "mean_difference_to_previous" in numbers:
        text += f", {numbers['mean_difference_to_previous']:.1e} from the version before"
    return text


@policy_app.command("rollback")
def roll_back(name: PolicyName, version: int, url: Url = URL, as_json: AsJson = False) -> None:
    """Serve an earlier version now, and let training go on from it."""
    what = f"Loading and proving @{version} on every replica"
    policy = ask(url, f"/v1/policies/{name}/rollback", {"version": version}, what=what)
    show(policy, as_json, f"{name} serves @{policy['alias']} now and trains from it.")


@policy_app.command()
def fork(name: PolicyName, version: int, new: str, url: Url = URL, as_json: AsJson = False) -> None:
    """Make a new policy whose version 0 is a version of this one."""
    answer = ask(url, f"/v1/policies/{name}/fork", {"version": version, "name": new})
    show(answer, as_json, f"{new}@0 is {name}@{version}; it trains from there.")


@policy_app.command()
def pause(
    name: PolicyName,
    reason: Annotated[str, typer.Option(help="Shown to whoever asks why.")] = "paused by command",
    url: Url = URL,
    as_json: AsJson = False,
) -> None:
    """Take no more steps; serving goes on."""
    answer = ask(url, f"/v1/policies/{name}/pause", {"reason": reason})
    show(answer, as_json, f"{name} is served and not trained.")


@policy_app.command()
def resume(
    name: PolicyName,
    rate_factor: Annotated[
        float | None,
        typer.Option(help="What the settings' learning rate is multiplied with from now on."),
    ] = None,
    url: Url = URL,
    as_json: AsJson = False,
) -> None:
    """Take steps again."""
    policy = ask(url, f"/v1/policies/{name}/resume", {"rate_factor": rate_factor})
    rate = f"{policy['learning_rate_factor']:g} times its learning rate"
    show(policy, as_json, f"{name} is trained, from @{policy['head']}, with {rate}.")


@policy_app.command()
def promote(name: PolicyName, url: Url = URL, as_json: AsJson = False) -> None:
    """End the trial of a new version: it serves everybody."""
    policy = ask(url, f"/v1/policies/{name}/promote", {})
    show(policy, as_json, f"{name} serves @{policy['alias']} now.")


@policy_app.command()
def drop(name: PolicyName, url: Url = URL, as_json: AsJson = False) -> None:
    """End the trial of a new version: it serves nobody."""
    policy = ask(url, f"/v1/policies/{name}/drop", {})
    show(policy, as_json, f"{name} serves @{policy['alias']} and trains from it.")


@policy_app.command()
def events(
    name: PolicyName,
    limit: Annotated[int, typer.Option(min=1, max=1000)] = 20,
    url: Url = URL,
    as_json: AsJson = False,
) -> None:
    """What happened to a policy, and why; the newest first."""
    answer = ask(url, f"/v1/policies/{name}/events?limit={limit}")
    table = listing("when", "what", "version", "why")
    for event in answer["data"]:
        detail = event["detail"]
        table.add_row(
            when(event["at"]),
            event["kind"],
            f"@{event['version']}" if event["version"] is not None else "",
            str(detail.get("why") or detail.get("error") or ""),
        )
    show(answer, as_json, table)
