"""Requests as the domain sees them: frozen, validated, with every default written once.

Absent is None. `resolve` fills what is absent, in the order of the wire's contract: the request,
the options given at load, the model's generation_config.json, DEFAULTS.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from mlxd_shared.config import (
    CONTEXT_LENGTH_LIMIT,
    CONTEXT_LENGTH_MIN,
    PREFIX_CACHE_BYTES_LIMIT,
    ROWS_MAX_LIMIT,
)
from mlxd_shared.domain.chats import Chat
from mlxd_shared.domain.errors import FieldViolation, InvalidRequest
from mlxd_shared.domain.formats import ResponseFormat

SEED_LIMIT = 1 << 64
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """Sampling values that somebody gave; None where absent."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_last_n: int | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    seed: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling values in force.

    temperature 0 is greedy; top_k 0, top_p 1, min_p 0 and the penalties' defaults are off.
    repeat_last_n -1 looks at all tokens, 0 at none, which switches every penalty off.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    logit_bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repeat_last_n: int = 64
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1

    @property
    def penalises(self) -> bool:
        """Whether recent tokens change the logits."""
        off = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) == (1, 0, 0)
        return self.repeat_last_n != 0 and not off


DEFAULTS = SamplingOptions(
    temperature=0.8,
    top_k=40,
    top_p=0.9,
    min_p=0.0,
    repetition_penalty=1.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    repeat_last_n=64,
    xtc_probability=0.0,
    xtc_threshold=0.1,
)


class FinishReason(enum.Enum):
    """Why a stream ended; see types.proto."""

    EOS = "eos"
    STOP_STRING = "stop_string"
    STOP_TOKEN = "stop_token"  # noqa: S105 - a reason, not a secret
    LENGTH = "length"
    CONTEXT = "context"
    CANCELLED = "cancelled"


class Pooling(enum.Enum):
    """How the hidden states of a text's tokens become one vector."""

    LAST_TOKEN = "last_token"  # noqa: S105 - a place, not a secret
    MEAN = "mean"


class Weights(enum.Enum):
    """How weights live in memory; those from Q8 on are packed while they are loaded."""

    AUTO = "auto"
    STORED = "stored"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    Q8 = "q8"
    Q4 = "q4"
    MXFP8 = "mxfp8"
    MXFP4 = "mxfp4"
    NVFP4 = "nvfp4"


class KVFormat(enum.Enum):
    """How keys and values of layers that remember every position live; other caches keep theirs."""

    MODEL = "model"
    """As the model computes."""
    Q8 = "q8"
    """8 bits a value, and a scale and a bias a group."""
    Q4 = "q4"


@dataclass(frozen=True, slots=True)
class GenerateSpec:
    """One Generate, checked for everything that needs no model.

    `prompt` is text, token ids, or a conversation. `max_tokens` None means until the context is
    full. `keep_alive_s` None keeps what was said before; math.inf is for ever.
    """

    model: str
    prompt: str | tuple[int, ...] | Chat
    sampling: SamplingOptions = SamplingOptions()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    """No end of sequence, stop string or stop token before this many."""
    skip_special_tokens: bool = True
    top_logprobs: int | None = None
    """How many alternatives each token's log-probability comes with; None: no log-probabilities."""
    response_format: ResponseFormat | None = None
    priority: int = 0
    """Higher is served earlier."""
    speculation_depth: int | None = None
    """The most tokens guessed at once, 0 for none; None is left to the server."""
    keep_alive_s: float | None = None
    request_id: str = ""
    worker_incarnation: str = ""
    load_s: float = 0.0
    age_s: float = 0.0
    """How long ago the request came to the controller."""
    resumed: tuple[int, ...] = ()
    """The output so far, where an interrupted stream goes on."""
    migrate: bool = True
    """Whether the stream goes on with a new worker when its worker dies."""


@dataclass(frozen=True, slots=True)
class EmbedSpec:
    """Texts to turn into vectors, checked for everything that needs no model."""

    model: str
    texts: tuple[str, ...]
    pooling: Pooling | None = None
    """None: the model's own."""
    dimensions: int | None = None
    """How many of each vector's are wanted; None: all."""
    normalize: bool | None = None
    """None: as the model's files say."""
    worker_incarnation: str = ""


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """What a load fixes; None where the operator left it open."""

    context_length: int | None = None
    rows_max: int | None = None
    weights: Weights = Weights.AUTO
    sampling: SamplingOptions = SamplingOptions()
    keep_alive_s: float | None = None
    pinned: bool | None = None
    priority: int | None = None
    """Higher is evicted later; 0 where nobody says."""
    kv_format: KVFormat | None = None
    prefix_cache_nbytes: int | None = None
    """What snapshots of former prompts may take; 0 keeps none."""


@dataclass(frozen=True, slots=True)
class _Range:
    low: float
    high: float

    def check(self, name: str, value: float | None) -> list[FieldViolation]:
        if value is None or (math.isfinite(value) and self.low <= value <= self.high):
            return []
        return [FieldViolation(name, f"{value} is outside [{self.low:g}, {self.high:g}]")]


REPETITION_RANGE = _Range(0.0625, 10)
"""The least is exact in binary; a factor near 0 would make a logit infinite."""
LOGIT_BIAS_RANGE = _Range(-100, 100)


