"""Probes of InferenceService's served fields, through the controller."""

from __future__ import annotations

from typing import Any

from google.protobuf.duration_pb2 import Duration

from mlxd.v1 import inference_pb2, model_pb2, types_pb2
from mlxd_shared.domain.errors import InvalidRequest, WorkerLost
from tests.system.wire.model_probes import load, unload
from tests.system.wire.probe import LONG, Probes, Wire, begins, refusal
from tests.system.wire.scenario import killed_after, one_row_taken, until_waiting

PROBES = Probes()
covering = PROBES.covering
LENGTHS = (200, 450)
"""Of a stream whose worker is killed, in tokens."""


@covering("GenerateRequest.model", "GenerateRequest.text", "GenerateRequest.sampling")
async def text_prompt_streams(wire: Wire) -> None:
    """Another prompt gives another text; the model may be named by digest."""
    messages = await wire.generate(text="The king")
    assert messages[-1].finish.reason == types_pb2.FINISH_REASON_LENGTH
    digest = messages[0].model_digest
    assert await wire.text(model=digest) == await wire.text() != await wire.text(text="The king")


@covering("GenerateRequest.tokens", "TokenIds.ids")
async def token_prompt_equals_its_text(wire: Wire) -> None:
    """A prompt given as its token ids gives the same output as the text."""
    request = inference_pb2.TokenizeRequest(model=wire.model, text="Once upon a time")
    tokens = wire.recorder.see(await wire.inference.Tokenize(request))
    prompt = inference_pb2.TokenIds(ids=tokens.token_ids)
    assert await wire.ids(tokens=prompt) == await wire.ids()


@covering("SamplingOptions.temperature", "SamplingOptions.seed")
async def temperature_and_seed(wire: Wire) -> None:
    """Hot draws leave the greedy path; equal seeds agree, different ones do not."""
    hot = await wire.sample_ids(temperature=2.0, top_k=0, top_p=1.0)
    assert hot == await wire.sample_ids(temperature=2.0, top_k=0, top_p=1.0)
    assert hot != await wire.sample_ids(seed=8, temperature=2.0, top_k=0, top_p=1.0)
    assert hot != await wire.ids()


