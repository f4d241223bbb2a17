"""Images at addresses: what is dialled, what is refused, and that they come as if they were sent.

Names lead to addresses that a test makes up, and every connection to a server in this process.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mlxd.v1 import inference_pb2
from mlxd_gateway.common.failures import BadField, Refused
from mlxd_gateway.common.fetching import Fetcher, Streams
from mlxd_shared import config
from tests.fakes.mlxd_server import Answers, serving
from tests.support.certificates import Authority
from tests.support.gateways import gateway_over
from tests.support.spoken import answer_with_text

PNG = b"\x89PNG and so on"
HERE = "93.184.216.34"
LONG_S = 60.0
NAMES = {
    "a.example": (HERE,),
    "b.example": ("2606:2800:220:1:248:1893:25c8:1946", HERE),
    "down.example": ("93.184.216.35", "93.184.216.36"),
    "inside.example": ("10.0.0.1",),
    "both.example": (HERE, "127.0.0.1"),
    "mapped.example": ("::ffff:127.0.0.1",),
    "0x7f.1": ("127.0.0.1",),
}


def answer(content: bytes = PNG, *, kind: str = "image/png", status: str = "200 OK") -> bytes:
    """Return a whole answer."""
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


def redirect_to(where: str) -> bytes:
    """Return a redirect."""
    return f"HTTP/1.1 302 Found\r\nLocation: {where}\r\nContent-Length: 0\r\n\r\n".encode()


PAGES: Mapping[str, bytes] = {
    "/a.png": answer(),
    "/bare": answer(kind="application/octet-stream"),
    "/till-the-end": b"HTTP/1.0 200 OK\r\n\r\n" + PNG,
    "/hop": redirect_to("/a.png"),
    "/1": redirect_to("/2"),
    "/2": redirect_to("//b.example/3"),
    "/3": redirect_to("https://b.example/a.png"),
    "/4": redirect_to("/1"),
    "/inside": redirect_to("http://inside.example/a.png"),
    "/other": redirect_to("http://other.example/a.png"),
    "/down": redirect_to("http://a.example/a.png"),
    "/port": redirect_to("http://a.example:8080/a.png"),
    "/nowhere": redirect_to(""),
    "/nothing": redirect_to("http://[/"),
    "/page": answer(b"<p>", kind="text/html; charset=utf-8"),
    "/empty": answer(b""),
    "/gone": answer(status="404 Not Found"),
    "/noise": b"SSH-2.0-OpenSSH\r\n\r\n",
    "/cut": answer()[:-1],
    "/said": f"HTTP/1.1 200 OK\r\nContent-Length: {config.IMAGE_BYTES_MAX + 1}\r\n\r\n".encode(),
    "/large": b"HTTP/1.0 200 OK\r\n\r\n" + bytes(config.IMAGE_BYTES_MAX + 1),
    "/most": answer(bytes(config.IMAGE_BYTES_MAX)),
    "/packed": b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 1\r\n\r\nx",
    "/head": b"HTTP/1.1 200 OK\r\nX: " + b"x" * (config.HTTP_HEAD_BYTES_MAX + 1),
}


@dataclass(slots=True)
class Site:
    """A server of `PAGES`, and whoever leads to it."""

    port: int = 0
    heads: list[bytes] = field(default_factory=list)
    """What was asked."""
    looked: list[str] = field(default_factory=list)
    dialled: list[tuple[str, int, bool]] = field(default_factory=list)
    """Addresses, ports, and whether it was over TLS."""
    silent: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    """The paths of those that are never answered."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request; one for a path that is not in `PAGES` never."""
        head = await reader.readuntil(b"\r\n\r\n")
        self.heads.append(head)
        path = head.split(b" ")[1].decode()
        page = PAGES.get(path)
        if page is not None:
            writer.write(page)
        else:
            self.silent.put_nowait(path)
            with suppress(ConnectionError):
                await reader.read()  # until whoever asked has left
        writer.close()

    def look(self, host: str, _port: int) -> Sequence[str]:
        """Return the addresses of a name."""
        self.looked.append(host)
        if host not in NAMES:
            raise OSError("no such name")
        return NAMES[host]

    async def dial(
        self, address: str, port: int, trust: ssl.SSLContext | None, host: str
    ) -> Streams:
        """Connect to the server, if the address is its own."""
        self.dialled.append((address, port, trust is not None))
        if address != HERE:
            raise OSError("no route")
        name = None if trust is None else host
        return await asyncio.open_connection(
            "127.0.0.1", self.port, ssl=trust, server_hostname=name
        )

    def fetcher(self, *named: str, **options: Any) -> Fetcher:
        """Return what fetches from here."""
        return Fetcher(named, look=self.look, dial=self.dial, **options)


@asynccontextmanager
async def site(tls: ssl.SSLContext | None = None) -> AsyncIterator[Site]:
    """Serve `PAGES` around the body."""
    made = Site()
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0, ssl=tls)
    made.port = server.sockets[0].getsockname()[1]
    async with server:
        yield made


