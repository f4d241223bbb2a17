"""Keys end to end: made by the command, judged by the controller, over gRPC and over HTTP."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mlxd import (
    ChannelSecurity,
    Client,
    Delta,
    Finished,
    KeyLimit,
    NotAllowed,
    RemoteError,
    ScoredText,
)
from tests.support.chat_template import write_template
from tests.support.cli import mlxd
from tests.support.gateways import Web, serve_web

DEMO = Path(__file__).parents[2] / "shared" / "mlxd_shared" / "demo_model"
TOKENS = 8
PATHS = (
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/generate",
    "/v1/rerank", "/v2/rerank",
)  # fmt: skip


@pytest.fixture(name="models", scope="module")
def write_models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Options for the built-in model, and for one that has a chat's template besides."""
    folder = tmp_path_factory.mktemp("models") / "other"
    shutil.copytree(DEMO, folder)
    return ("--model", f"demo={DEMO}", "--model", f"other={write_template(folder)}")


@dataclass(frozen=True, slots=True)
class Issued:
    """A file of keys, and a file with the secret of each."""

    folder: Path

    @property
    def keys_file(self) -> Path:
        """What the server is given."""
        return self.folder / "keys.json"

    async def add(self, name: str, *options: str) -> str:
        """Make a key by the command; return its secret."""
        done = await mlxd("keys", "add", name, "--keys-file", str(self.keys_file), *options)
        assert done.code == 0, done.err
        secret = done.out.strip()
        (self.folder / name).write_text(secret + "\n", encoding="utf-8")
        return secret

    def client(self, web: Web, name: str) -> Client:
        """Return a client with the key of this name."""
        assert web.served is not None
        return Client(web.served.address, security=ChannelSecurity(token_file=self.folder / name))


def body_for(path: str, model: str = "demo") -> dict[str, Any]:
    """Return a request of some tokens."""
    if path in ("/v1/messages", "/v1/chat/completions"):
        chat = [{"role": "user", "content": "Once"}]
        return {"model": model, "messages": chat, "max_tokens": TOKENS}
    if path == "/v1/responses":
        return {"model": model, "input": "Once", "max_output_tokens": TOKENS}
    if path.endswith("/rerank"):
        return {"model": model, "query": "Once", "documents": ["upon"]}
    if path == "/api/generate":
        return {"model": model, "prompt": "Once", "stream": False, "options": {"num_predict": 8}}
    return {"model": model, "prompt": "Once", "max_tokens": TOKENS}


async def points(client: Client, family: str) -> dict[tuple[str, ...], float]:
    """Return the points of a family of metrics, by the values of their labels."""
    status = await client.status()
    (named,) = (each for each in status.metrics if each.name == family)
    return {tuple(sorted(point.labels.values())): point.value for point in named.points}


@pytest.mark.asyncio
async def test_over_grpc(tmp_path: Path, models: tuple[str, ...]) -> None:
    """Scope, model and rate, each refused by name; what was used adds up to the streams' own."""
    issued = Issued(tmp_path)
    await issued.add("writer", "--model", "demo", "--requests-per-minute", "2")
    await issued.add("watcher", "--scope", "observe", "--scope", "manage")
    await issued.add("keeper", "--scope", "manage", "--model", "other")
    async with (
        serve_web(*models, "--keys-file", str(issued.keys_file)) as web,
        issued.client(web, "writer") as writer,
        issued.client(web, "watcher") as watcher,
        issued.client(web, "keeper") as keeper,
    ):
        for name in ("demo", str(DEMO)):
            with pytest.raises(NotAllowed, match=f"the model '{name}'"):
                _ = [update async for update in keeper.load(name)]
        with pytest.raises(NotAllowed, match="the model 'demo'"):
            await keeper.unload("demo")
        with pytest.raises(NotAllowed, match="the model 'demo'"):
            await keeper.forget("demo")
        with pytest.raises(NotAllowed, match="the scope observe"):
            await writer.status()
        with pytest.raises(NotAllowed, match="the scope manage"):
            _ = [step async for step in writer.pull("o/m")]
        with pytest.raises(NotAllowed, match="the scope infer"):
            await writer_text(watcher)
        with pytest.raises(NotAllowed, match="the model 'other'"):
            await writer_text(writer, model="other")
        ends = [await writer_text(writer), await writer_text(writer)]
        with pytest.raises(KeyLimit, match="at most 2 requests a minute") as caught:
            await writer_text(writer)
        assert 0 < caught.value.retry_after_s <= 30

        prompt = sum(end.usage.prompt_tokens for end in ends)
        generated = sum(end.usage.completion_tokens for end in ends)
        assert await points(watcher, "mlxd_key_prompt_tokens_total") == {("writer",): prompt}
        assert await points(watcher, "mlxd_key_generation_tokens_total") == {("writer",): generated}
        assert await points(watcher, "mlxd_key_requests_total") == {
            ("served", "writer"): 2,
            ("refused", "writer"): 2,
        }
        assert await points(watcher, "mlxd_key_streams") == {("writer",): 0}


