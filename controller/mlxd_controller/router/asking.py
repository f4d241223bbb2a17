"""Requests of `vllm.grpc.engine` as mlxd's own. Pure.

Invariants:
- Every field is passed on, refused by its name, or listed in `WITHOUT_EFFECT` with the reason.
- What is out of range is left to mlxd's own checks, but for numbers that its messages cannot hold.
- A scalar of theirs without presence means, at 0, what its documentation says; see `_sampling`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from google.protobuf.message import Message

from mlxd.v1 import inference_pb2, types_pb2
from mlxd_shared import config
from mlxd_shared.domain.errors import FieldNotServed, InvalidRequest
from mlxd_shared.domain.requests import INT32, SEEDS

WITHOUT_EFFECT: Final[Mapping[str, str]] = MappingProxyType(
    {
        "TokenizedInput.original_text": "for reference: the ids beside it are the prompt",
        "SamplingParams.spaces_between_special_tokens": "is about text, and answers are ids",
        "SamplingParams.grammar_from_first_token": "constraints always begin there",
    }
)
"""The fields that change nothing, each with the reason, as MESSAGE.FIELD."""
REFUSED: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "GenerateRequest": (
            "kv_transfer_params",
            "kv_transfer_params_json",
            "mm_inputs",
            "extra_mm_inputs",
            "media_refs",
        ),
        "SamplingParams": (
            "include_stop_str_in_output",
            "truncate_prompt_tokens",
            "structural_tag",
        ),
    }
)
"""The fields that are refused wherever they are given, by their messages."""


def generate_of(pb: Any, *, model: str) -> inference_pb2.GenerateRequest:  # noqa: ANN401
    """Return a GenerateRequest as a request for `model`; its prompt's ids stay as they are.

    Raises:
        FieldNotServed: it has a field that is refused.
        InvalidRequest: a number that cannot be passed on.
    """
    refuse(pb)
    params = pb.sampling_params
    refuse(params)
    check_rank(pb, "data_parallel_rank")
    if params.n > config.CHOICES_MAX:  # before anything is made of each
        limit = f"{params.n} is above {config.CHOICES_MAX}"
        raise InvalidRequest.of("sampling_params.n", limit)
    made = inference_pb2.GenerateRequest(
        model=model,
        request_id=pb.request_id,
        sampling=_sampling(params),
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        skip_special_tokens=params.skip_special_tokens,
        min_tokens=params.min_tokens,
    )
    match pb.WhichOneof("input"):
        case "tokenized":
            made.tokens.ids.extend(pb.tokenized.input_ids)
        case "text":
            made.text = pb.text
    if params.n > 1:
        made.n = params.n
    if params.HasField("max_tokens"):
        made.max_tokens = _at_most(params.max_tokens, "max_tokens")
    if params.HasField("logprobs"):
        made.logprobs, made.top_logprobs = True, _count(params.logprobs, "logprobs")
    if params.HasField("prompt_logprobs"):
        made.prompt_logprobs = _count(params.prompt_logprobs, "prompt_logprobs")
    _constrain(made.response_format, params)
    return made


def refuse(pb: Message) -> None:
    """Raise FieldNotServed for the first field that is given and refused."""
    message = pb.DESCRIPTOR.name
    present = {field.name for field, _ in pb.ListFields()}
    for name in REFUSED.get(message, ()):
        if name in present:
            raise FieldNotServed(f"{message}.{name}")


def check_rank(pb: Any, field: str) -> None:  # noqa: ANN401
    """Refuse a rank of data parallelism other than the only one there is, 0."""
    if pb.HasField(field) and getattr(pb, field) != 0:
        raise InvalidRequest.of(field, f"{getattr(pb, field)}: there is one rank, 0")


def _sampling(params: Any) -> types_pb2.SamplingOptions:  # noqa: ANN401
    """Return how tokens are drawn; an absent temperature is the model's own.

    There 0 means off, of top_p and repetition_penalty too; penalties look at the whole context.
    """
    options = types_pb2.SamplingOptions(
        top_p=params.top_p or 1.0,
        top_k=_at_most(params.top_k, "top_k"),
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty or 1.0,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        repeat_last_n=-1,
    )
    if params.HasField("temperature"):
        options.temperature = params.temperature
    if params.HasField("seed"):
        options.seed = params.seed % SEEDS
    for token, bias in params.logit_bias.items():
        if token < 0:
            raise InvalidRequest.of("sampling_params.logit_bias", f"{token} is not a token id")
        options.logit_bias[token] = bias
    return options


def _constrain(made: inference_pb2.ResponseFormat, params: Any) -> None:  # noqa: ANN401
    match params.WhichOneof("constraint"):
        case "json_schema":
            made.json_schema = params.json_schema
        case "json_object" if params.json_object:
            made.json_object = True
        case "regex":
            made.regex = params.regex
        case "grammar":
            made.ebnf_grammar = params.grammar
        case "choice":
            made.choice.choices.extend(params.choice.choices)


def _at_most(value: int, name: str) -> int:
    if value > INT32[1]:
        raise InvalidRequest.of(f"sampling_params.{name}", f"{value} is above {INT32[1]}")
    return value


def _count(value: int, name: str) -> int:
    if value < 0:
        problem = f"{value}: all of the vocabulary's are not given; 0 and more are"
        raise InvalidRequest.of(f"sampling_params.{name}", problem)
    return value
