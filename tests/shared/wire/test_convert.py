"""The wire's edge: presence, and the range of each field, with all violations at once."""

from __future__ import annotations

import math

import pytest
from google.protobuf.duration_pb2 import Duration

from mlxd.v1 import inference_pb2, types_pb2
from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidRequest
from mlxd_shared.domain.requests import (
    GenerateSpec,
    SamplingOptions,
)
from mlxd_shared.wire.convert import generate_from_pb, load_from_pb
from mlxd_shared.wire.records import read

Generate = inference_pb2.GenerateRequest
Options = types_pb2.SamplingOptions
HUGE = (1 << 31) - 1


def generate(**fields: object) -> Generate:
    """A request that is good but for `fields`."""
    if not {"text", "tokens", "chat", "no_prompt"} & set(fields):
        fields["text"] = "x"
    fields.pop("no_prompt", None)
    return Generate(**fields)  # type: ignore[arg-type]


def refuse(request: Generate) -> dict[str, str]:
    """The violations of a bad request, by field."""
    with pytest.raises(InvalidRequest) as caught:
        generate_from_pb(request)
    return {violation.field: violation.description for violation in caught.value.violations}


def test_the_least_request_has_every_default() -> None:
    """What is absent on the wire is None in the domain, or the documented default."""
    assert generate_from_pb(generate()) == GenerateSpec(model="", prompt="x")


def test_every_field_arrives() -> None:
    """Each served field lands in its place."""
    spec = generate_from_pb(
        Generate(
            model="m",
            tokens=inference_pb2.TokenIds(ids=[1, 2]),
            sampling=Options(
                temperature=0.0,
                top_k=-1,
                top_p=0.0,
                min_p=0.0,
                seed=0,
                xtc_probability=0.5,
                xtc_threshold=0.25,
            ),
            max_tokens=3,
            stop=["a"],
            stop_token_ids=[0],
            ignore_eos=True,
            min_tokens=3,
            logprobs=True,
            top_logprobs=2,
            keep_alive=Duration(seconds=0),
            request_id="r",
            skip_special_tokens=False,
            worker_incarnation="w",
            load_duration=Duration(nanos=500_000_000),
            resume_from=2,
            resume_token_ids=[7, 0],
            migrate=False,
        )
    )

    assert spec == GenerateSpec(
        model="m",
        prompt=(1, 2),
        sampling=SamplingOptions(
            temperature=0.0,
            top_k=-1,
            top_p=0.0,
            min_p=0.0,
            seed=0,
            xtc_probability=0.5,
            xtc_threshold=0.25,
        ),
        max_tokens=3,
        stop=("a",),
        stop_token_ids=(0,),
        ignore_eos=True,
        min_tokens=3,
        top_logprobs=2,
        skip_special_tokens=False,
        keep_alive_s=0.0,
        request_id="r",
        worker_incarnation="w",
        load_s=0.5,
        resumed=(7, 0),
        migrate=False,
    )


