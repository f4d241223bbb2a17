"""The client's edge of the wire: requests to protobuf, answers to `messages`. No defaults here.

What a request's field cannot carry at all (a negative seed, a token id above 32 bits, half a
character) is refused here with the field's name; every other range is the server's to check.
"""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from mlxd import messages as m
from mlxd.v1 import inference_pb2, model_pb2, types_pb2
from mlxd_shared.config import DURATION_MAX_S
from mlxd_shared.domain.chats import Chat, chat_texts, half_character
from mlxd_shared.domain.errors import FieldViolation, InvalidRequest
from mlxd_shared.domain.formats import ResponseFormat
from mlxd_shared.domain.requests import KVFormat, LoadSpec, SamplingOptions, Weights
from mlxd_shared.wire.convert import (
    CACHE_REASON_FROM_PB,
    FINISH_FROM_PB,
    KV_FORMAT_FROM_PB,
    WEIGHTS_FROM_PB,
    duration_from_pb,
    duration_to_pb,
    load_to_pb,
    sampling_from_pb,
    sampling_to_pb,
    timestamp_from_pb,
)
from mlxd_shared.wire.convert_chat import chat_to_pb, part_from_pb
from mlxd_shared.wire.convert_format import format_texts, format_to_pb

Prompt = str | Sequence[int] | Chat
MODEL_STATES = {
    types_pb2.MODEL_STATE_UNLOADED: m.ModelState.UNLOADED,
    types_pb2.MODEL_STATE_QUEUED: m.ModelState.QUEUED,
    types_pb2.MODEL_STATE_LOADING: m.ModelState.LOADING,
    types_pb2.MODEL_STATE_READY: m.ModelState.READY,
    types_pb2.MODEL_STATE_DRAINING: m.ModelState.DRAINING,
    types_pb2.MODEL_STATE_UNLOADING: m.ModelState.UNLOADING,
    types_pb2.MODEL_STATE_FAILED: m.ModelState.FAILED,
}


@dataclass(frozen=True, slots=True)
class _Integer:
    """The integers that a wire type can carry."""

    low: int
    high: int

    def check(self, field: str, values: Iterable[int | None]) -> list[FieldViolation]:
        for value in values:
            if value is not None and not self.low <= value <= self.high:
                return [FieldViolation(field, f"{value} is outside [{self.low}, {self.high}]")]
        return []


_INT32 = _Integer(-(1 << 31), (1 << 31) - 1)
_UINT32 = _Integer(0, (1 << 32) - 1)
_UINT64 = _Integer(0, (1 << 64) - 1)


def _seconds(field: str, value: float | None) -> list[FieldViolation]:
    """Return what keeps `value` from being a duration on the wire; infinity is one: for ever."""
    if value is None or value == math.inf or abs(value) <= DURATION_MAX_S:
        return []
    return [FieldViolation(field, f"{value:g} s is outside [0, {DURATION_MAX_S:.0f}]")]


def _texts(field: str, *texts: str) -> list[FieldViolation]:
    """Return what keeps texts from being on the wire, which carries whole characters alone."""
    problems = filter(None, map(half_character, texts))
    return [FieldViolation(field, problem) for problem in problems][:1]


def _prompt_violations(prompt: Prompt) -> list[FieldViolation]:
    if isinstance(prompt, str):
        return _texts("text", prompt)
    if isinstance(prompt, Chat):
        return [bad for field, text in chat_texts(prompt) for bad in _texts(field, text)]
    return _UINT32.check("tokens.ids", prompt)


def text_to_pb(field: str, text: str) -> str:
    """Return a text that the wire can carry.

    Raises:
        InvalidRequest: it cannot; names `field`.
    """
    _refuse(*_texts(field, text))
    return text


