"""Requests of vllm.grpc.engine: a field is passed on, refused by name, or known to do nothing."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message_factory import GetMessageClass
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import common_pb2

from mlxd.v1 import inference_pb2, types_pb2
from mlxd_controller.router.asking import REFUSED, WITHOUT_EFFECT, generate_of
from mlxd_shared.domain.errors import FieldNotServed, InvalidRequest
from mlxd_shared.wire.convert import generate_from_pb

# What another test of a method asks for: there are no others.
ELSEWHERE: dict[str, set[str]] = {
    "EmbedRequest": {"request_id", "tokenized"},  # test_engine
    "AbortRequest": {"request_ids"},  # test_engine
    "GetLoadsRequest": {"dp_rank", "include"},  # test_engine
    "SubscribeKvEventsRequest": {
        "start_sequence_number",
        "load_records_before_first_batch",
    },  # test_engine
    "HealthCheckRequest": set(),
    "GetModelInfoRequest": set(),
    "GetServerInfoRequest": set(),
    "GetTokenizerRequest": set(),
    "FlushCacheRequest": {"timeout_s"},  # the method is refused
    "StartProfileRequest": {
        "output_dir", "start_step", "num_steps", "activities", "with_stack", "record_shapes",
        "profile_by_stage",
    },  # the method is refused
    "StopProfileRequest": set(),
}  # fmt: skip


def full() -> Any:
    """Return a request whose fields all say something other than by themselves."""
    return pb.GenerateRequest(
        request_id="r",
        tokenized=pb.TokenizedInput(input_ids=[1, 2]),
        stream=True,
        sampling_params=pb.SamplingParams(
            temperature=0.5, top_p=0.5, top_k=3, min_p=0.25, frequency_penalty=1.0,
            presence_penalty=2.0, repetition_penalty=1.5, max_tokens=9, min_tokens=2,
            stop=["x"], stop_token_ids=[7], skip_special_tokens=True, n=3, logprobs=2,
            prompt_logprobs=1, seed=-1, logit_bias={5: -1.0},
        ),
    )  # fmt: skip


def only(message: str, field: FieldDescriptor) -> Any:
    """Return a request in which, of this message, one field says something."""
    value: Any = {
        FieldDescriptor.TYPE_STRING: "a",
        FieldDescriptor.TYPE_BOOL: True,
        FieldDescriptor.TYPE_FLOAT: 0.5,
    }.get(field.type, 2)
    if field.message_type is not None:
        value = GetMessageClass(field.message_type)()
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        value = {1: 1.0}
    elif field.is_repeated:
        value = [value]
    request = pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[1]))
    target = {
        "GenerateRequest": request,
        "SamplingParams": request.sampling_params,
        "TokenizedInput": request.tokenized,
        "ChoiceConstraint": request.sampling_params.choice,
    }[message]
    target.MergeFrom(type(target)(**{field.name: value}))
    return request


def cases() -> list[tuple[str, FieldDescriptor]]:
    """Return every field that a GenerateRequest has, but those of what is refused as a whole."""
    messages: list[Descriptor] = [
        pb.GenerateRequest.DESCRIPTOR,
        pb.SamplingParams.DESCRIPTOR,
        pb.TokenizedInput.DESCRIPTOR,
        pb.ChoiceConstraint.DESCRIPTOR,
    ]
    return [(each.name, field) for each in messages for field in each.fields]


@pytest.mark.parametrize(
    ("message", "field"), cases(), ids=[f"{message}.{field.name}" for message, field in cases()]
)
def test_a_field_is_passed_on_refused_or_known_to_do_nothing(
    message: str, field: FieldDescriptor
) -> None:
    """A new field of theirs fails here until somebody says which of the three it is."""
    name, request = f"{message}.{field.name}", only(message, field)
    plain = pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[1]))
    if message == "ChoiceConstraint":
        plain.sampling_params.choice.SetInParent()
    if field.name in REFUSED.get(message, ()):
        with pytest.raises(FieldNotServed, match=name):
            generate_of(request, model="m")
        return
    if name == "GenerateRequest.data_parallel_rank":
        with pytest.raises(InvalidRequest, match="one rank"):
            generate_of(request, model="m")
        return
    made = generate_of(request, model="m")
    # Whether answers are streamed is not the request's: test_answering.
    if name in (*WITHOUT_EFFECT, "GenerateRequest.stream"):
        assert made == generate_of(plain, model="m")
    elif name in ("GenerateRequest.sampling_params", "GenerateRequest.tokenized"):
        pass  # its fields are cases of their own
    else:
        assert made != generate_of(plain, model="m")


def test_no_message_of_a_request_is_left_out() -> None:
    """Every method's request is of a message whose fields are looked at."""
    service = pb.DESCRIPTOR.services_by_name["VllmEngine"]
    for method in service.methods:
        if method.name != "Generate":
            fields = {field.name for field in method.input_type.fields}
            assert fields == ELSEWHERE[method.input_type.name], method.name
    assert common_pb2.GetTokenizerRequest.DESCRIPTOR.fields == []