GOOD_SAMPLING = [
    Options(temperature=0.0),
    Options(temperature=100.0),
    Options(top_k=-1),
    Options(top_k=HUGE),
    Options(top_p=0.0),
    Options(top_p=1.0),
    Options(min_p=0.0),
    Options(min_p=1.0),
    Options(seed=(1 << 64) - 1),
    Options(logit_bias={0: -100.0, (1 << 32) - 1: 100.0}),
    Options(repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0),
    Options(repetition_penalty=0.0625),
    Options(repetition_penalty=10.0, presence_penalty=-10.0, frequency_penalty=10.0),
    Options(repeat_last_n=-1),
    Options(repeat_last_n=0, xtc_probability=0.0, xtc_threshold=0.0),
    Options(xtc_probability=1.0, xtc_threshold=0.5),
]
BAD_SAMPLING = [
    (Options(temperature=-0.001), "temperature", "[0, 100]"),
    (Options(temperature=100.1), "temperature", "[0, 100]"),
    (Options(temperature=math.nan), "temperature", "[0, 100]"),
    (Options(temperature=math.inf), "temperature", "[0, 100]"),
    (Options(top_k=-2), "top_k", "[-1, "),
    (Options(top_p=-0.1), "top_p", "[0, 1]"),
    (Options(top_p=1.1), "top_p", "[0, 1]"),
    (Options(top_p=math.nan), "top_p", "[0, 1]"),
    (Options(min_p=-0.1), "min_p", "[0, 1]"),
    (Options(min_p=1.1), "min_p", "[0, 1]"),
    (Options(logit_bias={3: 100.1}), "logit_bias[3]", "[-100, 100]"),
    (Options(logit_bias={3: math.nan}), "logit_bias[3]", "[-100, 100]"),
    (Options(repetition_penalty=0.0), "repetition_penalty", "[0.0625, 10]"),
    (Options(repetition_penalty=-1.0), "repetition_penalty", "[0.0625, 10]"),
    (Options(repetition_penalty=10.1), "repetition_penalty", "[0.0625, 10]"),
    (Options(presence_penalty=-10.1), "presence_penalty", "[-10, 10]"),
    (Options(presence_penalty=math.nan), "presence_penalty", "[-10, 10]"),
    (Options(frequency_penalty=10.1), "frequency_penalty", "[-10, 10]"),
    (Options(repeat_last_n=-2), "repeat_last_n", "[-1, 2147483647]"),
    (Options(xtc_probability=1.1), "xtc_probability", "[0, 1]"),
    (Options(xtc_threshold=0.6), "xtc_threshold", "[0, 0.5]"),
]
BAD_REQUESTS = [
    (generate(no_prompt=True), "prompt", "one of text, tokens and chat"),
    (generate(text=""), "text", "the prompt is empty"),
    (generate(tokens=inference_pb2.TokenIds()), "tokens", "the prompt is empty"),
    (generate(text="x" * (config.PROMPT_CHARS_MAX + 1)), "text", "at most"),
    (generate(tokens=inference_pb2.TokenIds(ids=[1] * (config.TOKENIZE_IDS_MAX + 1))),
     "tokens.ids", "at most"),
    (generate(model="m" * (config.MODEL_NAME_CHARS_MAX + 1)), "model", "at most 512"),
    (generate(max_tokens=0), "max_tokens", "0 is below 1"),
    (generate(max_tokens=-1), "max_tokens", "-1 is below 1"),
    (generate(max_tokens=1, num_predict=1), "num_predict", "give only one"),
    (generate(stop=["a"] * 17), "stop", "at most 16"),
    (generate(stop=["a", ""]), "stop[1]", "1 to 256 characters, this one has 0"),
    (generate(stop=["a" * 257]), "stop[0]", "this one has 257"),
    (generate(stop_token_ids=range(257)), "stop_token_ids", "at most 256"),
    (generate(sampling=Options(logit_bias=dict.fromkeys(range(1025), 1.0))),
     "sampling.logit_bias", "at most 1024"),
    (generate(request_id="r" * 129), "request_id", "at most 128"),
    (generate(top_logprobs=21), "top_logprobs", "[0, 20]"),
    (generate(top_logprobs=1), "top_logprobs", "logprobs must be true"),
    (generate(max_tokens=3, min_tokens=4), "min_tokens", "4 is above the 3 tokens"),
    (generate(num_predict=3, min_tokens=4), "min_tokens", "4 is above the 3 tokens"),
    (generate(resume_from=1), "resume_from", "1 tokens come before it, but resume_token_ids has 0"),
    (generate(resume_token_ids=[1]), "resume_from", "0 tokens come before it"),
    (generate(max_tokens=2, resume_from=2, resume_token_ids=[1, 1]), "resume_from",
     "2 is not below the 2 tokens"),
    (generate(num_predict=1, resume_from=2, resume_token_ids=[1, 1]), "resume_from",
     "2 is not below the 1 tokens"),
    (generate(resume_from=config.TOKENIZE_IDS_MAX + 1,
              resume_token_ids=[1] * (config.TOKENIZE_IDS_MAX + 1)), "resume_token_ids", "at most"),
    (generate(keep_alive=Duration(seconds=int(config.DURATION_MAX_S) + 1)),
     "keep_alive", "negative is for ever"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "top_logprobs"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
    ],
)
def test_log_probabilities_are_asked_for_apart_from_alternatives(
    fields: dict[str, object], top_logprobs: int | None
) -> None:
    """Each token's own may be wanted without any other's."""
    assert generate_from_pb(generate(**fields)).top_logprobs == top_logprobs


