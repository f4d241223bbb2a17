"""The client's edge of the wire: requests to protobuf. No defaults here.

What a request's field cannot carry at all (a negative seed, a token id above 32 bits, half a
character) is refused here with the field's name; every other range is the server's to check.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TypedDict

from google.protobuf.duration_pb2 import Duration

from mlxd.v1 import inference_pb2, model_pb2, score_pb2, types_pb2
from mlxd_shared.config import DURATION_MAX_S
from mlxd_shared.domain.chats import Chat, chat_texts, half_character
from mlxd_shared.domain.errors import FieldViolation, InvalidRequest
from mlxd_shared.domain.formats import ResponseFormat
from mlxd_shared.domain.requests import (
    INT32,
    UINT32,
    UINT64,
    LoadSpec,
    Pooling,
    Reranking,
    SamplingOptions,
    ScoredText,
    check_range,
)
from mlxd_shared.wire.convert_embed import POOLING_TO_PB
from mlxd_shared.wire.convert_format import format_texts, format_to_pb
from mlxd_shared.wire.records import duration_to_pb, write

Prompt = str | Sequence[int] | Chat


def _ids(field: str, ids: Iterable[int]) -> list[FieldViolation]:
    """Return what is wrong with the first invalid id."""
    low, high = UINT32
    bad = next((each for each in ids if not low <= each <= high), None)
    return check_range(field, bad, low, high)


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
    return _ids("tokens.ids", prompt)


def text_to_pb(field: str, text: str) -> str:
    """Return a text that the wire can carry.

    Raises:
        InvalidRequest: it cannot; names `field`.
    """
    _refuse(*_texts(field, text))
    return text


class GenerateOptions(TypedDict, total=False):
    """What may be said of one completion, see `Client.generate`; None is as good as absent."""

    model: str
    sampling: SamplingOptions
    max_tokens: int | None
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool | None
    min_tokens: int | None
    logprobs: int | None
    """How many alternatives to ask for beside each token's log-probability."""
    speculation_depth: int | None
    response_format: ResponseFormat | None
    skip_special_tokens: bool | None
    priority: int | None
    keep_alive_s: float | None
    request_id: str
    migrate: bool | None
    resume: Sequence[int]
    """The output so far of an interrupted stream."""
    n: int | None
    """How many completions of the prompt to make."""
    echo: bool | None
    prompt_logprobs: int | None
    """How many alternatives to ask for beside the log-probability of each prompt token."""


class ScoreOptions(TypedDict, total=False):
    """What may be said of scores, see `Client.scores`; None is as good as absent."""

    model: str
    parse_special_tokens: bool | None
    reranking: Reranking | None
    """What is asked of each text, a document then."""


class EmbedOptions(TypedDict, total=False):
    """What may be said of embeddings, see `Client.embeddings`; None is as good as absent."""

    model: str
    dimensions: int | None
    pooling: Pooling | None
    normalize: bool | None


def generate_to_pb(
    prompt: Prompt,
    *,
    model: str = "",
    sampling: SamplingOptions = SamplingOptions(),  # noqa: B008 - frozen
    max_tokens: int | None = None,
    stop: Sequence[str] = (),
    stop_token_ids: Sequence[int] = (),
    ignore_eos: bool | None = None,
    min_tokens: int | None = None,
    logprobs: int | None = None,
    speculation_depth: int | None = None,
    response_format: ResponseFormat | None = None,
    skip_special_tokens: bool | None = None,
    priority: int | None = None,
    keep_alive_s: float | None = None,
    request_id: str = "",
    migrate: bool | None = None,
    resume: Sequence[int] = (),
    n: int | None = None,
    echo: bool | None = None,
    prompt_logprobs: int | None = None,
) -> inference_pb2.GenerateRequest:
    """Return the request; what is None stays absent.

    Raises:
        InvalidRequest: a number, or half a character, that its field cannot carry.
    """
    _refuse(
        *_prompt_violations(prompt),
        *_texts("model", model),
        *_texts("stop", *stop),
        *check_range("max_tokens", max_tokens, *INT32),
        *_ids("stop_token_ids", stop_token_ids),
        *check_range("min_tokens", min_tokens, *UINT32),
        *check_range("top_logprobs", logprobs, *UINT32),
        *check_range("speculation.depth_max", speculation_depth, *UINT32),
        *_sampling_violations(sampling, prefix="sampling"),
        *_texts(*format_texts(response_format)),
        *check_range("priority", priority, *INT32),
        *_seconds("keep_alive", keep_alive_s),
        *_texts("request_id", request_id),
        *_ids("resume_token_ids", resume),
        *check_range("n", n, *UINT32),
        *check_range("prompt_logprobs", prompt_logprobs, *UINT32),
    )
    request = inference_pb2.GenerateRequest(
        model=model,
        sampling=write(sampling, types_pb2.SamplingOptions),
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
        n=n,
        echo=echo,
        prompt_logprobs=prompt_logprobs,
        speculation=_speculation_to_pb(speculation_depth),
    )
    return _with_prompt(request, prompt)


