"""vLLM replicas: which are up, which versions each is proven to serve, and which to ask."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from hashlib import blake2b
from time import monotonic
from typing import Any

import aiohttp
import orjson

from gateway.backends.ejection import Ejection
from gateway.backends.members import Members
from gateway.backends.wire import Response, Wire

Json = dict[str, Any]

UpstreamResponse = aiohttp.ClientResponse | Response

_STICKY_SLACK = 4
"""How many more requests than the least loaded a replica may have and still keep its
trajectories: their shared prefix is in its cache, which is worth a short queue."""


class ReplicaUnavailable(Exception):
    """No connection, or one that broke."""


class ReplicaRefused(Exception):
    """The replica answered, with an error."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class Replica:
    """One vLLM server."""

    def __init__(self, url: str, session: aiohttp.ClientSession):
        self.url = url.rstrip("/").removesuffix("/v1")
        self._session = session
        self._wire = Wire.to(self.url, session.timeout)
        self.healthy = False
        self.error: str | None = "not asked yet"
        self.models: frozenset[str] = frozenset()
        """What it says it serves."""
        self.longest: int | None = None
        """Tokens of the longest prompt and answer together, if it says so."""
        self.proven: frozenset[str] = frozenset()
        """The versions among them that passed their probe here."""
        self.source = self.url
        """The entry of the settings that it comes from."""
        self.ejection = Ejection()
        self.leaving = False
        """It is no longer among the replicas, and only ends what it has begun."""
        self.in_flight = 0
        self.in_flight_by_model: dict[str, int] = {}
        self.asked_at = 0.0
        """When the last request was sent to it, on the monotonic clock."""

    async def refresh(self) -> None:
        """Ask what it serves; a version that it no longer has is no longer proven."""
        try:
            body = await self._get("/v1/models")
        except (ReplicaUnavailable, ReplicaRefused) as error:
            self.lost(str(error))
            return
        self.models = frozenset(model["id"] for model in body["data"])
        lengths = [model.get("max_model_len") for model in body["data"]]
        self.longest = max((n for n in lengths if isinstance(n, int)), default=None)
        self.proven &= self.models
        self.healthy, self.error = True, None

    def lost(self, error: str) -> None:
        """Take the replica out of use until it answers again, and trust nothing it had."""
        self.healthy, self.error = False, error
        self.models = self.proven = frozenset()

    @asynccontextmanager
    async def post(self, path: str, body: Json, model: str) -> AsyncIterator[UpstreamResponse]:
        """Send a request and give the response before its body.

        Leaving the block early closes the connection, which makes vLLM abort the request.

        Raises:
            aiohttp.ClientConnectorError: nothing was sent.
            aiohttp.ClientError: the connection broke.
        """
        self.asked_at = monotonic()
        self.in_flight += 1
        self.in_flight_by_model[model] = self.in_flight_by_model.get(model, 0) + 1
        try:
            data = orjson.dumps(body)
            if self._wire is not None:
                async with self._wire.post(path, data) as answer:
                    yield answer
                return
            async with self._session.post(
                self.url + path, data=data, headers={"content-type": "application/json"}
            ) as response:
                yield response
        finally:
            self.in_flight -= 1
            self.in_flight_by_model[model] -= 1
            if not self.in_flight_by_model[model]:
                del self.in_flight_by_model[model]

    def close(self) -> None:
        """Close the connections that nobody uses."""
        if self._wire is not None:
            self._wire.close()

    async def load(self, name: str, path: str) -> None:
        """Load an adapter under a name; one that is loaded already is fine."""
        try:
            await self._post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})
        except ReplicaRefused as error:
            if "already" not in str(error):
                raise
        self.models |= {name}

    async def unload(self, name: str) -> None:
        """Take an adapter's name away."""
        self.proven -= {name}
        await self._post("/v1/unload_lora_adapter", {"lora_name": name})
        self.models -= {name}

    async def prompt_logprobs(self, model: str, token_ids: list[int]) -> list[float]:
        """The model's own logprob of each token after the first, in nats; len(token_ids) - 1."""
        body = await self._post(
            "/v1/completions",
            {
                "model": model,
                "prompt": token_ids,
                "max_tokens": 1,
                "temperature": 1.0,
                "prompt_logprobs": 0,
            },
        )
        if body.get("model") != model:
            raise ReplicaRefused(200, f"asked for {model}, it answered as {body.get('model')}")
        entries = body["choices"][0]["prompt_logprobs"]
        return [
            float(entry[str(token)]["logprob"])
            for token, entry in zip(token_ids[1:], entries[1:], strict=True)
        ]

    async def _get(self, path: str) -> Json:
        return await self._json(self._session.get(self.url + path, timeout=_HEALTH))

    async def _post(self, path: str, body: Json) -> Json:
        return await self._json(
            self._session.post(
                self.url + path,
                data=orjson.dumps(body),
                headers={"content-type": "application/json"},
                timeout=_CONTROL,
            )
        )

    async def _json(self, request: Any) -> Json:
        try:
            async with request as response:
                raw = await response.read()
                if response.status >= 400:
                    raise ReplicaRefused(response.status, error_message(raw))
                try:
                    body = orjson.loads(raw)
                except orjson.JSONDecodeError:
                    return {}
                return body if isinstance(body, dict) else {}
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise ReplicaUnavailable(f"{type(error).__name__}: {error}") from error