def test_a_full_request_means_the_same() -> None:
    """All that is passed on, in mlxd's words, and good by mlxd's own checks."""
    made = generate_of(full(), model="m")

    assert made == inference_pb2.GenerateRequest(
        model="m",
        request_id="r",
        tokens=inference_pb2.TokenIds(ids=[1, 2]),
        sampling=types_pb2.SamplingOptions(
            temperature=0.5, top_p=0.5, top_k=3, min_p=0.25, frequency_penalty=1.0,
            presence_penalty=2.0, repetition_penalty=1.5, repeat_last_n=-1,
            seed=(1 << 64) - 1, logit_bias={5: -1.0},
        ),
        max_tokens=9,
        min_tokens=2,
        stop=["x"],
        stop_token_ids=[7],
        ignore_eos=False,
        skip_special_tokens=True,
        n=3,
        logprobs=True,
        top_logprobs=2,
        prompt_logprobs=1,
    )  # fmt: skip
    assert generate_from_pb(made).choices == 3


def test_what_is_not_said_is_off_but_for_the_temperature() -> None:
    """A zero of theirs switches a cut off; only an absent temperature is the model's own."""
    sampling = generate_of(pb.GenerateRequest(text="once"), model="m").sampling

    assert not sampling.HasField("temperature")
    assert not sampling.HasField("seed")
    assert (sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 0, 0.0)
    assert (sampling.repetition_penalty, sampling.repeat_last_n) == (1.0, -1)


CONSTRAINTS = [
    ({"json_schema": "{}"}, {"json_schema": "{}"}),
    ({"json_object": True}, {"json_object": True}),
    ({"json_object": False}, {}),
    ({"regex": "a+"}, {"regex": "a+"}),
    ({"grammar": 'root ::= "a"'}, {"ebnf_grammar": 'root ::= "a"'}),
    ({"choice": {"choices": ["a", "b"]}}, {"choice": {"choices": ["a", "b"]}}),
]


@pytest.mark.parametrize(("theirs", "ours"), CONSTRAINTS)
def test_a_constraint_is_the_same_one(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    """Each kind that mlxd has."""
    request = pb.GenerateRequest(text="a", sampling_params=pb.SamplingParams(**theirs))
    assert generate_of(request, model="m").response_format == inference_pb2.ResponseFormat(**ours)


OUT_OF_RANGE = [
    ({"n": (1 << 32) - 1}, "n"),
    ({"max_tokens": 1 << 31}, "max_tokens"),
    ({"top_k": 1 << 31}, "top_k"),
    ({"logprobs": -1}, "logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"logit_bias": {-1: 1.0}}, "logit_bias"),
]


@pytest.mark.parametrize(("params", "field"), OUT_OF_RANGE)
def test_what_no_message_of_mlxd_holds_is_refused_by_name(
    params: dict[str, Any], field: str
) -> None:
    """Numbers that are no int32 here, negative counts, more choices than anybody may have."""
    request = pb.GenerateRequest(text="a", sampling_params=pb.SamplingParams(**params))
    with pytest.raises(InvalidRequest) as caught:
        generate_of(request, model="m")
    assert [each.field for each in caught.value.violations] == [f"sampling_params.{field}"]
