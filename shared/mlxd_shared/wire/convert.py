"""Protobuf to domain and back: the one place where the wire's presence and defaults are read.

Every conversion from the wire validates: out of range is InvalidRequest (all fields at once), a
field that is not served is FieldNotServed. Range comes first, so that nonsense in an unserved field
is called nonsense.
"""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from itertools import chain
from typing import Any

from google.protobuf import json_format
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

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
    Sampling,
    SamplingOptions,
    Weights,
    load_violations,
    sampling_violations,
)
from mlxd_shared.wire.convert_bounds import (
    duration_violations,
    list_violations,
    name_violations,
)
from mlxd_shared.wire.convert_chat import chat_from_pb, chat_violations
from mlxd_shared.wire.convert_format import ending_violations, format_from_pb, format_violations
from mlxd_shared.wire.unserved import refuse_unserved

FINISH_TO_PB = {
    reason: types_pb2.FinishReason.Value(f"FINISH_REASON_{reason.name}") for reason in FinishReason
}
FINISH_FROM_PB = {number: reason for reason, number in FINISH_TO_PB.items()}
CACHE_REASON_TO_PB = {
    reason: types_pb2.CacheReason.Value(f"CACHE_REASON_{reason.name}") for reason in CacheReason
}
CACHE_REASON_FROM_PB = {number: reason for reason, number in CACHE_REASON_TO_PB.items()}
WEIGHTS_TO_PB = {
    weights: types_pb2.WEIGHTS_FORMAT_UNSPECIFIED
    if weights is Weights.AUTO
    else types_pb2.WeightsFormat.Value(f"WEIGHTS_FORMAT_{weights.name}")
    for weights in Weights
}
WEIGHTS_FROM_PB = {number: weights for weights, number in WEIGHTS_TO_PB.items()}
KV_FORMAT_TO_PB = {
    None: types_pb2.KV_FORMAT_UNSPECIFIED,
    KVFormat.MODEL: types_pb2.KV_FORMAT_MODEL,
    KVFormat.Q8: types_pb2.KV_FORMAT_Q8,
    KVFormat.Q4: types_pb2.KV_FORMAT_Q4,
}
KV_FORMAT_FROM_PB = {number: kv_format for kv_format, number in KV_FORMAT_TO_PB.items()}

_SCALARS = tuple(field.name for field in fields(SamplingOptions) if field.name != "logit_bias")
"""The sampling options of one value; the wire calls them as the domain does."""
_IDS_AT_ONCE = 1 << 16


def duration_to_pb(seconds: float) -> Duration:
    """Return `seconds`; infinity becomes -1 s, which the wire reads as for ever."""
    if math.isinf(seconds):  # a duration on the wire cannot be infinite
        return Duration(seconds=-1)
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration


def duration_from_pb(duration: Duration) -> float:
    """Return seconds; any negative duration is infinity. See `checked_duration_s`."""
    seconds = duration.ToNanoseconds() / 1e9
    return math.inf if seconds < 0 else seconds


def checked_duration_s(pb: Duration, field: str) -> float:
    """Return seconds; any negative duration is infinity.

    Raises:
        InvalidRequest: it is no duration.
    """
    broken = duration_violations(pb, field)
    if broken:
        raise InvalidRequest(tuple(broken))
    return duration_from_pb(pb)


def timestamp_from_pb(stamp: Timestamp) -> dt.datetime:
    """Return the moment, in UTC."""
    return stamp.ToDatetime(tzinfo=dt.UTC)


def sampling_from_pb(pb: types_pb2.SamplingOptions) -> SamplingOptions:
    """Return the values that were given, unchecked."""
    message: Any = pb
    scalars = {name: getattr(message, name) for name in _SCALARS if message.HasField(name)}
    return SamplingOptions(**scalars, logit_bias=tuple(sorted(pb.logit_bias.items())))


def sampling_to_pb(options: SamplingOptions | Sampling) -> types_pb2.SamplingOptions:
    """Return the values that are given; what is None stays absent."""
    scalars: dict[str, Any] = {name: getattr(options, name) for name in _SCALARS}
    return types_pb2.SamplingOptions(**scalars, logit_bias=dict(options.logit_bias))


def generate_from_pb(
    pb: inference_pb2.GenerateRequest, *, with_prompt: bool = True, is_checked: bool = False
) -> GenerateSpec:
    """Return the request, checked for everything that needs no model.

    Who only passes it on needs no copy of the prompt; it is empty where not `with_prompt`. Of one
    that `is_checked` by a controller only what that writes anew for a later worker is looked at.

    Raises:
        InvalidRequest: fields out of range, each with its limit.
        FieldNotServed: a field of a later version.
    """
    sampling = sampling_from_pb(pb.sampling)
    if is_checked:
        violations = _resume_violations(pb)
    else:
        violations = list_violations(pb) or _generate_violations(pb, sampling)
    if violations:
        raise InvalidRequest(tuple(violations))
    if not is_checked:
        refuse_unserved(pb)
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
    )


