"""`mlxd generate` and `mlxd tokenize` as processes against a scripted server."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TypeVar

import pytest

from mlxd.v1 import inference_pb2, types_pb2
from mlxd_shared.domain import errors
from mlxd_shared.domain.errors import MlxdError
from tests.fakes import replies
from tests.fakes.mlxd_server import Answers, FakeServer, serving
from tests.support.cli import LIMIT_S, mlxd, start

_M = TypeVar("_M")


def only(fake: FakeServer, kind: type[_M]) -> _M:
    """The one request that came, of this kind."""
    (request,) = fake.requests
    assert isinstance(request, kind)
    return request


@pytest.mark.asyncio
async def test_generate_prints_the_text_alone() -> None:
    """stdout has the completion, which ends its line; --stats goes to stderr."""
    async with serving(Answers(generate=replies.story())) as fake:
        ran = await mlxd("generate", "demo", "hi", "--stats", "--address", fake.address)

    assert (ran.code, ran.out) == (0, "Once upon ä\n")
    assert ran.err == (
        "4 tokens, 6.0 tokens/s, first token after 261 ms (queue 1, load 250, prompt 10),"
        " prompt 5 tokens, 2 cached, seed 18446744073709551615, ended by length\n"
    )


@pytest.mark.asyncio
async def test_stats_tell_of_moves_and_near_ties() -> None:
    """Where there were none, nothing is said of them; else how many, and no speed."""
    *messages, last = replies.story()
    last.usage.migrations, last.usage.near_ties = 2, 1
    async with serving(Answers(generate=[*messages, last])) as fake:
        ran = await mlxd("generate", "demo", "hi", "--stats", "--address", fake.address)

    assert ran.err == (
        "4 tokens, first token after 261 ms (queue 1, load 250, prompt 10),"
        " prompt 5 tokens, 2 cached, seed 18446744073709551615,"
        " moved 2 times to another worker, near ties 1, ended by length\n"
    )


@pytest.mark.asyncio
async def test_generate_sends_each_flag() -> None:
    """Every option arrives in its field, and a piped prompt loses its last newline only."""
    async with serving(Answers(generate=two_choices())) as fake:
        ran = await mlxd(
            "generate", "demo", "--max-tokens", "4", "--stop", "a", "--stop", "b c",
            "--stop-token-id", "7", "--ignore-eos", "--temperature", "0", "--top-k", "-1",
            "--top-p", "0.5", "--min-p", "0.25", "--seed", "0", "--logit-bias", "3=-1.5",
            "--repetition-penalty", "1.5", "--presence-penalty", "-0.5",
            "--frequency-penalty", "0.25", "--repeat-last-n", "-1", "--min-tokens", "2",
            "--xtc-probability", "0.5", "--xtc-threshold", "0.25", "--logprobs", "3",
            "--n", "2", "--echo", "--prompt-logprobs", "4", "--speculate", "5",
            "--priority", "-3", "--keep-alive", "-1", "--request-id", "mine", "--no-migrate",
            "--address", fake.address,
            piped="one\ntwo\n\n",
        )  # fmt: skip
        request = only(fake, inference_pb2.GenerateRequest)

    assert ran.code == 0
    assert (request.n, request.echo, request.prompt_logprobs) == (2, True, 4)
    assert (request.model, request.text) == ("demo", "one\ntwo\n")
    assert (request.max_tokens, list(request.stop)) == (4, ["a", "b c"])
    assert (list(request.stop_token_ids), request.ignore_eos) == ([7], True)
    assert request.sampling == types_pb2.SamplingOptions(
        temperature=0, top_k=-1, top_p=0.5, min_p=0.25, seed=0, logit_bias={3: -1.5},
        repetition_penalty=1.5, presence_penalty=-0.5, frequency_penalty=0.25, repeat_last_n=-1,
        xtc_probability=0.5, xtc_threshold=0.25,
    )  # fmt: skip
    assert (request.min_tokens, request.logprobs, request.top_logprobs) == (2, True, 3)
    assert request.speculation.depth_max == 5
    assert (request.keep_alive.seconds, request.request_id) == (-1, "mine")
    assert request.priority == -3
    assert (request.HasField("migrate"), request.migrate) == (True, False)


@pytest.mark.asyncio
async def test_generate_sends_nothing_that_was_not_given() -> None:
    """Absent flags are absent on the wire, so that the model's own values hold."""
    async with serving(Answers(generate=replies.story())) as fake:
        await mlxd("generate", "demo", "x", "--address", fake.address)
        request = only(fake, inference_pb2.GenerateRequest)

    assert request == inference_pb2.GenerateRequest(
        model="demo", text="x", sampling=types_pb2.SamplingOptions()
    )


