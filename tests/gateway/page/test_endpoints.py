"""What feeds the page, over a scripted controller: each answer, each bound, each refusal."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx2
import pytest

from mlxd import Client
from mlxd.v1 import model_pb2, status_pb2, types_pb2
from mlxd_gateway.app import make_app
from mlxd_gateway.common.clients import Clients
from mlxd_gateway.common.failures import Refused
from mlxd_gateway.door import Door
from mlxd_gateway.page.events import StreamCount
from mlxd_gateway.process import listen_on, make_server
from mlxd_shared import config
from mlxd_shared.domain.errors import (
    InvalidRequest,
    ModelNotFound,
    ModelTooLarge,
    NotAllowed,
    QueueFull,
)
from mlxd_shared.security.listeners import OPEN
from mlxd_shared.security.net import parse_address
from tests.fakes.mlxd_server import Answers, serving
from tests.fakes.replies import MIB, NOON, fit, model, status
from tests.support.gateways import gateway_over

DENIED = NotAllowed("reader", "calls that need the scope manage")
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("load", {}, "model: is needed"),
    ("load", {"model": ""}, "model: "),
    ("load", {"model": "a" * 4097}, "model: "),
    ("load", {"model": "demo", "rows_max": 0}, "rows_max: "),
    ("load", {"model": "demo", "weights": "q5"}, "weights: "),
    ("load", {"model": "demo", "pinned": 1}, "pinned: "),
    ("fit", {"model": "demo", "context_length": 1.5}, "context_length: "),
    ("fit", {"model": "demo", "pinned": True}, "pinned: is no field"),
    ("unload", {"model": "demo", "grace_s": "x"}, "grace_s: "),
    ("unload", {"force": True}, "model: is needed"),
]


def events_in(text: str) -> list[tuple[str, Any]]:
    """Return the events of a whole stream, by name."""
    blocks = [block for block in text.split("\n\n") if block and not block.startswith(":")]
    pairs = [block.removeprefix("event: ").split("\ndata: ") for block in blocks]
    return [(name, json.loads(data)) for name, data in pairs]


def busy_status() -> status_pb2.Status:
    """Return a status with counters of two models, of which one has answered nothing yet."""
    now = status()
    label = {"model": "demo"}
    first = status_pb2.Histogram(bounds=[0.1, 1], counts=[1, 2, 0], sum=1.5)
    now.metrics.extend(
        [
            status_pb2.MetricFamily(
                name="mlxd_generation_tokens_total",
                points=[
                    status_pb2.MetricPoint(labels=label, value=40),
                    status_pb2.MetricPoint(labels={"model": "other"}, value=2),
                ],
            ),
            status_pb2.MetricFamily(
                name="mlxd_time_to_first_token_seconds",
                points=[status_pb2.MetricPoint(labels=label, histogram=first)],
            ),
        ]
    )
    return now


@pytest.mark.asyncio
async def test_the_watch_sends_status_and_models() -> None:
    """Models come first, and again only when they have changed; figures in bytes and seconds."""
    answers = Answers(statuses=[busy_status(), busy_status()], models=[model()])
    async with serving(answers) as fake, gateway_over(fake.address) as web:
        answer = await web.http.get("/page/api/watch?interval_s=0.5")
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = events_in(answer.text)
        assert [name for name, _ in events] == ["models", "status", "status", "end"]
        (listed,) = events[0][1]
        assert (listed["name"], listed["state"], listed["read_nbytes"]) == (
            "demo",
            "ready",
            4 * MIB,
        )
        now = events[1][1]
        assert (now["start"], now["now"]) == (NOON, NOON + 90)
        assert [(each["alive"], each["accounts"]) for each in now["workers"]] == [
            (True, {"weights": 12 * MIB}), (False, {"weights": 12 * MIB}),
        ]  # fmt: skip
        assert now["devices"][0]["budget_nbytes"] == 1 << 32
        assert now["counts"]["demo"]["generated"] == 40
        assert now["counts"]["demo"]["first"] == {"bounds": [0.1, 1], "counts": [1, 2, 0]}
        assert now["counts"]["other"] == {"generated": 2, "prompt": 0, "cached": 0, "first": None}
        (request,) = [r for r in fake.requests if isinstance(r, status_pb2.WatchStatusRequest)]
        assert request.interval.nanos == 500_000_000


@pytest.mark.asyncio
async def test_a_load_tells_each_step() -> None:
    """Options go on as they are; the model comes after each step, and then the end."""
    steps = [
        model_pb2.LoadModelResponse(model=model(state=state)) for state in ("LOADING", "READY")
    ]
    async with serving(Answers(load=steps)) as fake, gateway_over(fake.address) as web:
        body = {"model": "demo", "pinned": True, "context_length": 64, "weights": "q8"}
        events = events_in((await web.post("/page/api/load", body)).text)
        assert [(name, each.get("state")) for name, each in events] == [
            ("model", "loading"), ("model", "ready"), ("end", None),
        ]  # fmt: skip
        (request,) = fake.requests
        assert isinstance(request, model_pb2.LoadModelRequest)
        assert (request.options.pinned, request.options.context_length) == (True, 64)
        assert request.options.weights == types_pb2.WEIGHTS_FORMAT_Q8
        assert not request.options.HasField("rows_max")


@pytest.mark.asyncio
async def test_a_load_that_is_refused_has_a_status_and_one_that_fails_an_event() -> None:
    """The head is sent with the first step; what comes behind it cannot be a status."""
    too_large = ModelTooLarge("demo", 10, 5, 1, "cpu")
    async with serving(Answers(load=[too_large])) as fake, gateway_over(fake.address) as web:
        assert (await web.post("/page/api/load", {"model": "demo"})).status_code == 400
    begun = model_pb2.LoadModelResponse(model=model(state="LOADING"))
    failing = Answers(load=[begun, InvalidRequest.of("options.rows_max", "is too many")])
    async with serving(failing) as fake, gateway_over(fake.address) as web:
        answer = await web.post("/page/api/load", {"model": "demo"})
        assert answer.status_code == 200
        name, body = events_in(answer.text)[-1]
        assert (name, body["error"]["message"]) == ("error", "rows_max: is too many")


@pytest.mark.asyncio
async def test_a_fit_is_only_reckoned() -> None:
    """The report comes whole, and nothing is loaded."""
    steps = [model_pb2.LoadModelResponse(fit=fit(evict=("other",)))]
    async with serving(Answers(load=steps)) as fake, gateway_over(fake.address) as web:
        report = (await web.post("/page/api/fit", {"model": "demo", "kv_format": "q8"})).json()
        assert [term["name"] for term in report["terms"]] == ["weights", "kv"]
        assert (report["need_nbytes"], report["would_evict"]) == (11 * MIB, ["other"])
        (request,) = fake.requests
        assert isinstance(request, model_pb2.LoadModelRequest)
        assert request.validate_only
        assert request.options.kv_format == types_pb2.KV_FORMAT_Q8


@pytest.mark.asyncio
async def test_an_unload_says_what_it_ended() -> None:
    """With its grace or by force, as it was put."""
    done = model_pb2.UnloadModelResponse(model=model(state="UNLOADED"), streams_aborted=2)
    async with serving(Answers(unload=done)) as fake, gateway_over(fake.address) as web:
        body = {"model": "demo", "force": True, "grace_s": 1.5}
        answer = (await web.post("/page/api/unload", body)).json()
        assert (answer["streams_aborted"], answer["model"]["state"]) == (2, "unloaded")
        (request,) = fake.requests
        assert isinstance(request, model_pb2.UnloadModelRequest)
        assert (request.force, request.grace.seconds, request.grace.nanos) == (True, 1, 500_000_000)


@pytest.mark.asyncio
async def test_logs_are_followed() -> None:
    """Lines, how many were missed, and whose they are."""
    pieces = [
        model_pb2.ReadLogsResponse(lines=["a", "b"], pid=7),
        model_pb2.ReadLogsResponse(lines=["c"], pid=7, missed_lines=3),
    ]
    async with serving(Answers(logs=pieces)) as fake, gateway_over(fake.address) as web:
        events = events_in((await web.http.get("/page/api/logs?model=demo&tail=9")).text)
        assert events == [
            ("lines", {"lines": ["a", "b"], "missed": 0, "pid": 7}),
            ("lines", {"lines": ["c"], "missed": 3, "pid": 7}),
            ("end", {}),
        ]
        (request,) = fake.requests
        assert isinstance(request, model_pb2.ReadLogsRequest)
        assert (request.tail, request.follow) == (9, True)


@pytest.mark.asyncio
@pytest.mark.parametrize(("path", "body", "message"), WRONG)
async def test_a_wrong_field_is_named(path: str, body: dict[str, Any], message: str) -> None:
    """Before a controller hears of it."""
    async with serving(Answers()) as fake, gateway_over(fake.address) as web:
        status_code, error = await web.error(f"/page/api/{path}", body)
        assert status_code == 400
        assert error["error"]["message"].startswith(message)
        assert error["error"]["field"] == message.partition(":")[0]
        assert fake.requests == []


@pytest.mark.asyncio
@pytest.mark.parametrize("interval", ["0.1", "61", "nan", "x"])
async def test_a_watch_has_an_interval_within_bounds(interval: str) -> None:
    """Neither so short that it is a load of its own, nor for ever."""
    async with serving(Answers(statuses=[status()])) as fake, gateway_over(fake.address) as web:
        answer = await web.http.get(f"/page/api/watch?interval_s={interval}")
        assert (answer.status_code, answer.json()["error"]["field"]) == (400, "interval_s")
        assert fake.requests == []


@pytest.mark.asyncio
async def test_what_a_controller_refuses_is_passed_on() -> None:
    """With its status, before a stream begins."""
    for error, code in ((DENIED, 403), (ModelNotFound("demo"), 404), (QueueFull("w", 1, 1.0), 429)):
        answers = Answers(statuses=[error], load=[error], logs=[error])
        async with serving(answers) as fake, gateway_over(fake.address) as web:
            for path in ("watch", "logs?model=demo"):
                assert (await web.http.get(f"/page/api/{path}")).status_code == code
            for path in ("load", "fit"):
                assert (await web.post(f"/page/api/{path}", {"model": "demo"})).status_code == code


def test_only_so_many_streams_are_open_at_once() -> None:
    """One more is told when to come again; one that ends makes room."""
    count = StreamCount(2)
    with count.hold(""):
        with (
            count.hold(""),
            pytest.raises(Refused, match="2 streams to pages are open") as caught,
            count.hold(""),
        ):
            pass
        assert caught.value.failure.retry_after_s is not None
        with count.hold(""):
            pass


def test_a_key_leaves_room_for_the_pages_of_others() -> None:
    """Its own bound is below that of all; where there are no keys, nobody is told apart."""
    count = StreamCount(3, most_a_key=1)
    with count.hold("one"):
        with pytest.raises(Refused, match="1 streams to pages are open with this key"):
            count.hold("one").__enter__()
        with count.hold("two"):
            pass
    with count.hold("one"), count.hold(""), count.hold(""):
        pass


@pytest.mark.asyncio
async def test_a_stream_that_never_begins_holds_no_place() -> None:
    """A value that the wire cannot carry is refused again and again, and the next watch is open."""
    async with serving(Answers(statuses=[status()])) as fake, gateway_over(fake.address) as web:
        for _ in range(config.PAGE_STREAMS_MAX + 1):
            answer = await web.http.get("/page/api/logs?model=demo&tail=-1")
            assert (answer.status_code, answer.json()["error"]["field"]) == (400, "tail")
        assert (await web.http.get("/page/api/watch")).status_code == 200


@pytest.mark.asyncio
@pytest.mark.parametrize("path", ["watch", "logs?model=demo"])
async def test_a_stream_has_no_head_alone(path: str) -> None:
    """Nothing would ever be written, so that nobody's going would be noticed."""
    async with serving(Answers(statuses=[status()])) as fake, gateway_over(fake.address) as web:
        assert (await web.http.head(f"/page/api/{path}")).status_code == 405
        assert fake.requests == []


