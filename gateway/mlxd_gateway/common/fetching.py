"""Images at addresses, where the operator allows it: fetched within bounds from public hosts alone.

Invariants:
- Before anything is dialled its host is one that the operator has named, and every address that
  the host has is public. The name is looked up once, and what is dialled is an address that was
  judged. Each redirect is judged as the first address is.
- No credential, cookie or proxy takes part, and nothing of an answer but an image's bytes reaches
  whoever asked.
- An image has come within IMAGE_FETCH_S and has at most IMAGE_BYTES_MAX bytes; those of a request
  IMAGES_FETCH_S and IMAGES_BYTES_MAX. The images of at most IMAGE_FETCHES_MAX requests are fetched
  at once, and what has come is counted as bodies are.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final
from urllib.parse import urljoin

import h11
import msgspec
from starlette.requests import Request

from mlxd_gateway.common.bodies import Room
from mlxd_gateway.common.failures import BadField, Failure, FailureKind, Refused
from mlxd_gateway.common.images import links_in, write_data_url
from mlxd_gateway.common.responses import while_there
from mlxd_shared import config
from mlxd_shared.domain.chats import IMAGE_FORMATS
from mlxd_shared.security.image_urls import BadUrl, ImageUrl, is_named, is_public, read_url

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Look = Callable[[str, int], Sequence[str]]
"""From a host and a port to all addresses of the host, on a thread; raises OSError for none."""
Dial = Callable[[str, int, ssl.SSLContext | None, str], Awaitable[Streams]]
"""From an address, a port, what to trust (None: no TLS) and the host's name to a connection."""
Take = Callable[[int], None]
_FOUND: Final = 200
_MOVED: Final = frozenset({301, 302, 303, 307, 308})
_BARE: Final = frozenset({b"", b"application/octet-stream", b"binary/octet-stream"})
"""What servers call files of which they know nothing."""
_READ_BYTES: Final = 1 << 16


def look_up(host: str, port: int) -> list[str]:
    """Return all addresses of a host; see `Look`."""
    entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))


async def dial(address: str, port: int, trust: ssl.SSLContext | None, host: str) -> Streams:
    """Connect to an address; see `Dial`."""
    name = None if trust is None else host
    return await asyncio.open_connection(address, port, ssl=trust, server_hostname=name)


class Fetcher:
    """Fetches for all requests of one gateway. One owner: the event loop."""

    def __init__(
        self,
        named: Collection[str],
        *,
        look: Look = look_up,
        dial: Dial = dial,
        trust: ssl.SSLContext | None = None,
        one_s: float = config.IMAGE_FETCH_S,
        all_s: float = config.IMAGES_FETCH_S,
        running_max: int = config.IMAGE_FETCHES_MAX,
    ) -> None:
        """Fetch from the hosts that are `named` (`image_urls.is_named`).

        trust: which certificates; None: those that this machine's programs trust.
        """
        self._named = frozenset(named)
        self._look = look
        self._dial = dial
        self._trust = trust or ssl.create_default_context()
        self._one_s = one_s
        self._all_s = all_s
        self._running_max = running_max
        self._running = 0
        # Threads of their own: a look-up that hangs holds nothing up but look-ups.
        self._lookers = ThreadPoolExecutor(running_max, "image-hosts")

    async def fetch_all(self, links: Sequence[tuple[str, str]], take: Take) -> dict[str, bytes]:
        """Return the images at a request's addresses, each behind its field, one after another.

        take: counts bytes before they are kept.

        Raises:
            BadField: one cannot be fetched, or is beyond a bound; names its field.
            Refused: too many requests have images fetched.
        """
        if self._running >= self._running_max:
            message = f"images of {self._running_max} requests are being fetched"
            raise Refused(Failure(FailureKind.BUSY, message, retry_after_s=config.HTTP_RETRY_S))
        self._running += 1
        try:
            return await self._fetch_each(links, take)
        finally:
            self._running -= 1

    async def _fetch_each(self, links: Sequence[tuple[str, str]], take: Take) -> dict[str, bytes]:
        now = asyncio.get_running_loop().time
        until_s, left = now() + self._all_s, config.IMAGES_BYTES_MAX
        fetched: dict[str, bytes] = {}
        for field, link in links:
            left_s = until_s - now()
            try:
                async with asyncio.timeout(min(self._one_s, left_s)):
                    if link not in fetched:
                        most = min(left, config.IMAGE_BYTES_MAX)
                        fetched[link] = await self._follow(read_url(link), most, take)
            except TimeoutError:
                problem = f"does not come within {self._one_s:g} s"
                if left_s < self._one_s:
                    problem = f"the request's images take longer than {self._all_s:g} s to fetch"
                raise BadField(field, problem) from None
            except BadUrl as error:
                raise BadField(field, str(error)) from None
            left -= len(fetched[link])  # shown twice it is decoded twice
            if left < 0:
                raise BadField(field, _too_many(0))
        return fetched

    async def _follow(self, url: ImageUrl, most: int, take: Take) -> bytes:
        for _ in range(config.IMAGE_REDIRECTS_MAX + 1):
            if not is_named(url.host, self._named):
                raise BadUrl(f"{url.host} is none of the hosts that --image-urls names")
            answer = await self._get(url, most, take)
            if isinstance(answer, bytes):
                return answer
            before, url = url, _read_next(url, answer)
            if before.is_secure and not url.is_secure:
                raise BadUrl("is redirected from https to http")
        raise BadUrl(f"is redirected more than {config.IMAGE_REDIRECTS_MAX} times")

    async def _get(self, url: ImageUrl, most: int, take: Take) -> bytes | str:
        reader, writer = await self._connect(url)
        try:
            return await _exchange(url, reader, writer, most, take)
        except h11.RemoteProtocolError:
            raise BadUrl(f"{url.host} answers no whole HTTP") from None
        except OSError:
            raise BadUrl(f"the connection to {url.host} broke") from None
        finally:
            writer.transport.abort()

    async def _connect(self, url: ImageUrl) -> Streams:
        """Connect to one of a host's addresses, of which all are public."""
        loop = asyncio.get_running_loop()
        try:
            addresses = await loop.run_in_executor(self._lookers, self._look, url.host, url.port)
        except (OSError, UnicodeError):
            raise BadUrl(f"there is no host {url.host}") from None
        if not addresses or not all(map(is_public, addresses)):
            raise BadUrl(f"{url.host} is not at public addresses alone")
        trust = self._trust if url.is_secure else None
        for address in addresses[: config.IMAGE_ADDRESSES_MAX]:
            try:
                return await self._dial(address, url.port, trust, url.host)
            except ssl.SSLError:
                raise BadUrl(f"{url.host} shows no certificate that is trusted here") from None
            except OSError:
                continue
        raise BadUrl(f"{url.host} does not answer")