@pytest.mark.asyncio
async def test_generate_json_is_one_object_a_message() -> None:
    """Programs get every message with offsets and ids, the last with finish and usage."""
    async with serving(Answers(generate=replies.story())) as fake:
        ran = await mlxd("generate", "demo", "x", "--json", "--address", fake.address)

    *deltas, finished = ran.objects
    expected = {
        "offset": 1, "text": " upon", "token_ids": [2, 3], "logprobs": [], "parts": [],
        "seed": None, "choice": 0, "prompt": None, "prompt_tokens": None,
    }  # fmt: skip
    assert deltas[1] == expected
    assert finished["reason"] == "length"
    assert finished["usage"]["completion_tokens"] == 4
    assert finished["model_digest"] == replies.DIGEST


@pytest.mark.asyncio
async def test_generate_shows_log_probabilities_a_token_a_line() -> None:
    """The drawn token, then the best ones; what is no whole text is shown as bytes."""
    once = replies.logprob(1, -0.5, b"Once")
    part = replies.logprob(2, -1.25, b"\xe3")
    first = replies.delta(0, "Once", 1)
    first.logprobs.add(chosen=once, top=[once, part])
    second = replies.delta(1, "", 2, 2)
    for _ in range(2):
        second.logprobs.add(chosen=part)
    answers = [first, second, replies.last(3)]
    async with serving(Answers(generate=answers)) as fake:
        ran = await mlxd("generate", "demo", "x", "--logprobs", "2", "--address", fake.address)
        programs = await mlxd("generate", "demo", "x", "--json", "--address", fake.address)

    best, alone = " -0.5000 'Once'  [-0.5000 'Once', -1.2500 b'\\xe3']\n", " -1.2500 b'\\xe3'\n"
    assert ran.out == best + 2 * alone
    chosen = {"token_id": 2, "logprob": -1.25, "text_bytes": [0xE3]}
    assert programs.objects[1]["logprobs"] == 2 * [{"chosen": chosen, "top": []}]


def two_choices() -> list[inference_pb2.GenerateResponse]:
    """A stream of two choices, of which the second comes and ends first."""
    responses = []
    for choice, text in ((1, "sea"), (0, "king"), (1, None), (0, None)):
        message = replies.last(1) if text is None else replies.delta(0, text, 1)
        message.choice = choice
        if text is not None:
            message.request_id, message.model_digest = "r-1", replies.DIGEST
        responses.append(message)
    return responses


@pytest.mark.asyncio
async def test_choices_are_printed_one_behind_the_other() -> None:
    """In their order, however they come; each has its summary, and programs see what came."""
    async with serving(Answers(generate=two_choices())) as fake:
        command = ("generate", "demo", "x", "-n", "2", "--address", fake.address)
        ran = await mlxd(*command, "--stats")
        programs = await mlxd(*command, "--json")
        many = await mlxd("generate", "demo", "x", "--n", "17", "--address", fake.address)

    assert (ran.code, ran.out) == (0, "--- choice 1 ---\nking\n--- choice 2 ---\nsea\n")
    assert [line.partition(": 1 tokens")[0] for line in ran.err.splitlines()] == [
        "choice 1", "choice 2",
    ]  # fmt: skip
    assert [each["choice"] for each in programs.objects] == [1, 0, 1, 0]
    assert many.code == 2


@pytest.mark.asyncio
async def test_an_echoed_prompt_comes_first() -> None:
    """As text before the text; its log-probabilities, and all others, are lines of their own."""
    first, *rest = replies.story()
    first.prompt.text = "hi"
    first.prompt.logprobs.add(chosen=replies.logprob(2, -0.5, b"i"))
    async with serving(Answers(generate=[first, *rest])) as fake:
        ran = await mlxd("generate", "demo", "hi", "--echo", "--address", fake.address)
    assert ran.out == "hi\n -0.5000 'i'\nOnce upon ä\n"
    del first.prompt.logprobs[:]
    async with serving(Answers(generate=[first, *rest])) as fake:
        ran = await mlxd("generate", "demo", "hi", "--echo", "--address", fake.address)
    assert ran.out == "hiOnce upon ä\n"


