"""Protobuf to domain and back: the one place where the wire's presence and defaults are read.

Every conversion from the wire validates: out of range is InvalidRequest, all fields at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain

from google.protobuf import json_format
from google.protobuf.duration_pb2 import Duration

from mlxd.v1 import inference_pb2, types_pb2
from mlxd_shared import config
from mlxd_shared.domain.cache_reasons import CacheReason
from mlxd_shared.domain.chats import Chat
from mlxd_shared.domain.errors import FieldViolation, InvalidRequest
from mlxd_shared.domain.requests import (
    FinishReason,
    GenerateSpec,
    KVFormat,
    LoadSpec,
    SamplingOptions,
    Weights,
    check_range,
    load_violations,
    sampling_violations,
)
from mlxd_shared.wire.convert_bounds import check_count, duration_violations, list_violations
from mlxd_shared.wire.convert_chat import chat_violations, required_violations
from mlxd_shared.wire.convert_format import ending_violations, format_from_pb, format_violations
from mlxd_shared.wire.records import UNSAID, duration_from_pb, map_numbers, read, write

FINISH_TO_PB = map_numbers(FinishReason, types_pb2.FinishReason.Value, "FINISH_REASON_")
FINISH_FROM_PB = {number: reason for reason, number in FINISH_TO_PB.items()}
CACHE_REASON_TO_PB = map_numbers(CacheReason, types_pb2.CacheReason.Value, "CACHE_REASON_")
WEIGHTS_TO_PB = map_numbers(Weights, types_pb2.WeightsFormat.Value, "WEIGHTS_FORMAT_")
WEIGHTS_FROM_PB = {number: weights for weights, number in WEIGHTS_TO_PB.items()}
KV_FORMAT_TO_PB = {
    kv_format: types_pb2.KvFormat.Value(f"KV_FORMAT_{kv_format.name if kv_format else UNSAID}")
    for kv_format in (None, *KVFormat)
}
KV_FORMAT_FROM_PB = {number: kv_format for kv_format, number in KV_FORMAT_TO_PB.items()}
_IDS_AT_ONCE = 1 << 16


def checked_duration_s(pb: Duration, field: str) -> float:
    """Return seconds; any negative duration is infinity.

    Raises:
        InvalidRequest: it is no duration.
    """
    broken = duration_violations(pb, field)
    if broken:
        raise InvalidRequest(tuple(broken))
    return duration_from_pb(pb)


def generate_from_pb(
    pb: inference_pb2.GenerateRequest, *, with_prompt: bool = True, is_checked: bool = False
) -> GenerateSpec:
    """Return the request, checked for everything that needs no model.

    Who only passes it on needs no copy of the prompt; it is empty where not `with_prompt`. Of one
    that `is_checked` by a controller only what that writes anew for a later worker is looked at.

    Raises:
        InvalidRequest: fields out of range, each with its limit.
    """
    sampling = read(SamplingOptions, pb.sampling)
    if is_checked:
        violations = _resume_violations(pb)
    else:
        violations = list_violations(pb) or _generate_violations(pb, sampling)
    if violations:
        raise InvalidRequest(tuple(violations))
    return GenerateSpec(
        model=pb.model,
        prompt=_prompt(pb) if with_prompt else "",
        sampling=sampling,
        max_tokens=_max_tokens(pb),
        stop=tuple(pb.stop),
        stop_token_ids=tuple(pb.stop_token_ids),
        ignore_eos=pb.ignore_eos,
        min_tokens=pb.min_tokens,
        top_logprobs=pb.top_logprobs if pb.logprobs else None,
        echo=pb.echo,
        prompt_logprobs=pb.prompt_logprobs if pb.HasField("prompt_logprobs") else None,
        response_format=format_from_pb(pb.response_format),
        priority=pb.priority,
        speculation_depth=(
            pb.speculation.depth_max if pb.speculation.HasField("depth_max") else None
        ),
        skip_special_tokens=not pb.HasField("skip_special_tokens") or pb.skip_special_tokens,
        keep_alive_s=duration_from_pb(pb.keep_alive) if pb.HasField("keep_alive") else None,
        request_id=pb.request_id,
        worker_incarnation=pb.worker_incarnation,
        load_s=duration_from_pb(pb.load_duration),
        age_s=duration_from_pb(pb.age),
        resumed=_ids(pb.resume_token_ids),
        migrate=not pb.HasField("migrate") or pb.migrate,
        choices=pb.n if pb.HasField("n") else 1,
        choice=pb.choice,
    )


def _generate_violations(
    pb: inference_pb2.GenerateRequest, sampling: SamplingOptions
) -> list[FieldViolation]:
    return [
        *check_count("model", len(pb.model), config.MODEL_NAME_CHARS_MAX, "characters"),
        *_prompt_violations(pb),
        *sampling_violations(sampling, prefix="sampling"),
        *_logprob_violations(pb),
        *check_range("prompt_logprobs", pb.prompt_logprobs, 0, config.TOP_LOGPROBS_MAX),
        *format_violations(pb.response_format),
        *ending_violations(pb),
        *required_violations(pb),
        *check_range(
            "speculation.depth_max", pb.speculation.depth_max, 0, config.SPECULATION_DEPTH_MAX
        ),
        *_length_violations(pb),
        *_stop_violations(pb),
        *_resume_violations(pb),
        *_choice_violations(pb),
        *_keep_alive_violations(pb.keep_alive, "keep_alive"),
        *duration_violations(pb.load_duration, "load_duration"),
        *duration_violations(pb.age, "age"),
        *_id_violations(pb),
    ]


def _id_violations(pb: inference_pb2.GenerateRequest) -> list[FieldViolation]:
    """Return what is wrong with the id; further choices have their number appended to it."""
    most, length = config.REQUEST_ID_CHARS_MAX, len(pb.request_id)
    if pb.n > 1:
        most -= config.CHOICE_ID_CHARS
        return check_count("request_id", length, most, "characters with n above 1")
    return check_count("request_id", length, most, "characters")


def _prompt_violations(pb: inference_pb2.GenerateRequest) -> list[FieldViolation]:
    kind = pb.WhichOneof("prompt")
    if kind is None:
        return [FieldViolation("prompt", "one of text, tokens and chat is needed")]
    if kind == "chat":
        return chat_violations(pb.chat)
    length = len(pb.text) if kind == "text" else len(pb.tokens.ids)
    if not length:
        return [FieldViolation(kind, "the prompt is empty; at least one token is needed")]
    return check_count("text", len(pb.text), config.PROMPT_CHARS_MAX, "characters")


def _prompt(pb: inference_pb2.GenerateRequest) -> str | tuple[int, ...] | Chat:
    match pb.WhichOneof("prompt"):
        case "chat":
            return read(Chat, pb.chat)
        case "text":
            return pb.text
        case _:
            return _ids(pb.tokens.ids)


def _ids(ids: Sequence[int]) -> tuple[int, ...]:
    """Return ids as Python's own, a piece at a time: others' turns come in between."""
    pieces = (ids[at : at + _IDS_AT_ONCE] for at in range(0, len(ids), _IDS_AT_ONCE))
    return tuple(chain.from_iterable(pieces))


def _length_violations(pb: inference_pb2.GenerateRequest) -> list[FieldViolation]:
    violations: list[FieldViolation] = []
    if pb.HasField("max_tokens") and pb.max_tokens < 1:
        violations.append(FieldViolation("max_tokens", f"{pb.max_tokens} is below 1"))
    if pb.HasField("max_tokens") and pb.HasField("num_predict"):
        violations.append(FieldViolation("num_predict", "an alias of max_tokens: give only one"))
    most = _max_tokens(pb)
    if not violations and most is not None and pb.min_tokens > most:
        limit = f"{pb.min_tokens} is above the {most} tokens that are generated at most"
        violations.append(FieldViolation("min_tokens", limit))
    return violations


def _keep_alive_violations(pb: Duration, field: str) -> list[FieldViolation]:
    broken = duration_violations(pb, field)
    if broken:
        return broken
    seconds = duration_from_pb(pb)
    if seconds <= config.DURATION_MAX_S or math.isinf(seconds):
        return []
    most = f"{config.DURATION_MAX_S:.0f} s; negative is for ever"
    return [FieldViolation(field, f"{seconds:g} s is above {most}")]


def _max_tokens(pb: inference_pb2.GenerateRequest) -> int | None:
    if pb.HasField("max_tokens"):
        return pb.max_tokens
    return pb.num_predict if pb.num_predict > 0 else None


def _stop_violations(pb: inference_pb2.GenerateRequest) -> list[FieldViolation]:
    for index, text in enumerate(pb.stop):
        if not 1 <= len(text) <= config.STOP_STRING_CHARS_MAX:
            limit = f"1 to {config.STOP_STRING_CHARS_MAX} characters, this one has {len(text)}"
            return [FieldViolation(f"stop[{index}]", limit)]
    return []


def _resume_violations(pb: inference_pb2.GenerateRequest) -> list[FieldViolation]:
    count = len(pb.resume_token_ids)
    if pb.resume_from != count:
        limit = f"{pb.resume_from} tokens come before it, but resume_token_ids has {count}"
        return [FieldViolation("resume_from", limit)]
    most = _max_tokens(pb)
    if most is not None and count >= most:
        limit = f"{count} is not below the {most} tokens that are generated at most"
        return [FieldViolation("resume_from", limit)] if count else []
    return []


def _choice_violations(pb: inference_pb2.GenerateRequest) -> list[FieldViolation]:
    if not pb.HasField("n"):
        return []
    violations = check_range("n", pb.n, 1, config.CHOICES_MAX)
    if pb.n > 1 and pb.resume_from:
        violations.append(FieldViolation("resume_from", "not with n above 1"))
    return violations


def _logprob_violations(pb: inference_pb2.GenerateRequest) -> list[FieldViolation]:
    if 0 < pb.top_logprobs <= config.TOP_LOGPROBS_MAX and not pb.logprobs:
        return [FieldViolation("top_logprobs", "logprobs must be true where this is given")]
    return check_range("top_logprobs", pb.top_logprobs, 0, config.TOP_LOGPROBS_MAX)


def load_from_pb(pb: types_pb2.LoadOptions) -> LoadSpec:
    """Return what a load fixes, checked.

    Raises:
        InvalidRequest: fields out of range.
    """
    if len(pb.sampling.logit_bias) > config.LOGIT_BIAS_MAX:
        limit = f"at most {config.LOGIT_BIAS_MAX} ids"
        raise InvalidRequest.of("options.sampling.logit_bias", limit)
    spec = read(LoadSpec, pb)
    spec = replace(spec, ranks=spec.ranks or None)
    violations = [
        *sampling_violations(spec.sampling, prefix="options.sampling"),
        *_keep_alive_violations(pb.keep_alive, "options.keep_alive"),
        *load_violations(spec, prefix="options"),
    ]
    if pb.weights not in WEIGHTS_FROM_PB:
        violations.append(FieldViolation("options.weights", f"{pb.weights} is not a WeightsFormat"))
    if pb.kv_format not in KV_FORMAT_FROM_PB:
        violations.append(FieldViolation("options.kv_format", f"{pb.kv_format} is not a KvFormat"))
    if violations:
        raise InvalidRequest(tuple(violations))
    return spec


def load_to_json(spec: LoadSpec) -> dict[str, object]:
    """Return `spec` as the JSON form of the wire's LoadOptions, for what is kept in files."""
    return json_format.MessageToDict(write(spec, types_pb2.LoadOptions))


def load_from_json(written: Mapping[str, object]) -> LoadSpec:
    """Return what `load_to_json` made, checked.

    Raises:
        ValueError: it is no LoadOptions.
        InvalidRequest: see `load_from_pb`.
    """
    try:
        pb = json_format.ParseDict(dict(written), types_pb2.LoadOptions())
    except json_format.ParseError as error:
        raise ValueError(str(error)) from error
    return load_from_pb(pb)