@pytest.mark.asyncio
async def test_a_reader_that_goes_ends_the_watch() -> None:
    """The controller's call is cancelled, and its place is free again."""
    answers = Answers(statuses=[status()], models=[model()], hold=True)
    async with serving(answers) as fake, Clients(lambda: Client(fake.address)) as clients:
        app = make_app(clients, Door())
        sent = asyncio.Event()
        scope = {
            "type": "http", "method": "GET", "path": "/page/api/watch", "headers": [],
            "raw_path": b"/page/api/watch", "query_string": b"", "http_version": "1.1",
        }  # fmt: skip

        async def receive() -> Any:
            await sent.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if b"event: status" in message.get("body", b""):
                sent.set()

        await app(scope, receive, send)
        await fake.left.wait()


@pytest.mark.asyncio
async def test_an_open_page_holds_no_gateway_up() -> None:
    """A gateway that leaves ends a watch at once, which it does not call a whole one."""
    answers = Answers(statuses=[status()], models=[model()], hold=True)
    leaving = asyncio.Event()
    async with serving(answers) as fake, Clients(lambda: Client(fake.address)) as clients:
        app = make_app(clients, Door(), leaving=leaving)
        server = make_server(app, OPEN, leaving=leaving)
        with listen_on(parse_address("127.0.0.1:0"), anywhere=False) as listener:
            running = asyncio.create_task(server.serve(sockets=[listener]))
            url = f"http://127.0.0.1:{listener.getsockname()[1]}/page/api/watch"
            async with httpx2.AsyncClient(timeout=60) as http, http.stream("GET", url) as answer:
                pieces = answer.aiter_text()
                assert "event: models" in await anext(pieces)
                server.should_exit = True
                rest = "".join([piece async for piece in pieces])
            await running
        assert leaving.is_set()
        assert "event: end" not in rest
