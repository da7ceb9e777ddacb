"""Posts events to the addresses of the settings: in order, at least once, signed.

How far each address has come is in the database, so that a restart loses nothing. Of several
gateways one holds the lease and delivers; when it dies, another goes on after `_LEASE_SECONDS`.
"""

import asyncio
import base64
import binascii
import hmac
import logging
import os
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256

import aiohttp
import orjson
from sqlalchemy import Connection, or_, select, update

from gateway.events import EventHub, event_json
from gateway.store import Database
from gateway.store.base import insert_into
from gateway.store.events import StoredEvent
from gateway.store.ids import new_id
from gateway.store.journal import connection_lost
from gateway.store.models import Webhook as WebhookRow
from gateway.webhook_settings import Webhook

log = logging.getLogger("strop.webhooks")

_LEASE_SECONDS = 60.0
_IDLE_SECONDS = 5.0
"""Between two looks at whether another gateway still delivers."""
_LONGEST_PAUSE = 300.0


class Refused(Exception):
    """The address did not take an event."""


@dataclass(slots=True)
class _Place:
    """Where a webhook stands."""

    cursor: int
    attempts: int
    retry_at: float | None
    error: str | None


def secret_of(name: str, webhook: Webhook) -> bytes:
    """The secret of a webhook.

    Raises:
        ValueError: its variable is not set.
    """
    secret = os.environ.get(webhook.secret_env, "")
    if not secret:
        raise ValueError(
            f"webhooks.{name}.secret_env names {webhook.secret_env}, which is not set. Set it to "
            "the secret that the receiver checks signatures with"
        )
    if secret.startswith("whsec_"):
        try:
            return base64.b64decode(secret.removeprefix("whsec_"), validate=True)
        except binascii.Error:
            raise ValueError(
                f"{webhook.secret_env} begins with whsec_, and what follows is not base64"
            ) from None
    return secret.encode()


def signature(secret: bytes, message_id: str, timestamp: int, body: bytes) -> str:
    """The value of `webhook-signature`, as standardwebhooks.com describes it."""
    signed = f"{message_id}.{timestamp}.".encode() + body
    return "v1," + base64.b64encode(hmac.digest(secret, signed, sha256)).decode()