@pytest.mark.parametrize(
    ("fields", "migrate"), [({}, True), ({"migrate": True}, True), ({"migrate": False}, False)]
)
def test_a_stream_moves_unless_it_is_forbidden(fields: dict[str, object], *, migrate: bool) -> None:
    """Absent is not false."""
    assert generate_from_pb(generate(**fields)).migrate is migrate


def test_what_is_resumed_may_lack_one_token() -> None:
    """The last token of all may be all that is missing, and without a bound anything may be."""
    last = generate(max_tokens=3, resume_from=2, resume_token_ids=[1, 2])
    assert generate_from_pb(last).resumed == (1, 2)
    unbounded = generate(num_predict=0, resume_from=2, resume_token_ids=[1, 2])
    assert generate_from_pb(unbounded).resumed == (1, 2)


def test_a_least_length_may_be_the_whole_length() -> None:
    """min_tokens may be max_tokens, and anything where the context is the only end."""
    assert generate_from_pb(generate(max_tokens=3, min_tokens=3)).min_tokens == 3
    assert generate_from_pb(generate(num_predict=0, min_tokens=9999)).min_tokens == 9999


@pytest.mark.parametrize("options", GOOD_SAMPLING, ids=str)
def test_the_edges_of_each_range_are_good(options: Options) -> None:
    """A range includes its ends."""
    assert generate_from_pb(generate(sampling=options)).sampling == read(SamplingOptions, options)


@pytest.mark.parametrize(("options", "field", "limit"), BAD_SAMPLING, ids=str)
def test_a_sampling_value_out_of_range_is_named(options: Options, field: str, limit: str) -> None:
    """The path from the request, and the limit; NaN is never in a range."""
    violations = refuse(generate(sampling=options))

    assert list(violations) == [f"sampling.{field}"]
    assert limit in violations[f"sampling.{field}"]


@pytest.mark.parametrize(("request_", "field", "limit"), BAD_REQUESTS, ids=lambda value: None)
def test_a_field_out_of_range_is_named(request_: Generate, field: str, limit: str) -> None:
    """The field, and the limit, in the client's own terms."""
    violations = refuse(request_)

    assert list(violations) == [field]
    assert limit in violations[field]


def test_all_violations_come_at_once() -> None:
    """A client that sends three bad fields learns of three, even beside one that is not served."""
    request = generate(max_tokens=0, stop=[""], sampling=Options(temperature=-1.0), priority=5)

    assert set(refuse(request)) == {"max_tokens", "stop[0]", "sampling.temperature"}


@pytest.mark.parametrize(
    ("fields", "max_tokens"),
    [
        ({}, None),
        ({"max_tokens": 7}, 7),
        ({"num_predict": 7}, 7),
        ({"num_predict": 0}, None),
        ({"num_predict": -1}, None),
    ],
)
def test_num_predict_is_the_older_name(fields: dict[str, object], max_tokens: int | None) -> None:
    """0 and below mean until the context is full, for the alias only."""
    assert generate_from_pb(generate(**fields)).max_tokens == max_tokens