def generate_to_pb(
    prompt: Prompt,
    *,
    model: str,
    sampling: SamplingOptions,
    max_tokens: int | None,
    stop: Sequence[str],
    stop_token_ids: Sequence[int],
    ignore_eos: bool | None,
    min_tokens: int | None,
    logprobs: int | None,
    speculation_depth: int | None,
    response_format: ResponseFormat | None,
    skip_special_tokens: bool | None,
    priority: int | None,
    keep_alive_s: float | None,
    request_id: str,
    resume: Sequence[int],
    migrate: bool | None,
) -> inference_pb2.GenerateRequest:
    """Return the request; what is None stays absent.

    logprobs: how many alternatives to ask for beside each token's log-probability.
    resume: the output so far of an interrupted stream.

    Raises:
        InvalidRequest: a number, or half a character, that its field cannot carry.
    """
    _refuse(
        *_prompt_violations(prompt),
        *_texts("model", model),
        *_texts("stop", *stop),
        *_INT32.check("max_tokens", (max_tokens,)),
        *_UINT32.check("stop_token_ids", stop_token_ids),
        *_UINT32.check("min_tokens", (min_tokens,)),
        *_UINT32.check("top_logprobs", (logprobs,)),
        *_UINT32.check("speculation.depth_max", (speculation_depth,)),
        *_sampling_violations(sampling, prefix="sampling"),
        *_texts(*format_texts(response_format)),
        *_INT32.check("priority", (priority,)),
        *_seconds("keep_alive", keep_alive_s),
        *_texts("request_id", request_id),
        *_UINT32.check("resume_token_ids", resume),
    )
    request = inference_pb2.GenerateRequest(
        model=model,
        sampling=sampling_to_pb(sampling),
        max_tokens=max_tokens,
        stop=stop,
        stop_token_ids=stop_token_ids,
        ignore_eos=ignore_eos,
        min_tokens=min_tokens,
        logprobs=None if logprobs is None else True,
        top_logprobs=logprobs,
        response_format=format_to_pb(response_format),
        skip_special_tokens=skip_special_tokens,
        priority=priority,
        keep_alive=None if keep_alive_s is None else duration_to_pb(keep_alive_s),
        request_id=request_id,
        resume_from=len(resume) or None,
        resume_token_ids=resume,
        migrate=migrate,
    )
    if speculation_depth is not None:
        request.speculation.depth_max = speculation_depth
    _set_prompt(request, prompt)
    return request


