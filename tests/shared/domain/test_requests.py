"""Round trips over the wire, the order of defaults, and token ids against a vocabulary."""

from __future__ import annotations

import datetime as dt
import enum
import math
from dataclasses import fields, replace

import pytest
from google.protobuf.duration_pb2 import Duration
from hypothesis import given
from hypothesis import strategies as st

from mlxd.v1 import types_pb2
from mlxd_shared.domain.errors import InvalidRequest
from mlxd_shared.domain.requests import (
    DEFAULTS,
    FinishReason,
    GenerateSpec,
    KVFormat,
    LoadSpec,
    Sampling,
    SamplingOptions,
    Weights,
    check_vocabulary,
    merge,
    resolve,
)
from mlxd_shared.wire.convert import (
    FINISH_FROM_PB,
    FINISH_TO_PB,
    WEIGHTS_FROM_PB,
    WEIGHTS_TO_PB,
    load_from_pb,
)
from mlxd_shared.wire.records import (
    duration_from_pb,
    duration_to_pb,
    read,
    timestamp_from_pb,
    timestamp_to_pb,
    write,
)

HUGE = (1 << 31) - 1


FLOATS = st.none() | st.floats(0, 1, width=32)
SAMPLING = st.builds(
    SamplingOptions,
    temperature=FLOATS,
    top_k=st.none() | st.integers(-1, HUGE),
    top_p=FLOATS,
    min_p=FLOATS,
    repetition_penalty=st.none() | st.floats(0.125, 10, width=32),
    presence_penalty=st.none() | st.floats(-10, 10, width=32),
    frequency_penalty=st.none() | st.floats(-10, 10, width=32),
    repeat_last_n=st.none() | st.integers(-1, HUGE),
    seed=st.none() | st.integers(0, (1 << 64) - 1),
    logit_bias=st.dictionaries(
        st.integers(0, (1 << 32) - 1), st.floats(-100, 100, width=32), max_size=4
    ).map(lambda biases: tuple(sorted(biases.items()))),
)


@given(SAMPLING)
def test_sampling_survives_the_wire(options: SamplingOptions) -> None:
    """Absent stays absent, zero stays zero, and a seed keeps its 64 bits."""
    assert read(SamplingOptions, write(options, types_pb2.SamplingOptions)) == options


@given(
    st.builds(
        LoadSpec,
        context_length=st.none() | st.integers(8, 1 << 24),
        rows_max=st.none() | st.integers(1, 256),
        weights=st.sampled_from(Weights),
        sampling=SAMPLING,
        keep_alive_s=st.none() | st.integers(0, 10**6).map(float) | st.just(math.inf),
        pinned=st.none() | st.booleans(),
        kv_format=st.none() | st.sampled_from(KVFormat),
        prefix_cache_nbytes=st.none() | st.integers(0, 1 << 50),
    )
)
def test_load_options_survive_the_wire(spec: LoadSpec) -> None:
    """What one side says of a load, the other side reads."""
    assert load_from_pb(write(spec, types_pb2.LoadOptions)) == spec


@given(st.integers(0, 10**15))
def test_a_duration_survives_the_wire(microseconds: int) -> None:
    """To the microsecond at least, for thirty years."""
    seconds = microseconds / 1e6

    assert duration_from_pb(duration_to_pb(seconds)) == pytest.approx(seconds, abs=1e-6)


@pytest.mark.parametrize(
    ("pb", "seconds"),
    [
        (Duration(), 0.0),
        (Duration(seconds=-1), math.inf),
        (Duration(nanos=-1), math.inf),
        (duration_to_pb(math.inf), math.inf),
    ],
)
def test_a_negative_duration_is_for_ever(pb: Duration, seconds: float) -> None:
    """And zero is zero."""
    assert duration_from_pb(pb) == seconds


def test_for_ever_is_not_shared() -> None:
    """A caller that changes the message it got changes nobody else's."""
    duration_to_pb(math.inf).seconds = 5

    assert duration_to_pb(math.inf).seconds == -1


def test_a_moment_survives_the_wire() -> None:
    """In UTC, to the microsecond."""
    moment = dt.datetime(2026, 2, 3, 4, 5, 6, 789012, tzinfo=dt.UTC)

    assert timestamp_from_pb(timestamp_to_pb(moment.timestamp())) == moment


def test_the_enums_match() -> None:
    """Every reason and every format of the wire, but the unspecified reason, has its twin."""
    assert set(FINISH_TO_PB) == set(FinishReason)
    assert set(FINISH_FROM_PB) == set(types_pb2.FinishReason.values()) - {0}
    assert set(WEIGHTS_TO_PB) == set(Weights)
    assert set(WEIGHTS_FROM_PB) == set(types_pb2.WeightsFormat.values())


def test_absent_values_are_taken_in_order() -> None:
    """The request, then the load, then the defaults; zero is a value and not absent."""
    request = SamplingOptions(temperature=0.0)
    load = SamplingOptions(temperature=0.5, top_k=7, logit_bias=((1, 2.0),))

    merged = merge(request, load, DEFAULTS)

    assert merged == replace(DEFAULTS, temperature=0.0, top_k=7, logit_bias=((1, 2.0),))


def test_resolve_turns_off_into_one_form() -> None:
    """top_k -1 and 0 become 0, top_p 0 becomes 1, and a seed is used only where none was given."""
    off = resolve(SamplingOptions(temperature=1.0, top_k=-1, top_p=0.0), seed=5)
    given_seed = resolve(SamplingOptions(seed=0), seed=5)

    assert off == Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=5)
    assert given_seed == Sampling(temperature=0.8, top_k=40, top_p=0.9, min_p=0.0, seed=0)


def test_ids_outside_the_vocabulary_are_named() -> None:
    """One violation a field for prompt and stop ids, one an id for the bias; all with the limit."""
    spec = GenerateSpec(
        model="m",
        prompt=(9, 10, 11),
        sampling=SamplingOptions(logit_bias=((10, 1.0), (9, 1.0))),
        stop_token_ids=(10, 12),
    )
    with pytest.raises(InvalidRequest) as caught:
        check_vocabulary(spec, 10)

    violations = caught.value.violations
    assert [v.field for v in violations] == [
        "sampling.logit_bias[10]",
        "stop_token_ids",
        "tokens.ids",
    ]
    assert all("the vocabulary has 10 tokens" in v.description for v in violations)
    check_vocabulary(GenerateSpec(model="m", prompt=(9,), stop_token_ids=(0,)), 10)


def test_what_is_given_is_in_force() -> None:
    """Each option by its name, and from whichever layer has it."""
    given_options = SamplingOptions(
        temperature=0.5,
        top_k=3,
        top_p=0.75,
        min_p=0.125,
        repetition_penalty=1.5,
        presence_penalty=0.25,
        frequency_penalty=0.375,
        repeat_last_n=7,
        xtc_probability=0.0625,
        xtc_threshold=0.3125,
        seed=9,
        logit_bias=((4, 2.0),),
    )
    assert {field.name: getattr(given_options, field.name) for field in fields(Sampling)} == {
        field.name: getattr(resolve(given_options, seed=5), field.name)
        for field in fields(Sampling)
    }
    assert merge(SamplingOptions(), given_options, DEFAULTS) == given_options


@pytest.mark.parametrize("kind", [Weights, KVFormat, FinishReason])
def test_words_are_those_of_the_wire(kind: type[enum.StrEnum]) -> None:
    """What the command line and logs say is the name on the wire, in small letters."""
    assert all(member.value == member.name.lower() for member in kind)