def test_neutral_values_are_good() -> None:
    """A field that asks for nothing gets it."""
    neutral = generate(min_tokens=0, logprobs=False, top_logprobs=0, resume_from=0)

    assert generate_from_pb(neutral) == GenerateSpec(model="", prompt="x")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (types_pb2.LoadOptions(context_length=7), "options.context_length"),
        (types_pb2.LoadOptions(context_length=(1 << 24) + 1), "options.context_length"),
        (types_pb2.LoadOptions(rows_max=0), "options.rows_max"),
        (types_pb2.LoadOptions(rows_max=257), "options.rows_max"),
        (types_pb2.LoadOptions(weights=99), "options.weights"),  # type: ignore[arg-type]
        (types_pb2.LoadOptions(kv_format=99), "options.kv_format"),  # type: ignore[arg-type]
        (
            types_pb2.LoadOptions(prefix_cache_bytes=config.PREFIX_CACHE_BYTES_LIMIT + 1),
            "options.prefix_cache_bytes",
        ),
        (types_pb2.LoadOptions(sampling=Options(top_p=2.0)), "options.sampling.top_p"),
    ],
)
def test_load_options_out_of_range_are_named(options: types_pb2.LoadOptions, field: str) -> None:
    """The path begins at the request of the load."""
    with pytest.raises(InvalidRequest) as caught:
        load_from_pb(options)

    assert [violation.field for violation in caught.value.violations] == [field]


def test_no_prefix_cache_is_not_an_open_one() -> None:
    """0 bytes is a choice, absent is none."""
    assert load_from_pb(types_pb2.LoadOptions(prefix_cache_bytes=0)).prefix_cache_nbytes == 0
    assert load_from_pb(types_pb2.LoadOptions()).prefix_cache_nbytes is None


def test_the_least_priority_is_a_choice_and_absent_is_none() -> None:
    """0 and below are said; what nobody says stays as it is."""
    assert load_from_pb(types_pb2.LoadOptions(priority=0)).priority == 0
    assert load_from_pb(types_pb2.LoadOptions(priority=-3)).priority == -3
    assert load_from_pb(types_pb2.LoadOptions()).priority is None


@pytest.mark.parametrize(
    ("duration", "field"),
    [
        (Duration(nanos=10**9), "keep_alive.nanos"),
        (Duration(seconds=1, nanos=-1), "keep_alive.nanos"),
        (Duration(seconds=1 << 60), "keep_alive.seconds"),
        (Duration(seconds=-(1 << 60)), "keep_alive.seconds"),
    ],
)
def test_a_duration_that_is_none_names_its_part(duration: Duration, field: str) -> None:
    """Seconds and nanoseconds have bounds and one sign, as the type says."""
    assert [*refuse(generate(keep_alive=duration))] == [field]


def test_of_a_list_one_violation_is_told() -> None:
    """A list that is too long is not looked into; of another the first bad entry is named."""
    assert [*refuse(generate(stop=[""] * (config.STOP_STRINGS_MAX + 1)))] == ["stop"]
    assert [*refuse(generate(stop=["a", "", ""]))] == ["stop[1]"]
    biases = types_pb2.SamplingOptions(logit_bias=dict.fromkeys(range(9), 1e9))
    assert len(refuse(generate(sampling=biases))) == 1
    many = types_pb2.SamplingOptions(logit_bias=dict.fromkeys(range(config.LOGIT_BIAS_MAX + 1), 1))
    with pytest.raises(InvalidRequest) as caught:
        load_from_pb(types_pb2.LoadOptions(sampling=many))
    assert [v.field for v in caught.value.violations] == ["options.sampling.logit_bias"]


def test_ids_are_those_that_were_sent() -> None:
    """However many pieces they are taken in; and who only relays them has no copy."""
    ids = tuple(range(200_000))
    request = inference_pb2.GenerateRequest(tokens=inference_pb2.TokenIds(ids=ids))
    assert generate_from_pb(request).prompt == ids
    assert generate_from_pb(request, with_prompt=False).prompt == ""