async def fetch(fetcher: Fetcher, *urls: str) -> dict[str, bytes]:
    """Return images, counted by nobody."""
    links = [(f"url[{index}]", url) for index, url in enumerate(urls)]
    return await fetcher.fetch_all(links, lambda _: None)


async def refusal(fetcher: Fetcher, *urls: str) -> str:
    """Return why the last of these is not fetched."""
    with pytest.raises(BadField) as caught:
        await fetch(fetcher, *urls)
    assert caught.value.failure.field == f"url[{len(urls) - 1}]"
    return caught.value.failure.message


@pytest.mark.asyncio
async def test_an_image_comes_from_the_address_that_was_judged() -> None:
    """The name is looked up once for each address asked for; no credential goes with it."""
    async with site() as there:
        fetcher = there.fetcher("public")
        for path in ("/a.png", "/bare", "/till-the-end", "/hop"):
            assert await fetch(fetcher, f"http://a.example{path}") == {
                f"http://a.example{path}": PNG
            }
        assert there.looked == ["a.example"] * 5
        assert there.dialled == [(HERE, 80, False)] * 5
        fields = there.heads[0].decode().lower().split("\r\n")
        assert fields[:2] == ["get /a.png http/1.1", "host: a.example"]
        names = {line.partition(":")[0] for line in fields[1:] if line}
        assert names == {"host", "user-agent", "accept", "accept-encoding", "connection"}
        # Of several addresses the next one is dialled where one does not answer.
        await fetch(fetcher, "http://b.example/a.png")
        assert [address for address, *_ in there.dialled[5:]] == [*NAMES["b.example"]]
        # What is shown twice is fetched once.
        twice = "http://a.example/a.png"
        assert await fetch(fetcher, twice, twice) == {twice: PNG}
        assert len(there.heads) == 7


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("host", "words"), [
        ("other.example", "other.example is none of the hosts"),
        ("a.example.other", "is none of the hosts"),
        ("inside.example", "is not at public addresses alone"),
        ("both.example", "is not at public addresses alone"),
        ("mapped.example", "is not at public addresses alone"),
        ("0x7f.1", "is not at public addresses alone"),
        ("unknown.example", "there is no host"),
    ],
)  # fmt: skip
async def test_what_may_not_be_reached_is_not_dialled(host: str, words: str) -> None:
    """A host that nobody has named; one with an address that is not public, whatever its name."""
    named = [name for name in (*NAMES, "unknown.example") if name != "other.example"]
    async with site() as there:
        assert words in await refusal(there.fetcher(*named), f"http://{host}/a.png")
        assert there.dialled == []
        if "none of the hosts" in words:
            assert there.looked == []


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("path", "words"), [
        ("/inside", "inside.example is not at public addresses alone"),
        ("/other", "other.example is none of the hosts"),
        ("/port", "no port but 80"),
        ("/nowhere", "redirected to nowhere"),
        ("/nothing", "redirected to what is no address"),
        ("/4", f"redirected more than {config.IMAGE_REDIRECTS_MAX} times"),
        ("/page", "is text/html, no image"),
        ("/empty", "has no bytes"),
        ("/gone", "its server answers 404"),
        ("/noise", "answers no whole HTTP"),
        ("/cut", "answers no whole HTTP"),
        ("/head", "answers no whole HTTP"),
        ("/said", f"at most {config.IMAGE_BYTES_MAX} bytes of an image"),
        ("/large", f"at most {config.IMAGE_BYTES_MAX} bytes of an image"),
        ("/packed", "in an encoding that was not asked for"),
    ],
)  # fmt: skip
async def test_each_bound_and_each_answer_has_its_own_error(path: str, words: str) -> None:
    """By the field; each redirect is judged as the first address is."""
    async with site() as there:
        named = (*NAMES, "unknown.example")
        assert words in await refusal(there.fetcher(*named), f"http://a.example{path}")
        assert all(address == HERE for address, *_ in there.dialled if path != "/4")


@pytest.mark.asyncio
async def test_a_host_that_is_down_is_said() -> None:
    """All its addresses are tried."""
    async with site() as there:
        assert "does not answer" in await refusal(there.fetcher("public"), "http://down.example/")
        assert len(there.dialled) == 2