class Delivery:
    """Delivers the events of one webhook."""

    def __init__(
        self,
        name: str,
        webhook: Webhook,
        database: Database,
        hub: EventHub,
        session: aiohttp.ClientSession,
    ):
        self.name = name
        self.project = webhook.project
        self._webhook = webhook
        self._secret = secret_of(name, webhook)
        self._database = database
        self._hub = hub
        self._session = session
        self._owner = new_id("gw-")
        self.attempts = 0
        """Refusals of the event that is tried at the moment."""
        self.cursor = 0

    async def run(self) -> None:
        """Deliver until cancelled, or until the hub closes."""
        with self._hub.listening():
            while not self._hub.closing:
                try:
                    await self._turn()
                except Exception as error:
                    if not connection_lost(error):
                        log.exception("the webhook %s failed; trying again", self.name)
                    await asyncio.sleep(1)

    async def _turn(self) -> None:
        """Deliver what there is, or wait for more."""
        await self._hub.now()
        place = await asyncio.to_thread(self._take)
        if place is None:
            await asyncio.sleep(_IDLE_SECONDS)
            return
        self.cursor, self.attempts = place.cursor, place.attempts
        if place.retry_at is not None and (pause := place.retry_at - time.time()) > 0:
            await asyncio.sleep(min(pause, _LEASE_SECONDS / 2))
            return
        if not await self._hub.beyond(place.cursor, _LEASE_SECONDS / 2):
            return
        upto = self._hub.settled
        found = await self._hub.read(
            self._webhook.project, place.cursor, upto, self._webhook.policy
        )
        for event in found[:10]:
            await self._deliver(event)
            if self.attempts:
                return
        if len(found) <= 10:
            await self._keep(upto, 0, None, None)

    async def _deliver(self, event: StoredEvent) -> None:
        if "*" in self._webhook.events or event.kind in self._webhook.events:
            try:
                await self._post(event)
            except Refused as refusal:
                await self._put_off(event, str(refusal))
                return
        await self._keep(event.id, 0, None, None)

    async def _put_off(self, event: StoredEvent, error: str) -> None:
        attempts = self.attempts + 1
        pause = min(_LONGEST_PAUSE, self._webhook.retry_seconds * 2.0 ** min(attempts - 1, 20))
        # Spread, so that addresses that fell together are not asked together.
        retry_at = time.time() + pause * random.uniform(0.75, 1.25)
        log.warning(
            "the webhook %s did not take event %d (attempt %d): %s; trying again in %.0f s",
            *(self.name, event.id, attempts, error, pause),
        )
        await self._keep(event.id - 1, attempts, retry_at, error)

    async def _post(self, event: StoredEvent) -> None:
        body = orjson.dumps({**event_json(event), "project": event.project})
        message_id, timestamp = f"evt_{event.id}", int(time.time())
        headers = {
            "content-type": "application/json",
            "webhook-id": message_id,
            "webhook-timestamp": str(timestamp),
            "webhook-signature": signature(self._secret, message_id, timestamp, body),
        }
        timeout = aiohttp.ClientTimeout(total=self._webhook.timeout)
        try:
            async with self._session.post(
                self._webhook.url,
                data=body,
                headers=headers,
                timeout=timeout,
                allow_redirects=False,
            ) as response:
                if not 200 <= response.status < 300:
                    raise Refused(f"it answered {response.status}")
        except TimeoutError:
            raise Refused(f"no answer in {self._webhook.timeout:g} s") from None
        except aiohttp.ClientError as error:
            raise Refused(f"{type(error).__name__}: {error}") from None

    def _take(self) -> _Place | None:
        """The place, if nobody else holds the lease; it is ours then."""
        with self._database.read() as connection:
            found = connection.execute(
                select(WebhookRow.lease_owner, WebhookRow.lease_expires).where(
                    WebhookRow.id == self.name
                )
            ).one_or_none()
        if found is not None and found[0] not in (None, self._owner):
            expires = found[1]
            if expires is not None and expires > time.time():
                return None
        with self._database.write() as connection:
            if found is None:
                self._begin(connection)
            return self._lease(connection)

    def _begin(self, connection: Connection) -> None:
        # A new webhook hears of what happens from now on.
        connection.execute(
            insert_into(connection, WebhookRow)
            .values(id=self.name, cursor=self._hub.settled, attempts=0)
            .on_conflict_do_nothing()
        )

    def _lease(self, connection: Connection) -> _Place | None:
        now = time.time()
        row = connection.execute(
            update(WebhookRow)
            .where(
                WebhookRow.id == self.name,
                or_(
                    WebhookRow.lease_owner.is_(None),
                    WebhookRow.lease_owner == self._owner,
                    WebhookRow.lease_expires < now,
                ),
            )
            .values(lease_owner=self._owner, lease_expires=now + _LEASE_SECONDS)
            .returning(
                WebhookRow.cursor, WebhookRow.attempts, WebhookRow.retry_at, WebhookRow.error
            )
        ).one_or_none()
        return _Place(*row) if row is not None else None

    async def _keep(
        self, cursor: int, attempts: int, retry_at: float | None, error: str | None
    ) -> None:
        def write() -> None:
            with self._database.write() as connection:
                connection.execute(
                    update(WebhookRow)
                    .where(WebhookRow.id == self.name, WebhookRow.lease_owner == self._owner)
                    .values(
                        cursor=cursor,
                        attempts=attempts,
                        retry_at=retry_at,
                        error=error,
                        lease_expires=time.time() + _LEASE_SECONDS,
                    )
                )

        await asyncio.to_thread(write)
        self.cursor, self.attempts = cursor, attempts

    async def close(self) -> None:
        """Let another gateway go on at once."""

        def write() -> None:
            with self._database.write() as connection:
                connection.execute(
                    update(WebhookRow)
                    .where(WebhookRow.id == self.name, WebhookRow.lease_owner == self._owner)
                    .values(lease_owner=None, lease_expires=None)
                )

        try:
            await asyncio.to_thread(write)
        except Exception as error:
            log.warning("the lease of the webhook %s was not given back: %s", self.name, error)


def deliveries(
    webhooks: Mapping[str, Webhook],
    database: Database,
    hub: EventHub,
    session: aiohttp.ClientSession,
) -> list[Delivery]:
    """One for each webhook of the settings.

    Raises:
        ValueError: a secret is not set.
    """
    return [Delivery(name, found, database, hub, session) for name, found in webhooks.items()]
