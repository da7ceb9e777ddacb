"""Which vLLM servers there are: those of the settings, and every address behind a DNS name."""

import asyncio
import logging
import socket
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

log = logging.getLogger("strop.replicas")

_DNS = "dns+"
_PORTS = {"http": 80, "https": 443}


async def addresses(host: str, port: int) -> list[str]:
    """The addresses behind a name, as `address:port`.

    Raises:
        OSError: the name cannot be resolved.
    """
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    hosts = [str(address[0]) for *_, address in found]
    return [f"[{at}]:{port}" if ":" in at else f"{at}:{port}" for at in hosts]


class Members:
    """The URLs of replicas; `dns+http://name:8000` stands for all addresses behind the name."""

    def __init__(self, entries: Sequence[str], dns_seconds: float):
        self._fixed = [entry for entry in entries if not entry.startswith(_DNS)]
        self._names = [entry for entry in entries if entry.startswith(_DNS)]
        self._seconds = dns_seconds
        self._asked_at = float("-inf")
        self._behind: dict[str, list[str]] = {}

    @property
    def fixed(self) -> list[str]:
        """Those that need no name server."""
        return self._fixed

    async def urls(self) -> dict[str, str]:
        """URL → the entry of the settings that it comes from; names are looked up now and then.

        A name that cannot be resolved keeps the addresses that it had.
        """
        if self._names and time.monotonic() - self._asked_at >= self._seconds:
            self._asked_at = time.monotonic()
            for name in self._names:
                try:
                    self._behind[name] = await self._resolve(name)
                except OSError as error:
                    log.warning("%s cannot be resolved: %s", name, error)
        found = {url: url for url in self._fixed}
        found.update((url, name) for name in self._names for url in self._behind.get(name, ()))
        return found

    async def _resolve(self, name: str) -> list[str]:
        parts = urlsplit(name.removeprefix(_DNS))
        port = parts.port or _PORTS.get(parts.scheme, 80)
        found = await addresses(parts.hostname or "", port)
        return sorted({f"{parts.scheme}://{address}" for address in found})
