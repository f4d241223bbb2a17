"""The other kind of client that the load generator has: server-sent events over HTTP."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from mlxd_controller.bench.clients import OnFirst, check_lengths
from mlxd_controller.bench.requests import Request
from mlxd_shared.ops.measuring import Outcome

_DATA = b"data: "
_DONE = b"[DONE]"


class HttpClient:
    """mlx-lm's server: HTTP, a connection a request, since it keeps none open.

    extra: further fields of each request.
    """

    def __init__(self, target: str, model: str, **extra: object) -> None:
        self._extra = extra
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._model = model

    async def ready(self) -> None:
        """Do nothing: connections are not kept."""

    async def ask(self, request: Request, on_first: OnFirst) -> Outcome:
        """Read one stream to its end.

        A message does not say how many tokens it brings: one, and those before it whose text was
        still incomplete. The latter, which the usage tells in the end, are counted with the first
        message after the first one; the gaps between tokens are the same wherever they are counted.
        """
        sent_s = time.perf_counter()
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            writer.write(self._request(request))
            await _skip_head(reader)
            stamps_s: list[float] = []
            parts: list[str] = []
            usage: dict[str, int] = {}
            while line := await reader.readline():
                now_s = time.perf_counter()
                if not line.startswith(_DATA) or line.startswith(_DATA + _DONE):
                    continue
                event: dict[str, Any] = json.loads(line[len(_DATA) :])
                usage = event.get("usage", usage)
                text = "".join(choice["text"] for choice in event["choices"])
                if text:
                    parts.append(text)
                    stamps_s.append(now_s)
                    if len(stamps_s) == 1:
                        on_first()
        finally:
            writer.close()
        check_lengths(request, usage["prompt_tokens"], usage["completion_tokens"])
        counts = [1] * len(stamps_s)
        counts[min(1, len(counts) - 1)] += request.max_tokens - len(counts)
        return Outcome(sent_s, tuple(stamps_s), tuple(counts), "".join(parts))

    def _request(self, request: Request) -> bytes:
        fields: dict[str, object] = {
            "model": self._model,
            "prompt": request.text,
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._extra,
        }
        if request.seed is not None:
            fields["seed"] = request.seed
        body = json.dumps(fields).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    async def close(self) -> None:
        """Do nothing: connections are not kept."""


async def _skip_head(reader: asyncio.StreamReader) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    if b" 200 " not in head.split(b"\r\n", 1)[0]:
        message = f"{head!r} {await reader.read()!r}"
        raise RuntimeError(message)