def _set_prompt(request: inference_pb2.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        request.text = prompt
    elif isinstance(prompt, Chat):
        request.chat.CopyFrom(chat_to_pb(prompt))
    else:
        request.tokens.ids.extend(prompt)
        request.tokens.SetInParent()  # an empty list is still a list of tokens


def load_request_to_pb(
    model: str, *, name: str, options: LoadSpec, validate_only: bool
) -> model_pb2.LoadModelRequest:
    """Return the request.

    Raises:
        InvalidRequest: a number, or half a character, that its field cannot carry.
    """
    _refuse(
        *_texts("model", model),
        *_texts("name", name),
        *_UINT32.check("options.context_length", (options.context_length,)),
        *_UINT32.check("options.rows_max", (options.rows_max,)),
        *_UINT64.check("options.prefix_cache_bytes", (options.prefix_cache_nbytes,)),
        *_INT32.check("options.priority", (options.priority,)),
        *_sampling_violations(options.sampling, prefix="options.sampling"),
        *_seconds("options.keep_alive", options.keep_alive_s),
    )
    return model_pb2.LoadModelRequest(
        model=model, name=name, options=load_to_pb(options), validate_only=validate_only
    )


def token_ids_to_pb(token_ids: Sequence[int]) -> Sequence[int]:
    """Return `token_ids`, each of which the wire can carry.

    Raises:
        InvalidRequest: one that it cannot.
    """
    _refuse(*_UINT32.check("token_ids", token_ids))
    return token_ids


def _sampling_violations(sampling: SamplingOptions, *, prefix: str) -> list[FieldViolation]:
    return [
        *_INT32.check(f"{prefix}.top_k", (sampling.top_k,)),
        *_UINT64.check(f"{prefix}.seed", (sampling.seed,)),
        *_UINT32.check(f"{prefix}.logit_bias", (token for token, _ in sampling.logit_bias)),
    ]


def _refuse(*violations: FieldViolation) -> None:
    if violations:
        raise InvalidRequest(violations)


def delta_from_pb(pb: inference_pb2.GenerateResponse) -> m.Delta:
    """Return the tokens and the text of one message."""
    return m.Delta(
        offset=pb.offset,
        text=pb.text,
        token_ids=tuple(pb.token_ids),
        logprobs=tuple(map(_position_from_pb, pb.logprobs)),
        parts=tuple(map(part_from_pb, pb.parts)),
        seed=pb.seed if pb.HasField("seed") else None,
    )


def _position_from_pb(pb: inference_pb2.PositionLogprobs) -> m.PositionLogprobs:
    return m.PositionLogprobs(_logprob_from_pb(pb.chosen), tuple(map(_logprob_from_pb, pb.top)))


def _logprob_from_pb(pb: inference_pb2.TokenLogprob) -> m.TokenLogprob:
    return m.TokenLogprob(pb.token_id, pb.logprob, pb.text_bytes)


def finished_from_pb(
    pb: inference_pb2.GenerateResponse, *, request_id: str, model_digest: str, calls: m.Calls
) -> m.Finished:
    """Return the end of a stream that took `calls`; `pb` carries finish and usage."""
    matched: str | int | None = None
    if pb.finish.HasField("stop_string"):
        matched = pb.finish.stop_string
    elif pb.finish.HasField("stop_token_id"):
        matched = pb.finish.stop_token_id
    return m.Finished(
        reason=FINISH_FROM_PB[pb.finish.reason],
        matched=matched,
        usage=_usage_from_pb(pb.usage, calls),
        request_id=request_id,
        model_digest=model_digest,
    )


def _usage_from_pb(pb: types_pb2.Usage, calls: m.Calls) -> m.Usage:
    return m.Usage(
        prompt_tokens=pb.prompt_tokens,
        cached_tokens=pb.cached_tokens,
        completion_tokens=pb.completion_tokens,
        total_tokens=pb.total_tokens,
        queue_s=duration_from_pb(pb.queue_duration),
        load_s=duration_from_pb(pb.load_duration),
        prompt_s=duration_from_pb(pb.prompt_duration),
        completion_s=duration_from_pb(pb.completion_duration),
        seed=pb.seed,
        migrations=pb.migrations,
        near_ties=pb.near_ties,
        cache_reason=CACHE_REASON_FROM_PB.get(pb.cache_reason),
        drafted_tokens=pb.drafted_tokens,
        accepted_draft_tokens=pb.accepted_draft_tokens,
        calls=calls,
    )


def progress_from_pb(pb: types_pb2.LoadProgress) -> m.LoadProgress:
    """Return how far a load has come."""
    return m.LoadProgress(pb.bytes_read, pb.bytes_total, pb.stage)


def weights_from_pb(number: types_pb2.WeightsFormat.ValueType) -> Weights:
    """Return the format; AUTO for one that this client does not know."""
    return WEIGHTS_FROM_PB.get(number, Weights.AUTO)


def kv_format_from_pb(number: types_pb2.KvFormat.ValueType) -> KVFormat | None:
    """Return the format; None where none is in force, or for one that this client does not know."""
    return KV_FORMAT_FROM_PB.get(number)


def state_from_pb(number: types_pb2.ModelState.ValueType) -> m.ModelState:
    """Return the state; UNKNOWN for one that this client does not know."""
    return MODEL_STATES.get(number, m.ModelState.UNKNOWN)


def moment_from_pb(stamp: Timestamp) -> dt.datetime | None:
    """Return the moment; None for an absent one, which reads as the epoch."""
    return timestamp_from_pb(stamp) if stamp.ToNanoseconds() else None


def model_from_pb(pb: types_pb2.Model) -> m.Model:
    """Return the model."""
    return m.Model(
        name=pb.name,
        aliases=tuple(pb.aliases),
        digest=pb.digest,
        path=pb.path,
        architecture=pb.architecture,
        state=state_from_pb(pb.state),
        progress=progress_from_pb(pb.progress),
        error=pb.error,
        context_length_max=pb.context_length_max,
        context_length=pb.context_length,
        vocab_size=pb.vocab_size,
        stored_nbytes=pb.stored_bytes,
        resident_nbytes=pb.resident_bytes,
        device=pb.device,
        weights=weights_from_pb(pb.weights),
        rows_max=pb.rows_max,
        effective_sampling=sampling_from_pb(pb.effective_sampling),
        streams_active=pb.streams_active,
        pinned=pb.pinned,
        priority=pb.priority,
        last_used_time=moment_from_pb(pb.last_used_time),
        expire_time=moment_from_pb(pb.expire_time),
        worker_incarnation=pb.worker_incarnation,
        kv_format=kv_format_from_pb(pb.kv_format),
        prefix_cache_nbytes=pb.prefix_cache_bytes,
        store=pb.store,
    )


def fit_from_pb(pb: types_pb2.FitReport) -> m.FitReport:
    """Return the report."""
    return m.FitReport(
        model=pb.model,
        model_digest=pb.model_digest,
        fits_now=pb.fits_now,
        fits_ever=pb.fits_ever,
        terms=tuple(m.FitTerm(term.name, term.bytes, term.note) for term in pb.terms),
        need_nbytes=pb.need_bytes,
        budget_nbytes=pb.budget_bytes,
        available_nbytes=pb.available_bytes,
        reserve_nbytes=pb.reserve_bytes,
        device=pb.device,
        weights=weights_from_pb(pb.weights),
        context_length=pb.context_length,
        rows_max=pb.rows_max,
        would_evict=tuple(pb.would_evict),
        suggestions=tuple(pb.suggestions),
        kv_format=kv_format_from_pb(pb.kv_format),
        prefix_cache_nbytes=pb.prefix_cache_bytes,
    )


def load_update_from_pb(pb: model_pb2.LoadModelResponse) -> m.LoadUpdate:
    """Return one step of a load."""
    fit = fit_from_pb(pb.fit) if pb.HasField("fit") else None
    return m.LoadUpdate(model_from_pb(pb.model), fit)


def seconds_to_pb(field: str, seconds: float | None) -> Duration | None:
    """Return the duration, or None to leave it absent.

    Raises:
        InvalidRequest: it cannot be a duration; names `field`.
    """
    _refuse(*_seconds(field, seconds))
    return None if seconds is None else duration_to_pb(seconds)