def sampling_violations(options: SamplingOptions, *, prefix: str) -> list[FieldViolation]:
    """Return what is out of range in `options`; `prefix` is the field that holds them."""
    violations = [
        *_Range(0, 100).check(f"{prefix}.temperature", options.temperature),
        *_Range(-1, (1 << 31) - 1).check(f"{prefix}.top_k", options.top_k),
        *_Range(0, 1).check(f"{prefix}.top_p", options.top_p),
        *_Range(0, 1).check(f"{prefix}.min_p", options.min_p),
        *REPETITION_RANGE.check(f"{prefix}.repetition_penalty", options.repetition_penalty),
        *_Range(-10, 10).check(f"{prefix}.presence_penalty", options.presence_penalty),
        *_Range(-10, 10).check(f"{prefix}.frequency_penalty", options.frequency_penalty),
        *_Range(-1, (1 << 31) - 1).check(f"{prefix}.repeat_last_n", options.repeat_last_n),
        *_Range(0, 1).check(f"{prefix}.xtc_probability", options.xtc_probability),
        *_Range(0, 0.5).check(f"{prefix}.xtc_threshold", options.xtc_threshold),
        *_Range(0, SEED_LIMIT - 1).check(f"{prefix}.seed", options.seed),
    ]
    for token_id, bias in options.logit_bias:
        broken = LOGIT_BIAS_RANGE.check(f"{prefix}.logit_bias[{token_id}]", bias)
        if broken:  # one of a list is enough
            return violations + broken
    return violations


def load_violations(spec: LoadSpec, *, prefix: str) -> list[FieldViolation]:
    """Return which sizes of a load are out of range; `prefix` is the field that holds them."""
    bounds = (
        ("context_length", spec.context_length, CONTEXT_LENGTH_MIN, CONTEXT_LENGTH_LIMIT),
        ("rows_max", spec.rows_max, 1, ROWS_MAX_LIMIT),
        ("prefix_cache_bytes", spec.prefix_cache_nbytes, 0, PREFIX_CACHE_BYTES_LIMIT),
    )
    return [
        FieldViolation(f"{prefix}.{name}", f"{value} is outside [{low}, {high}]")
        for name, value, low, high in bounds
        if value is not None and not low <= value <= high
    ]


def merge(*layers: SamplingOptions) -> SamplingOptions:
    """Return the first value given for each field, earlier layers first."""
    return SamplingOptions(
        temperature=_first(layer.temperature for layer in layers),
        top_k=_first(layer.top_k for layer in layers),
        top_p=_first(layer.top_p for layer in layers),
        min_p=_first(layer.min_p for layer in layers),
        repetition_penalty=_first(layer.repetition_penalty for layer in layers),
        presence_penalty=_first(layer.presence_penalty for layer in layers),
        frequency_penalty=_first(layer.frequency_penalty for layer in layers),
        repeat_last_n=_first(layer.repeat_last_n for layer in layers),
        xtc_probability=_first(layer.xtc_probability for layer in layers),
        xtc_threshold=_first(layer.xtc_threshold for layer in layers),
        seed=_first(layer.seed for layer in layers),
        logit_bias=next((layer.logit_bias for layer in layers if layer.logit_bias), ()),
    )


def _first(values: Iterable[_T | None]) -> _T | None:
    return next((value for value in values if value is not None), None)


def resolve(options: SamplingOptions, *, seed: int) -> Sampling:
    """Return the values in force; `seed` is used where none was given."""
    full = merge(options, DEFAULTS)
    assert full.temperature is not None
    assert full.top_k is not None
    assert full.top_p is not None
    assert full.min_p is not None
    assert full.repetition_penalty is not None
    assert full.presence_penalty is not None
    assert full.frequency_penalty is not None
    assert full.repeat_last_n is not None
    assert full.xtc_probability is not None
    assert full.xtc_threshold is not None
    return Sampling(
        temperature=full.temperature,
        top_k=max(full.top_k, 0),
        top_p=full.top_p or 1.0,
        min_p=full.min_p,
        seed=seed if full.seed is None else full.seed,
        logit_bias=full.logit_bias,
        repetition_penalty=full.repetition_penalty,
        presence_penalty=full.presence_penalty,
        frequency_penalty=full.frequency_penalty,
        repeat_last_n=full.repeat_last_n,
        xtc_probability=full.xtc_probability,
        xtc_threshold=full.xtc_threshold,
    )


def check_vocabulary(spec: GenerateSpec, vocab_size: int) -> None:
    """Refuse token ids that the model does not have.

    Raises:
        InvalidRequest: naming the first bad id of each field and the limit.
    """
    limit = f"the vocabulary has {vocab_size} tokens"
    beyond = (i for i, _ in spec.sampling.logit_bias if i >= vocab_size)
    violations = [FieldViolation(f"sampling.logit_bias[{i}]", limit) for i in islice(beyond, 1)]
    ids = spec.prompt if isinstance(spec.prompt, tuple) else ()
    for name, values in (("stop_token_ids", spec.stop_token_ids), ("tokens.ids", ids)):
        bad = next((i for i in values if i >= vocab_size), None)
        if bad is not None:
            violations.append(FieldViolation(name, f"{bad} is not a token id; {limit}"))
    if violations:
        raise InvalidRequest(tuple(violations))