def _speculation_to_pb(depth_max: int | None) -> inference_pb2.SpeculationOptions | None:
    return None if depth_max is None else inference_pb2.SpeculationOptions(depth_max=depth_max)


def _with_prompt(
    request: inference_pb2.GenerateRequest, prompt: Prompt
) -> inference_pb2.GenerateRequest:
    if isinstance(prompt, str):
        request.text = prompt
    elif isinstance(prompt, Chat):
        request.chat.CopyFrom(write(prompt, inference_pb2.ChatPrompt))
    else:
        request.tokens.ids.extend(prompt)
        request.tokens.SetInParent()  # an empty list is still a list of tokens
    return request


def score_to_pb(
    texts: Sequence[ScoredText],
    *,
    model: str = "",
    parse_special_tokens: bool | None = None,
    reranking: Reranking | None = None,
) -> score_pb2.ScoreRequest:
    """Return the request; what is None stays absent.

    Raises:
        InvalidRequest: half a character in a text.
    """
    _refuse(
        *_texts("model", model),
        *(
            bad
            for index, each in enumerate(texts)
            for bad in _texts(f"texts[{index}]", each.text, *each.continuations)
        ),
        *([] if reranking is None else _reranking_violations(reranking)),
    )
    return score_pb2.ScoreRequest(
        model=model,
        texts=[write(each, score_pb2.ScoredText) for each in texts],
        parse_special_tokens=parse_special_tokens,
        reranking=None if reranking is None else write(reranking, score_pb2.Reranking),
    )


def embed_to_pb(
    texts: Sequence[str],
    *,
    model: str = "",
    dimensions: int | None = None,
    pooling: Pooling | None = None,
    normalize: bool | None = None,
) -> inference_pb2.EmbedRequest:
    """Return the request; what is None stays absent.

    Raises:
        InvalidRequest: half a character in a text, or dimensions that no field of 32 bits has.
    """
    return inference_pb2.EmbedRequest(
        model=text_to_pb("model", model),
        texts=[text_to_pb("texts", text) for text in texts],
        dimensions=whole_to_pb("dimensions", dimensions),
        pooling=POOLING_TO_PB[pooling],
        normalize=normalize,
    )


def _reranking_violations(reranking: Reranking) -> list[FieldViolation]:
    return [
        *_texts("reranking.query", reranking.query),
        *_texts("reranking.instruction", reranking.instruction),
    ]


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
        *check_range("options.context_length", options.context_length, *UINT32),
        *check_range("options.rows_max", options.rows_max, *UINT32),
        *check_range("options.prefix_cache_bytes", options.prefix_cache_nbytes, *UINT64),
        *check_range("options.priority", options.priority, *INT32),
        *_sampling_violations(options.sampling, prefix="options.sampling"),
        *_seconds("options.keep_alive", options.keep_alive_s),
    )
    return model_pb2.LoadModelRequest(
        model=model,
        name=name,
        options=write(options, types_pb2.LoadOptions),
        validate_only=validate_only,
    )


def pull_request_to_pb(model: str, include: Sequence[str]) -> model_pb2.PullModelRequest:
    """Return the request.

    Raises:
        InvalidRequest: half a character, which no field can carry.
    """
    _refuse(*_texts("model", model), *_texts("include", *include))
    return model_pb2.PullModelRequest(model=model, include=include)


def detokenize_request_to_pb(
    token_ids: Sequence[int], *, model: str, skip_special_tokens: bool | None
) -> inference_pb2.DetokenizeRequest:
    """Return the request.

    Raises:
        InvalidRequest: an id, or half a character, that its field cannot carry.
    """
    _refuse(*_texts("model", model), *_ids("token_ids", token_ids))
    return inference_pb2.DetokenizeRequest(
        model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens
    )


def whole_to_pb(field: str, value: int | None) -> int | None:
    """Return a number that a field of 32 bits without a sign can carry; None stays absent.

    Raises:
        InvalidRequest: it cannot; names `field`.
    """
    _refuse(*check_range(field, value, *UINT32))
    return value


def _sampling_violations(sampling: SamplingOptions, *, prefix: str) -> list[FieldViolation]:
    return [
        *check_range(f"{prefix}.top_k", sampling.top_k, *INT32),
        *check_range(f"{prefix}.seed", sampling.seed, *UINT64),
        *check_range(f"{prefix}.repeat_last_n", sampling.repeat_last_n, *INT32),
        *_ids(f"{prefix}.logit_bias", (token for token, _ in sampling.logit_bias)),
    ]


def _refuse(*violations: FieldViolation) -> None:
    if violations:
        raise InvalidRequest(violations)


def seconds_to_pb(field: str, seconds: float | None) -> Duration | None:
    """Return the duration, or None to leave it absent.

    Raises:
        InvalidRequest: it cannot be a duration; names `field`.
    """
    _refuse(*_seconds(field, seconds))
    return None if seconds is None else duration_to_pb(seconds)