async def writer_text(client: Client, model: str = "demo") -> Finished:
    """Have a model write; return how that ended."""
    async with client.generate("Once", model=model, max_tokens=TOKENS) as stream:
        last = [event async for event in stream][-1]
    assert isinstance(last, Finished)
    return last


@pytest.mark.asyncio
async def test_whatever_a_model_evaluates_is_counted(
    tmp_path: Path, models: tuple[str, ...]
) -> None:
    """The tokens of all choices, of texts that become vectors and of those that are scored."""
    issued = Issued(tmp_path)
    await issued.add("writer", "--scope", "infer", "--scope", "observe")
    async with (
        serve_web(*models, "--keys-file", str(issued.keys_file)) as web,
        issued.client(web, "writer") as writer,
    ):

        async def total_of(what: str) -> float:
            return (await points(writer, f"mlxd_key_{what}_tokens_total"))["writer",]

        choices = await writer.choices("Once", n=2, model="demo", max_tokens=TOKENS)
        read = len(await writer.tokenize("Once", model="demo"))
        assert await total_of("prompt") == read
        assert await total_of("generation") == sum(len(each.token_ids) for each in choices)

        read += (await writer.embeddings(["Once upon"], model="demo")).prompt_tokens
        assert await total_of("prompt") == read

        await writer.score([ScoredText("Once", (" upon", " a time"))], model="demo")
        for whole in ("Once upon", "Once a time"):
            read += len(await writer.tokenize(whole, model="demo"))
        assert await total_of("prompt") == read


@pytest.mark.asyncio
async def test_what_breaks_off_is_charged(tmp_path: Path, models: tuple[str, ...]) -> None:
    """The prompt and the tokens that had come, though its client has left."""
    issued = Issued(tmp_path)
    await issued.add("writer", "--scope", "infer", "--scope", "observe")
    async with (
        serve_web(*models, "--keys-file", str(issued.keys_file)) as web,
        issued.client(web, "writer") as writer,
    ):
        async with writer.generate("Once", model="demo", max_tokens=400) as stream:
            first = await anext(aiter(stream))
        assert isinstance(first, Delta)
        assert first.prompt_tokens == len(await writer.tokenize("Once", model="demo"))
        async with writer.watch_status(interval_s=0.1) as statuses:
            async for _ in statuses:
                if await points(writer, "mlxd_key_streams") == {("writer",): 0.0}:
                    break

        read = await points(writer, "mlxd_key_prompt_tokens_total")
        made = await points(writer, "mlxd_key_generation_tokens_total")
        assert read == {("writer",): first.prompt_tokens}
        assert made["writer",] >= len(first.token_ids)