@covering("SamplingOptions.top_k", "SamplingOptions.top_p", "SamplingOptions.min_p")
async def each_cut_at_its_tightest_is_greedy(wire: Wire) -> None:
    """top_k 1, a tiny top_p and min_p 1 each leave one token, however hot; a huge top_k clamps."""
    greedy = await wire.ids()
    open_cuts: dict[str, Any] = {"temperature": 3.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    assert await wire.sample_ids(**open_cuts) != greedy
    for cut in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        assert await wire.sample_ids(**{**open_cuts, **cut}) == greedy
    clamped = await wire.sample_ids(**{**open_cuts, "top_k": 1 << 30})
    assert clamped == await wire.sample_ids(**open_cuts)


@covering(
    "SamplingOptions.repetition_penalty",
    "SamplingOptions.presence_penalty",
    "SamplingOptions.frequency_penalty",
    "SamplingOptions.repeat_last_n",
)
async def each_penalty_keeps_a_forced_token_from_coming_twice(wire: Wire) -> None:
    """What a bias forces comes once and no more in the window; without a window it always comes."""
    bias = {100: 20.0}
    forced = types_pb2.SamplingOptions(temperature=0, logit_bias={100: 100.0})
    assert await wire.ids(sampling=forced, ignore_eos=True) == [100] * 12
    for name, value in (("presence_penalty", 10), ("frequency_penalty", 10)):
        options: dict[str, Any] = {"temperature": 0, "logit_bias": bias, name: value}
        penalised = await wire.ids(sampling=types_pb2.SamplingOptions(**options), ignore_eos=True)
        free = {**options, "repeat_last_n": 0}
        unpenalised = await wire.ids(sampling=types_pb2.SamplingOptions(**free), ignore_eos=True)
        assert penalised != unpenalised
        assert penalised.count(100) < unpenalised.count(100)
    forced.repetition_penalty = 10
    repeated = await wire.ids(sampling=forced, ignore_eos=True)
    assert repeated[0] == 100
    assert repeated[1] != 100


@covering("SamplingOptions.xtc_probability", "SamplingOptions.xtc_threshold")
async def xtc_leaves_the_top_choices_out(wire: Wire) -> None:
    """At chance 1 and threshold 0 the least likely of the k is always drawn; chance 0 is off."""
    options: dict[str, Any] = {"temperature": 1.0, "top_k": 2, "top_p": 1.0, "xtc_threshold": 0.0}
    messages = await wire.generate(
        sampling=types_pb2.SamplingOptions(seed=7, xtc_probability=1.0, **options),
        logprobs=True,
        top_logprobs=2,
    )
    positions = [p for message in messages for p in message.logprobs]
    assert [p.chosen.token_id for p in positions] == [p.top[1].token_id for p in positions]
    off = await wire.sample_ids(xtc_probability=0.0, **options)
    assert off == await wire.sample_ids(**options)
    never = {**options, "xtc_threshold": 0.5}  # two tokens cannot both reach it but by a tie
    assert await wire.sample_ids(xtc_probability=1.0, **never) == off


@covering("SamplingOptions.logit_bias")
async def logit_bias_forces_a_token(wire: Wire) -> None:
    """+100 on one id makes every token that id."""
    options = types_pb2.SamplingOptions(temperature=0, logit_bias={100: 100.0})
    assert await wire.ids(sampling=options, ignore_eos=True) == [100] * 12


@covering("GenerateRequest.max_tokens", "GenerateRequest.num_predict")
async def length_by_either_name(wire: Wire) -> None:
    """Both names bound the length; num_predict 0 goes on to the end of the text or context."""
    assert len(await wire.ids(max_tokens=5)) == 5
    assert len(await wire.ids(num_predict=5)) == 5
    error = await refusal(wire.generate(max_tokens=5, num_predict=5))
    assert isinstance(error, InvalidRequest)
    messages = await wire.generate(num_predict=0, ignore_eos=True)
    assert messages[-1].finish.reason == types_pb2.FINISH_REASON_CONTEXT


@covering("GenerateRequest.stop")
async def stop_string_cuts_the_text(wire: Wire) -> None:
    """The text ends before the stop string, and the finish names it."""
    whole = await wire.text()
    stop = whole[len(whole) // 2 : len(whole) // 2 + 3]
    messages = await wire.generate(stop=[stop])
    assert "".join(m.text for m in messages) == whole[: whole.index(stop)]
    assert messages[-1].finish.stop_string == stop


@covering("GenerateRequest.stop_token_ids")
async def stop_token_ends_the_stream(wire: Wire) -> None:
    """The output ends before the stop token, and the finish names it."""
    whole = await wire.ids()
    stop = whole[5]
    messages = await wire.generate(stop_token_ids=[stop])
    assert [i for m in messages for i in m.token_ids] == whole[: whole.index(stop)]
    assert messages[-1].finish.stop_token_id == stop


async def _eos_id(wire: Wire) -> int:
    """Force every id until one ends the stream by EOS: the model's end-of-sequence token."""
    for token_id in range(8):
        options = types_pb2.SamplingOptions(temperature=0, logit_bias={token_id: 100.0})
        messages = await wire.generate(sampling=options, max_tokens=2)
        if messages[-1].finish.reason == types_pb2.FINISH_REASON_EOS:
            return token_id
    message = "none of the first ids is an end-of-sequence token"
    raise AssertionError(message)


@covering("GenerateRequest.ignore_eos", "GenerateRequest.skip_special_tokens")
async def eos_and_special_tokens(wire: Wire) -> None:
    """EOS ends the stream unless ignored; then its text shows only if special tokens are kept."""
    eos = await _eos_id(wire)
    options = types_pb2.SamplingOptions(temperature=0, logit_bias={eos: 100.0})
    assert await wire.ids(sampling=options) == []
    forced: dict[str, Any] = {"sampling": options, "ignore_eos": True, "max_tokens": 3}
    assert await wire.ids(**forced) == [eos] * 3
    assert await wire.text(**forced) == ""
    assert await wire.text(**forced, skip_special_tokens=False) != ""


@covering("GenerateRequest.min_tokens")
async def min_tokens_puts_every_end_off(wire: Wire) -> None:
    """No stop token, stop string or EOS before so many tokens, and no more than the length."""
    whole = await wire.ids()
    stop = {"stop_token_ids": [whole[2]]}
    assert len(await wire.ids(**stop)) <= 2
    later = await wire.ids(**stop, min_tokens=6)
    assert len(later) >= 6
    assert whole[2] not in later[:6]
    text = (await wire.text())[1:3]
    messages = await wire.generate(stop=[text], min_tokens=12)
    assert [i for m in messages for i in m.token_ids] == whole
    eos = types_pb2.SamplingOptions(temperature=0, logit_bias={await _eos_id(wire): 100.0})
    assert len(await wire.ids(sampling=eos, min_tokens=5)) == 5
    error = await refusal(wire.generate(max_tokens=3, min_tokens=4))
    assert isinstance(error, InvalidRequest)
    error = await refusal(wire.generate(num_predict=0, min_tokens=1 << 20))
    assert isinstance(error, InvalidRequest)
    assert error.violations[0].field == "min_tokens"


@covering("GenerateRequest.logprobs", "GenerateRequest.top_logprobs")
async def logprobs_come_with_their_tokens(wire: Wire) -> None:
    """One entry for each id: greedy takes the best; the bytes of all tokens are the text."""
    assert not any(m.logprobs for m in await wire.generate())
    assert not any(p.top for m in await wire.generate(logprobs=True) for p in m.logprobs)
    messages = await wire.generate(logprobs=True, top_logprobs=3)
    for message in messages:
        assert [p.chosen.token_id for p in message.logprobs] == list(message.token_ids)
    positions = [p for message in messages for p in message.logprobs]
    for position in positions:
        values = [token.logprob for token in position.top]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        assert position.top[0] == position.chosen
        assert values[0] < 0.0
    spelled = b"".join(position.chosen.text_bytes for position in positions).decode()
    assert spelled == "".join(message.text for message in messages)


@covering("GenerateRequest.speculation", "SpeculationOptions.depth_max")
async def guesses_change_nothing_but_steps(wire: Wire) -> None:
    """A text that repeats itself is guessed right, never with depth 0, and is the same text."""
    await unload(wire, wire.model)
    await load(wire, model_pb2.LoadModelRequest(model=wire.model))
    repeating: dict[str, Any] = {
        "sampling": types_pb2.SamplingOptions(temperature=0, logit_bias={100: 100.0}),
        "ignore_eos": True,
        "max_tokens": 40,
    }
    usage_by_depth: dict[int, types_pb2.Usage] = {}
    for depth in (16, 0):
        options = inference_pb2.SpeculationOptions(depth_max=depth)
        messages = await wire.generate(**repeating, speculation=options)
        assert [i for m in messages for i in m.token_ids] == [100] * 40
        usage_by_depth[depth] = messages[-1].usage
    assert 0 < usage_by_depth[16].accepted_draft_tokens <= usage_by_depth[16].drafted_tokens
    assert usage_by_depth[0].drafted_tokens == usage_by_depth[0].accepted_draft_tokens == 0
    deeper = inference_pb2.SpeculationOptions(depth_max=17)
    error = await refusal(wire.generate(**repeating, speculation=deeper))
    assert isinstance(error, InvalidRequest)


@covering("GenerateRequest.resume_from", "GenerateRequest.resume_token_ids")
async def the_rest_of_a_stream(wire: Wire) -> None:
    """With the tokens so far and the seed the rest comes, and no more; without either nothing."""
    hot = types_pb2.SamplingOptions(temperature=1.5)
    messages = await wire.generate(sampling=hot)
    ids = [i for m in messages for i in m.token_ids]
    resumed: dict[str, Any] = {"resume_from": 5, "resume_token_ids": ids[:5]}
    error = await refusal(wire.generate(sampling=hot, **resumed))
    assert isinstance(error, InvalidRequest)
    assert error.violations[0].field == "sampling.seed"
    hot.seed = messages[0].seed
    rest = await wire.generate(sampling=hot, **resumed)
    assert rest[0].offset == 5
    assert [i for m in rest for i in m.token_ids] == ids[5:]
    whole = "".join(m.text for m in messages)
    assert whole.endswith("".join(m.text for m in rest))
    error = await refusal(wire.generate(sampling=hot, **{**resumed, "resume_from": 4}))
    assert isinstance(error, InvalidRequest)


@covering()
async def near_ties_are_told(wire: Wire) -> None:
    """Behind a resume, two tokens that a bias makes equal are counted as too near to call."""
    messages = await wire.generate(logprobs=True, top_logprobs=2, max_tokens=2)
    best, other = [p for m in messages for p in m.logprobs][1].top
    level = types_pb2.SamplingOptions(
        temperature=0, logit_bias={other.token_id: best.logprob - other.logprob}
    )
    first = messages[0].token_ids[:1]
    (last,) = await wire.generate(
        sampling=level, max_tokens=2, resume_from=1, resume_token_ids=first
    )
    assert last.usage.near_ties == 1


@covering("GenerateRequest.migrate")
async def a_stream_moves_unless_it_is_forbidden(wire: Wire) -> None:
    """A worker that is killed ends the stream that may not move; the other goes on, whole."""
    for tokens in LENGTHS:  # the longer one where the worker had sent all of the other by then
        whole = await wire.ids(max_tokens=tokens, ignore_eos=True)
        ids, last = await killed_after(wire, 3, max_tokens=tokens, ignore_eos=True)
        assert ids == whole
        if last.usage.migrations:
            break
    assert last.usage.migrations == 1
    endless: dict[str, Any] = {"model": LONG, "num_predict": 0, "ignore_eos": True}
    error = await refusal(killed_after(wire, 3, migrate=False, **endless))
    assert isinstance(error, WorkerLost)
    assert await wire.ids() == whole[:12]
    await unload(wire, LONG)


@covering("GenerateRequest.keep_alive")
async def keep_alive_moves_the_expiry(wire: Wire) -> None:
    """An hour gives an expiry, for ever takes it away."""
    await wire.generate(keep_alive=Duration(seconds=3600))
    got = await wire.models.GetModel(model_pb2.GetModelRequest(model=wire.model))
    model = wire.recorder.see(got).model
    assert 3500 < model.expire_time.seconds - model.last_used_time.seconds <= 3600
    await wire.generate(keep_alive=Duration(seconds=-1))
    got = await wire.models.GetModel(model_pb2.GetModelRequest(model=wire.model))
    assert not got.model.HasField("expire_time")


@covering("GenerateRequest.request_id")
async def request_id_comes_back(wire: Wire) -> None:
    """The id given is the id answered; without one, one is made."""
    messages = await wire.generate(request_id="a-name")
    assert messages[0].request_id == "a-name"
    assert (await wire.generate())[0].request_id


@covering("GenerateRequest.priority")
async def priority_overtakes(wire: Wire) -> None:
    """Of streams that wait for the one row, the one of higher priority is served first."""
    endless: dict[str, Any] = {"model": LONG, "text": "Once", "ignore_eos": True}
    async with one_row_taken(wire):
        calls = {
            priority: wire.inference.Generate(
                inference_pb2.GenerateRequest(priority=priority, **endless)
            )
            for priority in (1, -1, 2)
        }
        await until_waiting(wire, len(calls))
    for waiting, priority in ((2, 2), (1, 1), (0, -1)):  # each has the row until it is told to go
        await begins(calls[priority])
        await until_waiting(wire, waiting)
        calls[priority].cancel()
    await unload(wire, LONG)


@covering(
    "GenerateRequest.worker_incarnation", "GenerateRequest.load_duration", "GenerateRequest.age"
)
async def the_controllers_own_fields(wire: Wire) -> None:
    """What the controller sets is refused from its clients."""
    second = Duration(seconds=1)
    for fields in ({"worker_incarnation": "x"}, {"load_duration": second}, {"age": second}):
        error = await refusal(wire.generate(**fields))
        assert isinstance(error, InvalidRequest)
        assert error.violations[0].field == next(iter(fields))


@covering(
    "TokenizeRequest.model",
    "TokenizeRequest.text",
    "TokenizeRequest.add_special_tokens",
    "TokenizeRequest.parse_special_tokens",
    "DetokenizeRequest.model",
    "DetokenizeRequest.token_ids",
    "DetokenizeRequest.skip_special_tokens",
)
async def tokenize_and_back(wire: Wire) -> None:
    """Text survives the round trip; special tokens are added, read and shown only as asked."""

    async def tokenize(text: str, **fields: Any) -> list[int]:
        request = inference_pb2.TokenizeRequest(model=wire.model, text=text, **fields)
        return list(wire.recorder.see(await wire.inference.Tokenize(request)).token_ids)

    async def detokenize(ids: list[int], **fields: Any) -> str:
        request = inference_pb2.DetokenizeRequest(model=wire.model, token_ids=ids, **fields)
        return wire.recorder.see(await wire.inference.Detokenize(request)).text

    plain = await tokenize("Once upon a time", add_special_tokens=False)
    full = await tokenize("Once upon a time")
    assert full[-len(plain) :] == plain
    assert len(full) > len(plain)
    assert (await detokenize(full)).strip() == "Once upon a time"
    special = await detokenize(full[:1], skip_special_tokens=False)
    assert special not in await detokenize(full)
    assert len(await tokenize(special, add_special_tokens=False, parse_special_tokens=True)) == 1
    assert len(await tokenize(special, add_special_tokens=False)) > 1


@covering("TokenizeRequest.worker_incarnation", "DetokenizeRequest.worker_incarnation")
async def tokenize_refuses_the_controllers_field(wire: Wire) -> None:
    """What the controller sets is refused from its clients."""
    error = await refusal(
        wire.inference.Tokenize(
            inference_pb2.TokenizeRequest(model=wire.model, text="a", worker_incarnation="x")
        )
    )
    assert isinstance(error, InvalidRequest)
    error = await refusal(
        wire.inference.Detokenize(
            inference_pb2.DetokenizeRequest(model=wire.model, token_ids=[1], worker_incarnation="x")
        )
    )
    assert isinstance(error, InvalidRequest)