def _generate_violations(
    pb: inference_pb2.GenerateRequest, sampling: SamplingOptions
) -> list[FieldViolation]:
    violations = [
        *name_violations(pb.model),
        *_prompt_violations(pb),
        *sampling_violations(sampling, prefix="sampling"),
        *_logprob_violations(pb),
        *format_violations(pb.response_format),
        *ending_violations(pb),
        *_speculation_violations(pb.speculation),
        *_length_violations(pb),
        *_stop_violations(pb),
        *_resume_violations(pb),
        *_keep_alive_violations(pb.keep_alive, "keep_alive"),
        *duration_violations(pb.load_duration, "load_duration"),
        *duration_violations(pb.age, "age"),
    ]
    if len(pb.request_id) > config.REQUEST_ID_CHARS_MAX:
        limit = f"at most {config.REQUEST_ID_CHARS_MAX} characters"
        violations.append(FieldViolation("request_id", limit))
    return violations


def _prompt_violations(pb: inference_pb2.GenerateRequest) -> list[FieldViolation]:
    kind = pb.WhichOneof("prompt")
    if kind is None:
        return [FieldViolation("prompt", "one of text, tokens and chat is needed")]
    if kind == "chat":
        return chat_violations(pb.chat)
    length = len(pb.text) if kind == "text" else len(pb.tokens.ids)
    if not length:
        return [FieldViolation(kind, "the prompt is empty; at least one token is needed")]
    if kind == "text" and length > config.PROMPT_CHARS_MAX:
        return [FieldViolation("text", f"at most {config.PROMPT_CHARS_MAX} characters")]
    return []


def _prompt(pb: inference_pb2.GenerateRequest) -> str | tuple[int, ...] | Chat:
    match pb.WhichOneof("prompt"):
        case "chat":
            return chat_from_pb(pb.chat)
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


def _logprob_violations(pb: inference_pb2.GenerateRequest) -> list[FieldViolation]:
    if pb.top_logprobs > config.TOP_LOGPROBS_MAX:
        limit = f"{pb.top_logprobs} is outside [0, {config.TOP_LOGPROBS_MAX}]"
        return [FieldViolation("top_logprobs", limit)]
    if pb.top_logprobs and not pb.logprobs:
        return [FieldViolation("top_logprobs", "logprobs must be true where this is given")]
    return []


def _speculation_violations(pb: inference_pb2.SpeculationOptions) -> list[FieldViolation]:
    if pb.depth_max <= config.SPECULATION_DEPTH_MAX:
        return []
    limit = f"{pb.depth_max} is outside [0, {config.SPECULATION_DEPTH_MAX}]"
    return [FieldViolation("speculation.depth_max", limit)]


def load_from_pb(pb: types_pb2.LoadOptions) -> LoadSpec:
    """Return what a load fixes, checked.

    Raises:
        InvalidRequest: fields out of range.
        FieldNotServed: a field of a later version.
    """
    if len(pb.sampling.logit_bias) > config.LOGIT_BIAS_MAX:
        limit = f"at most {config.LOGIT_BIAS_MAX} ids"
        raise InvalidRequest.of("options.sampling.logit_bias", limit)
    spec = LoadSpec(
        context_length=pb.context_length if pb.HasField("context_length") else None,
        rows_max=pb.rows_max if pb.HasField("rows_max") else None,
        weights=WEIGHTS_FROM_PB.get(pb.weights, Weights.AUTO),
        sampling=sampling_from_pb(pb.sampling),
        pinned=pb.pinned if pb.HasField("pinned") else None,
        priority=pb.priority if pb.HasField("priority") else None,
        kv_format=KV_FORMAT_FROM_PB.get(pb.kv_format),
        prefix_cache_nbytes=pb.prefix_cache_bytes if pb.HasField("prefix_cache_bytes") else None,
    )
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
    refuse_unserved(pb, prefix="options.")
    if pb.HasField("keep_alive"):
        spec = replace(spec, keep_alive_s=duration_from_pb(pb.keep_alive))
    return spec


def load_to_pb(spec: LoadSpec) -> types_pb2.LoadOptions:
    """Return `spec` for the wire; what is None stays absent."""
    return types_pb2.LoadOptions(
        context_length=spec.context_length,
        rows_max=spec.rows_max,
        weights=WEIGHTS_TO_PB[spec.weights],
        sampling=sampling_to_pb(spec.sampling),
        keep_alive=None if spec.keep_alive_s is None else duration_to_pb(spec.keep_alive_s),
        pinned=spec.pinned,
        priority=spec.priority,
        kv_format=KV_FORMAT_TO_PB[spec.kv_format],
        prefix_cache_bytes=spec.prefix_cache_nbytes,
    )


def load_to_json(spec: LoadSpec) -> dict[str, object]:
    """Return `spec` as the JSON form of the wire's LoadOptions, for what is kept in files."""
    return json_format.MessageToDict(load_to_pb(spec))


def load_from_json(written: Mapping[str, object]) -> LoadSpec:
    """Return what `load_to_json` made, checked.

    Raises:
        ValueError: it is no LoadOptions.
        InvalidRequest, FieldNotServed: see `load_from_pb`.
    """
    try:
        pb = json_format.ParseDict(dict(written), types_pb2.LoadOptions())
    except json_format.ParseError as error:
        raise ValueError(str(error)) from error
    return load_from_pb(pb)