@pytest.mark.asyncio
async def test_text_comes_at_once_and_ctrl_c_cancels() -> None:
    """What has come is shown before the end; SIGINT ends the call and exits with 130."""
    answers = Answers(generate=[replies.delta(0, "Once", 1)], hold=True)
    async with serving(answers) as fake:
        process = await start("generate", "demo", "x", "--address", fake.address)
        assert process.stdout is not None
        assert process.stderr is not None
        assert await asyncio.wait_for(process.stdout.readexactly(4), LIMIT_S) == b"Once"
        process.send_signal(signal.SIGINT)
        await asyncio.wait_for(fake.left.wait(), LIMIT_S)
        out, err = await asyncio.wait_for(process.communicate(), LIMIT_S)

    assert (process.returncode, out, err) == (130, b"\n", b"")


@pytest.mark.asyncio
async def test_a_reader_that_goes_away_ends_the_call_quietly() -> None:
    """`mlxd generate ... | head -1` says nothing on stderr, and the server stops generating."""
    answers = Answers(generate=[replies.delta(n, "word " * 9999, n) for n in range(30)], hold=True)
    async with serving(answers) as fake:
        reading, writing = os.pipe()
        process = await start("generate", "m", "x", "--address", fake.address, stdout=writing)
        os.close(writing)
        os.close(reading)
        _, err = await asyncio.wait_for(process.communicate(), LIMIT_S)

    assert (process.returncode, err) == (141, b"")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.InvalidRequest.of("sampling.top_p", "2.0 is outside [0, 1]"), 2),
        (errors.FieldNotServed("chat"), 2),
        (errors.ModelNotFound("gone"), 3),
        (errors.ModelTooLarge("big", 9, 8, 1), 5),
        (errors.NoRoom("big", 9, 8, 1.0), 5),
        (errors.WorkerLost("demo", 1), 1),
        (errors.ShuttingDown(), 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, MlxdError) else str(value),
)
async def test_an_error_is_one_line_and_a_code(error: MlxdError, code: int) -> None:
    """stderr has the server's own words, with the field; the text so far stays on its line."""
    answers = Answers(generate=[replies.delta(0, "Once", 1), error])
    async with serving(answers) as fake:
        ran = await mlxd("generate", "demo", "x", "--address", fake.address)

    assert (ran.code, ran.out, ran.err) == (code, "Once\n", f"mlxd: {error.describe()}\n")


@pytest.mark.asyncio
async def test_a_stream_without_an_end_is_an_error() -> None:
    """A server that just stops is not taken for one that has finished."""
    async with serving(Answers(generate=[replies.delta(0, "Once", 1)])) as fake:
        ran = await mlxd("generate", "demo", "x", "--address", fake.address)

    assert (ran.code, ran.out) == (1, "Once\n")
    assert ran.err == "mlxd: broken stream: it ended after 1 tokens without a finish\n"


@pytest.mark.asyncio
async def test_a_stream_that_the_operator_ended_is_an_error() -> None:
    """A completion that was cut short does not look complete."""
    finish = types_pb2.Finish(reason=types_pb2.FINISH_REASON_CANCELLED)
    async with serving(Answers(generate=[replies.last(0, finish=finish)])) as fake:
        ran = await mlxd("generate", "demo", "x", "--address", fake.address)

    assert ran.code == 1
    assert "before it was complete" in ran.err


@pytest.mark.asyncio
async def test_tokenize_prints_ids() -> None:
    """One line of ids, or JSON."""
    async with serving(Answers(token_ids=[1, 2])) as fake:
        ran = await mlxd("tokenize", "demo", "a b", "--no-special", "--address", fake.address)
        request = only(fake, inference_pb2.TokenizeRequest)
        programs = await mlxd("tokenize", "demo", "--json", "--address", fake.address, piped="a")

    assert (ran.out, programs.objects) == ("1 2\n", [[1, 2]])
    assert (request.text, request.add_special_tokens) == ("a b", False)


@pytest.mark.asyncio
async def test_a_format_s_file_that_is_not_there_is_told_once() -> None:
    """The name and the system's words, without a number or a second name."""
    ran = await mlxd("generate", "demo", "hi", "--json-schema", "none.json")

    assert (ran.code, ran.err) == (2, "mlxd: none.json: No such file or directory\n")