@pytest.mark.asyncio
async def test_time_and_number_are_bounded() -> None:
    """Of an image, of all of a request's, and of requests; what has come is counted first."""
    async with site() as there:
        silent, good = "http://a.example/silent", "http://a.example/a.png"
        one = there.fetcher("public", one_s=0.1)
        assert "does not come within 0.1 s" in await refusal(one, silent)
        every = there.fetcher("public", all_s=0.1)
        assert "images take longer than 0.1 s to fetch" in await refusal(every, silent)

        full = there.fetcher("public", one_s=LONG_S, all_s=LONG_S, running_max=1)
        first = asyncio.create_task(fetch(full, "http://a.example/first"))
        # The others may have been given up before they had asked for anything.
        while await there.silent.get() != "/first":
            pass
        with pytest.raises(Refused, match="1 requests") as caught:
            await fetch(full, good)
        assert caught.value.failure.retry_after_s == config.HTTP_RETRY_S
        first.cancel()
        await asyncio.wait({first})
        assert await fetch(full, good) == {good: PNG}

        most = "http://a.example/most"
        problem = f"at most {config.IMAGES_BYTES_MAX} bytes of images in all messages"
        for more in (most, "http://a.example/most?"):
            assert problem in await refusal(full, most, more)

        taken: list[int] = []
        await full.fetch_all([("url", good)], taken.append)
        assert sum(taken) == len(PNG)


@pytest.mark.asyncio
async def test_certificates_are_checked_by_name(tmp_path: Path) -> None:
    """One of the host's own passes; another one, or one of nobody, does not, nor a step down."""
    authority = Authority(tmp_path)
    pair = authority.issue(host="a.example")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(pair.cert, pair.key)
    async with site(tls) as there:
        trust = ssl.create_default_context(cafile=authority.path)
        fetcher = there.fetcher("public", trust=trust)
        good = "https://a.example/a.png"
        assert await fetch(fetcher, good) == {good: PNG}
        assert there.dialled == [(HERE, 443, True)]
        assert "no certificate" in await refusal(fetcher, "https://b.example/a.png")
        assert "no certificate" in await refusal(there.fetcher("public"), good)
        assert "from https to http" in await refusal(fetcher, "https://a.example/down")


def bodies(url: str) -> dict[str, dict[str, Any]]:
    """Return a request of each API that shows the image at an address, twice."""
    shown: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}}] * 2
    put: list[dict[str, Any]] = [{"type": "input_image", "image_url": url}] * 2
    source: list[dict[str, Any]] = [{"type": "image", "source": {"type": "url", "url": url}}] * 2
    return {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": shown}]},
        "/v1/responses": {"input": [{"role": "user", "content": put}]},
        "/v1/messages": {"max_tokens": 5, "messages": [{"role": "user", "content": source}]},
    }


FIELDS = {
    "/v1/chat/completions": "messages[0].content[0].image_url.url",
    "/v1/responses": "input[0].content[0].image_url",
    "/v1/messages": "messages[0].content[0].source.url",
}


@pytest.mark.asyncio
async def test_images_at_addresses_come_as_if_they_were_sent() -> None:
    """In each API; a response keeps the image itself. What is not allowed is named by its field."""
    async with site() as there, serving(Answers(generate=answer_with_text())) as fake:
        fetcher = there.fetcher("a.example")
        async with gateway_over(fake.address, fetcher=fetcher) as web:
            for path, body in bodies("http://a.example/a.png").items():
                done = await web.post(path, {"model": "demo", **body})
                assert done.status_code == 200, done.text
            listed = await web.http.get(f"/v1/responses/{await respond(web)}/input_items")
            kept = listed.json()["data"][0]["content"]
            assert kept[0]["image_url"].startswith("data:")
            for path, body in bodies("http://b.example/a.png").items():
                status, error = await web.error(path, {"model": "demo", **body})
                assert status == 400
                assert FIELDS[path] in error["error"]["message"]
                assert "none of the hosts" in error["error"]["message"]
        async with gateway_over(fake.address) as web:
            for path, body in bodies("http://a.example/a.png").items():
                status, error = await web.error(path, {"model": "demo", **body})
                assert status == 400
                assert "no address is fetched" in error["error"]["message"]
        generated = [r for r in fake.requests if isinstance(r, inference_pb2.GenerateRequest)]
        assert len(generated) == 4
        for request in generated:
            parts = request.chat.messages[0].parts
            assert [(part.image, part.media_type) for part in parts] == [(PNG, "")] * 2


async def respond(web: Any) -> str:
    """Return the id of a response about an image at an address."""
    body = bodies("http://a.example/a.png")["/v1/responses"]
    answer = (await web.post("/v1/responses", {"model": "demo", **body})).json()
    return str(answer["id"])


@pytest.mark.asyncio
async def test_no_more_addresses_than_images() -> None:
    """One more than a request may show is refused before any is fetched."""
    urls = [f"http://a.example/{number}.png" for number in range(config.IMAGES_MAX + 1)]
    content = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    body = {"model": "demo", "messages": [{"role": "user", "content": content}]}
    async with site() as there, serving(Answers()) as fake:
        async with gateway_over(fake.address, fetcher=there.fetcher("public")) as web:
            status, error = await web.error("/v1/chat/completions", body)
        assert status == 400
        assert f"at most {config.IMAGES_MAX} images" in error["error"]["message"]
        assert there.dialled == []
