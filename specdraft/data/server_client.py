"""HTTP to a server of answers: what a reply means, in two kinds of failure, those that pass and those that stay."""

from __future__ import annotations

import asyncio
import json
import ssl
from contextlib import suppress
from email.utils import parsedate_to_datetime
from functools import cache
from typing import Any

import httpx2

from specdraft.core.errors import ConfigError
from specdraft.data._answers_config import AnswersConfig


class FaultError(Exception):
    """A request failed and may succeed later. of_endpoint: whatever was asked; retry_after: seconds, by the server."""

    def __init__(self, reason: str, of_endpoint: bool = False, retry_after: float | None = None) -> None:
        super().__init__(reason)
        self.of_endpoint = of_endpoint
        self.retry_after = retry_after


class RefusedError(Exception):
    """The server says that the request is wrong; asking again will not help."""


class Client:
    """HTTP to the servers, inside one event loop. ``key`` is sent to them and kept out of every message."""

    def __init__(self, settings: AnswersConfig, key: str | None) -> None:
        self._key = key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        timeout = httpx2.Timeout(settings.timeout_s, pool=None)
        self._http = httpx2.AsyncClient(headers=headers, limits=limits, timeout=timeout, verify=_ssl_context())
        self._timeout = settings.timeout_s

    async def close(self) -> None:
        """Ends its connections."""
        await self._http.aclose()

    async def call(self, method: str, url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The JSON object that the server replies.

        Raises:
            FaultError: no whole reply in time, or one that says to come back.
            RefusedError: the request is wrong.
            ConfigError: the key is.
        """
        try:
            # The limit of httpx is for each part of a reply; a server that sends a byte a minute ends here too.
            reply = await asyncio.wait_for(self._http.request(method, url, json=body), self._timeout)
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            raise FaultError(f"no connection ({error})", of_endpoint=True) from error
        except (httpx2.TimeoutException, asyncio.TimeoutError) as error:
            raise FaultError(f"no whole reply within {self._timeout:g} s") from error
        except httpx2.TransportError as error:
            raise FaultError(f"the connection was cut ({error})") from error
        except httpx2.HTTPError as error:
            raise FaultError(f"no usable reply ({error})") from error
        self._check_status(reply)
        try:
            value = reply.json()
        except (ValueError, RecursionError) as error:
            raise FaultError(f"the reply is no JSON, got {self._shown(reply.text)}") from error
        if not isinstance(value, dict):
            raise FaultError(f"the reply is no JSON object, got {self._shown(reply.text)}")
        return value

    def _check_status(self, reply: httpx2.Response) -> None:
        status, text = reply.status_code, f"HTTP {reply.status_code}: {self._shown(reply.text)}"
        if reply.is_success:
            return
        if status in (401, 403):
            raise ConfigError(
                f"data.answers.api_key_env: the server refused the key, got {text}; name the variable that holds its key"
            )
        if status in (408, 409, 425, 429) or status >= 500:
            raise FaultError(text, status in (429, 503), _retry_after(reply.headers))
        raise RefusedError(text)

    def _shown(self, text: str) -> str:
        """The beginning of a server's words in one line, without the key."""
        text = text.replace(self._key, "***") if self._key else text
        return json.dumps(" ".join(text.split())[:200])


@cache
def _ssl_context() -> ssl.SSLContext:
    """Made once: reading the certificates takes longer than a request."""
    return httpx2.create_ssl_context()


def _retry_after(headers: httpx2.Headers) -> float | None:
    """Seconds of a Retry-After header. A date in it is compared with the server's own, not with the clock here."""
    value = headers.get("Retry-After", "")
    with suppress(ValueError):
        return max(0.0, float(value))
    with suppress(ValueError, TypeError):
        wait = parsedate_to_datetime(value) - parsedate_to_datetime(headers.get("Date", ""))
        return max(0.0, wait.total_seconds())
    return None