@pytest.mark.asyncio
async def test_a_response_is_charged_as_a_chat(tmp_path: Path, models: tuple[str, ...]) -> None:
    """With all that it goes on from, and though its client leaves in the middle."""
    issued = Issued(tmp_path)
    secret = await issued.add("writer", "--scope", "infer", "--scope", "observe")
    headers = {"Authorization": f"Bearer {secret}"}
    async with (
        serve_web(*models, "--keys-file", str(issued.keys_file)) as web,
        issued.client(web, "writer") as writer,
    ):

        async def total_of(what: str) -> float:
            return (await points(writer, f"mlxd_key_{what}_tokens_total"))["writer",]

        async def ask(**fields: Any) -> Any:
            body = {**body_for("/v1/responses", "other"), "temperature": 0, **fields}
            answer = await web.post("/v1/responses", body, headers=headers)
            assert answer.status_code == 200, answer.text
            return answer.json()

        first = await ask()
        second = await ask(previous_response_id=first["id"])
        read = sum(each["usage"]["input_tokens"] for each in (first, second))
        assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]
        assert await total_of("prompt") == read
        made = sum(each["usage"]["output_tokens"] for each in (first, second))
        assert await total_of("generation") == made

        endless = {**body_for("/v1/responses", "other"), "max_output_tokens": 400, "stream": True}
        async with web.http.stream("POST", "/v1/responses", json=endless, headers=headers) as left:
            async for line in left.aiter_lines():
                if ".delta" in line:
                    break
        async with writer.watch_status(interval_s=0.1) as statuses:
            async for _ in statuses:
                if await points(writer, "mlxd_key_streams") == {("writer",): 0.0}:
                    break
        assert await total_of("prompt") == read + first["usage"]["input_tokens"]
        assert made < await total_of("generation") < made + 400


@pytest.mark.asyncio
async def test_over_http(tmp_path: Path, models: tuple[str, ...]) -> None:
    """Each API has its own way to send a key and to be refused; health needs none."""
    issued = Issued(tmp_path)
    secret = await issued.add("writer", "--model", "other", "--tokens-per-minute", "1")
    confined = {"x-api-key": await issued.add("confined", "--model", "demo")}
    async with serve_web(*models, "--keys-file", str(issued.keys_file)) as web:
        assert (await web.http.get("/health")).status_code == 200
        bearer, own = {"Authorization": f"Bearer {secret}"}, {"x-api-key": secret}
        for path in PATHS:
            for headers in ({}, {"Authorization": "Bearer other"}, {"x-api-key": "a b"}):
                assert (await web.post(path, body_for(path), headers=headers)).status_code == 401
            refused = await web.post(path, body_for(path, "other"), headers=confined)
            assert refused.status_code == 403
            assert "the model 'other'" in json.dumps(refused.json())
        assert (await web.http.get("/v1/models", headers=own)).status_code == 200

        good = await web.post(PATHS[0], body_for(PATHS[0], "other"), headers=own)
        assert good.status_code == 200
        for path in PATHS:
            late = await web.post(path, body_for(path, "other"), headers=bearer)
            assert late.status_code == 429
            assert int(late.headers["retry-after"]) > 60


@pytest.mark.asyncio
async def test_a_key_is_removed_while_the_server_runs(
    tmp_path: Path, models: tuple[str, ...]
) -> None:
    """The command and the file are enough: nobody restarts anything."""
    issued = Issued(tmp_path)
    await issued.add("writer")
    async with (
        serve_web(*models, "--keys-file", str(issued.keys_file)) as web,
        issued.client(web, "writer") as writer,
    ):
        assert await writer.model("demo")
        file = ("--keys-file", str(issued.keys_file))
        listed = await mlxd("keys", "list", *file)
        assert listed.out.splitlines()[1].split()[:2] == ["writer", "infer"]
        assert (await mlxd("keys", "remove", "writer", *file)).code == 0
        assert (await mlxd("keys", "remove", "writer", *file)).code == 2
        with pytest.raises(RemoteError, match="UNAUTHENTICATED"):
            await ask_on(writer)


async def ask_on(client: Client) -> None:
    """Call until the server has looked at the file again, which it does once a second."""
    for _ in range(10_000):
        await client.model("demo")