async def _exchange(
    url: ImageUrl,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    most: int,
    take: Take,
) -> bytes | str:
    """Return an image's bytes, or where it is said to be."""
    connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=config.HTTP_HEAD_BYTES_MAX)
    fields = {
        "Host": url.authority,
        "User-Agent": "mlxd",
        "Accept": ", ".join(IMAGE_FORMATS.values()),
        "Accept-Encoding": "identity",
        "Connection": "close",
    }
    head = h11.Request(method="GET", target=url.target, headers=list(fields.items()))
    writer.write((connection.send(head) or b"") + (connection.send(h11.EndOfMessage()) or b""))
    await writer.drain()
    content = bytearray()
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await reader.read(_READ_BYTES))
        elif isinstance(event, h11.Response):
            elsewhere = _read_head(event, most)
            if elsewhere:
                return elsewhere
        elif isinstance(event, h11.Data):
            take(len(event.data))
            content += event.data
            if len(content) > most:
                raise BadUrl(_too_many(most))
        elif isinstance(event, h11.EndOfMessage) and content:
            return bytes(content)
        elif not isinstance(event, h11.InformationalResponse):
            raise BadUrl("has no bytes")


def _read_head(response: h11.Response, most: int) -> str:
    """Return where an image is instead; empty: it follows.

    Raises:
        BadUrl: none follows, or one that is too large.
    """
    fields = dict(response.headers)
    if response.status_code in _MOVED:
        where = fields.get(b"location", b"").decode("ascii", errors="replace")
        if not where:
            raise BadUrl("is redirected to nowhere")
        return where
    if response.status_code != _FOUND:
        raise BadUrl(f"its server answers {response.status_code}")
    kind = fields.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if not kind.startswith(b"image/") and kind not in _BARE:
        raise BadUrl(f"is {kind.decode(errors='replace')[:80]}, no image")
    if fields.get(b"content-encoding", b"identity").lower() != b"identity":
        raise BadUrl("comes in an encoding that was not asked for")
    if int(fields.get(b"content-length", b"0")) > most:
        raise BadUrl(_too_many(most))
    return ""


def _read_next(url: ImageUrl, where: str) -> ImageUrl:
    """Return the address that a redirect from another one means."""
    try:
        joined = urljoin(str(url), where)
    except ValueError:
        raise BadUrl("is redirected to what is no address") from None
    return read_url(joined)


def _too_many(most: int) -> str:
    """Return which bound an image passes that may have at most so many bytes."""
    if most == config.IMAGE_BYTES_MAX:
        return f"at most {most} bytes of an image"
    return f"at most {config.IMAGES_BYTES_MAX} bytes of images in all messages"


def _write_all(images: Mapping[str, bytes]) -> dict[str, str]:
    return {link: write_data_url(content) for link, content in images.items()}


async def fetch_links(request: Request, body: msgspec.Struct) -> None:
    """Put images into a request in place of their addresses, if the operator allows any.

    Raises:
        BadField: one cannot be fetched; names its field.
        Refused: too many are being fetched, or there is no room.
        ClientDisconnect: the client has gone.
    """
    fetcher: Fetcher | None = request.app.state.fetcher
    linked = [] if fetcher is None else links_in(body)
    if fetcher is None or not linked:
        return
    if len(linked) > config.IMAGES_MAX:
        raise BadField(linked[config.IMAGES_MAX][0], f"at most {config.IMAGES_MAX} images")
    room: Room = request.app.state.room
    links = [(field, struct.link) for field, struct in linked]
    with room.lend() as take:
        fetched = await while_there(request, fetcher.fetch_all(links, take))
        written = await asyncio.to_thread(_write_all, fetched)
    for _, struct in linked:
        struct.link = written[struct.link]
        request.state.body_nbytes += len(struct.link)  # it is as if they had come with it