_CONTROL = aiohttp.ClientTimeout(total=60)
_HEALTH = aiohttp.ClientTimeout(total=10)


def error_message(raw: bytes) -> str:
    """The message of an upstream error body, however it is wrapped."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return raw[:500].decode(errors="replace")
    error = body.get("error", body) if isinstance(body, dict) else body
    if isinstance(error, dict):
        return str(error.get("message", error))
    return str(error)


class ReplicaPool:
    """All replicas."""

    def __init__(
        self, entries: Sequence[str], session: aiohttp.ClientSession, dns_seconds: float = 5.0
    ):
        self._session = session
        self._members = Members(entries, dns_seconds)
        self.replicas = [Replica(url, session) for url in self._members.fixed]
        self.drained: frozenset[str] = frozenset()
        """URLs of replicas that are to get no new requests."""
        self.drain_changes = 0
        """How often this process has changed that itself."""

    async def refresh(self) -> None:
        """See which replicas there are, and ask each what it serves."""
        urls = await self._members.urls()
        there = {replica.url: replica for replica in self.replicas}
        for url, source in urls.items():
            replica = there.get(url.rstrip("/").removesuffix("/v1"))
            if replica is None:
                replica = Replica(url, self._session)
                self.replicas = [*self.replicas, replica]
            replica.source, replica.leaving = source, False
            there.pop(replica.url, None)
        for replica in there.values():
            replica.leaving = True
            if not replica.in_flight:
                self.replicas = [kept for kept in self.replicas if kept is not replica]
                replica.close()
        await asyncio.gather(*(replica.refresh() for replica in self.replicas))

    def drain(self, url: str, out: bool) -> None:
        """Take a replica out of use, or use it again, once the database says so."""
        self.drain_changes += 1
        self.drained = self.drained | {url} if out else self.drained - {url}

    def learn_drained(self, urls: frozenset[str], changes: int) -> None:
        """What the database said when `drain_changes` was `changes`.

        If this process has changed it since, that may be older than the change, and is left alone:
        the next look is not.
        """
        if changes == self.drain_changes:
            self.drained = urls

    def failed(self, url: str | None, error: str) -> None:
        """A request failed by the fault of a replica, after its answer had begun."""
        for replica in self.replicas:
            if replica.url == url:
                replica.ejection.failed(error)

    def answered(self, url: str | None) -> None:
        """A replica has answered a request to its end."""
        for replica in self.replicas:
            if replica.url == url:
                replica.ejection.succeeded()

    def state(self, replica: Replica) -> str:
        """What a replica is used for, in a word."""
        if replica.leaving or replica.url in self.drained:
            return "draining" if replica.in_flight else "drained"
        if not replica.healthy:
            return "unhealthy"
        return "ejected" if replica.ejection.now else "serving"

    def close(self) -> None:
        """Close the connections that nobody uses."""
        for replica in self.replicas:
            replica.close()

    @property
    def healthy(self) -> list[Replica]:
        """Those that answered when they were last asked."""
        return [replica for replica in self.replicas if replica.healthy and not replica.leaving]

    @property
    def longest(self) -> int | None:
        """The longest prompt and answer that every one of them takes, in tokens."""
        return min((r.longest for r in self.healthy if r.longest is not None), default=None)

    def serving(self, model: str) -> list[Replica]:
        """Those that are proven to serve a version."""
        return [r for r in self.healthy if model in r.proven and r.url not in self.drained]

    def choose(
        self, model: str, trajectory_id: str, without: Replica | None = None
    ) -> Replica | None:
        """The replica for a request: the trajectory's own unless it is much busier than others."""
        fitting = _fitting(self.serving(model), without)
        if not fitting:
            return None
        if len(fitting) == 1:
            return fitting[0]
        least = min(fitting, key=lambda r: r.in_flight)
        own = max(fitting, key=lambda r: _weight(r.url, trajectory_id))
        return own if own.in_flight <= least.in_flight + _STICKY_SLACK else least

    def least_busy(
        self, replicas: Iterable[Replica], without: Replica | None = None
    ) -> Replica | None:
        """The replica for a request of no trajectory; of equally busy ones they take turns."""
        fitting = _fitting(replicas, without)
        return min(fitting, key=lambda r: (r.in_flight, r.asked_at), default=None)


def _fitting(replicas: Iterable[Replica], without: Replica | None) -> list[Replica]:
    fitting = [r for r in replicas if r is not without]
    # Where all have failed of late, one that has is better than none.
    return [r for r in fitting if not r.ejection.now] or fitting


def _weight(url: str, trajectory_id: str) -> bytes:
    # Rendezvous hashing (Thaler and Ravishankar, 1998): when a replica leaves, only its own
    # trajectories move.
    return blake2b(f"{url} {trajectory_id}".encode(), digest_size=8).digest()
