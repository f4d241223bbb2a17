"""Requests as the domain sees them: frozen, validated, with every default written once.

Absent is None. `resolve` fills what is absent, in the order of the wire's contract: the request,
the options given at load, the model's generation_config.json, DEFAULTS.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any

from mlxd_shared import config
from mlxd_shared.domain.chats import Chat
from mlxd_shared.domain.errors import FieldViolation, InvalidRequest
from mlxd_shared.domain.formats import ResponseFormat


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
    MIXED_4_8 = "mixed_4_8"
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
    echo: bool = False
    """Whether the prompt is told as the model reads it."""
    prompt_logprobs: int | None = None
    """How many alternatives each of the prompt's tokens comes with; None: no log-probabilities."""
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
    choices: int = 1
    """How many completions to make of the prompt."""
    choice: int = 0
    """Which of them a worker is to make."""

    @property
    def holds_all(self) -> bool:
        """Whether all of the output has to match something, from its first token on."""
        calls = isinstance(self.prompt, Chat) and self.prompt.requires_call
        return calls or self.response_format is not None


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
class ScoredText:
    """A text, and what may follow it."""

    text: str
    continuations: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Reranking:
    """A question to a reranker: whether a document answers this query."""

    query: str
    instruction: str = ""
    """What a document is to be for the query; empty is left to the model."""


@dataclass(frozen=True, slots=True)
class ScoreSpec:
    """Texts whose continuations are scored, checked for everything that needs no model."""

    model: str
    texts: tuple[ScoredText, ...]
    parse_special_tokens: bool | None = None
    """Whether special tokens in texts are read as such; None: they are not."""
    worker_incarnation: str = ""
    reranking: Reranking | None = None
    """What is asked about each text, a document then; None: texts are read as they are."""


@dataclass(frozen=True, slots=True)
class Score:
    """How likely a model finds one continuation."""

    logprob: float
    """The sum of its tokens' log-probabilities."""
    tokens: int
    is_greedy: bool
    """Whether each of them is the likeliest one in its place."""


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
    """Higher is evicted later; 0 by default."""
    kv_format: KVFormat | None = None
    prefix_cache_nbytes: int | None = None
    """What snapshots of former prompts may take; 0 keeps none."""
    ranks: int | None = None
    """How many processes share the model, a device each."""


def check_range(field: str, value: float | None, low: float, high: float) -> list[FieldViolation]:
    """Return what is wrong with a value outside [low, high]; with None nothing is."""
    if value is None or low <= value <= high:
        return []
    return [FieldViolation(field, f"{value} is outside [{low}, {high}]")]


INT32 = (-(1 << 31), (1 << 31) - 1)
UINT32 = (0, (1 << 32) - 1)
UINT64 = (0, (1 << 64) - 1)
SEEDS = UINT64[1] + 1
"""How many there are: those beyond begin anew."""
LOGIT_BIAS_RANGE = (-100, 100)
SAMPLING_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "top_k": (-1, INT32[1]),
    "top_p": (0, 1),
    "min_p": (0, 1),
    # The least is exact in binary; a factor near 0 would make a logit infinite.
    "repetition_penalty": (0.0625, 10),
    "presence_penalty": (-10, 10),
    "frequency_penalty": (-10, 10),
    "repeat_last_n": (-1, INT32[1]),
    "xtc_probability": (0, 1),
    "xtc_threshold": (0, 0.5),
    "seed": UINT64,
}

WHOLE_OPTIONS = frozenset({"top_k", "repeat_last_n", "seed"})
"""The sampling options among them whose values are whole numbers."""


def sampling_violations(options: SamplingOptions, *, prefix: str) -> list[FieldViolation]:
    """Return what is out of range in `options`; `prefix` is the field that holds them."""
    violations = [
        bad
        for name, bounds in SAMPLING_RANGES.items()
        for bad in check_range(f"{prefix}.{name}", getattr(options, name), *bounds)
    ]
    for token_id, bias in options.logit_bias:
        broken = check_range(f"{prefix}.logit_bias[{token_id}]", bias, *LOGIT_BIAS_RANGE)
        if broken:  # one of a list is enough
            return violations + broken
    return violations


def load_violations(spec: LoadSpec, *, prefix: str) -> list[FieldViolation]:
    """Return which sizes of a load are out of range; `prefix` is the field that holds them."""
    bounds = (
        (
            "context_length",
            spec.context_length,
            config.CONTEXT_LENGTH_MIN,
            config.CONTEXT_LENGTH_LIMIT,
        ),
        ("rows_max", spec.rows_max, 1, config.ROWS_MAX_LIMIT),
        ("prefix_cache_bytes", spec.prefix_cache_nbytes, 0, config.PREFIX_CACHE_BYTES_LIMIT),
    )
    violations = [
        bad
        for name, value, low, high in bounds
        for bad in check_range(f"{prefix}.{name}", value, low, high)
    ]
    if spec.ranks is not None and spec.ranks not in config.RANKS_SERVED:
        served = ", ".join(map(str, config.RANKS_SERVED))
        violations.append(FieldViolation(f"{prefix}.ranks", f"{spec.ranks} is not one of {served}"))
    return violations


def merge(*layers: SamplingOptions) -> SamplingOptions:
    """Return the first value given for each field, earlier layers first."""
    values: dict[str, Any] = {}
    for layer in reversed(layers):
        values |= {name: value for name, value in _items(layer) if value not in (None, ())}
    return SamplingOptions(**values)


def _items(options: SamplingOptions) -> Iterator[tuple[str, Any]]:
    return ((field.name, getattr(options, field.name)) for field in fields(options))


def resolve(options: SamplingOptions, *, seed: int) -> Sampling:
    """Return the values in force; `seed` is used where none was given."""
    values = dict(_items(merge(options, SamplingOptions(seed=seed), DEFAULTS)))
    values["top_k"] = max(values["top_k"], 0)
    values["top_p"] = values["top_p"] or 1.0
    return Sampling(**values)


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
