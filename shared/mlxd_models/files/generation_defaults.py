"""Sampling defaults that a model brings in generation_config.json, or in its manifest's parameters.

Invariants:
- A value out of its range is passed over with a warning: the file is advice, not a request.
- A manifest's parameters were chosen for this very model and go before its publisher's.
- `do_sample: false` means greedy; if it is absent, the other values apply as given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from mlxd_models.files.model_config import (
    CONFIG_FILE,
    SPECIAL_TOKENS_FILE,
    TOKENIZER_CONFIG_FILE,
)
from mlxd_models.files.model_source import Source, files_of
from mlxd_models.files.ollama_manifest import PARAMETERS_FILE
from mlxd_shared.domain.requests import (
    WHOLE_OPTIONS,
    SamplingOptions,
    merge,
    sampling_violations,
)
from mlxd_shared.ops.logs import get_logger

GENERATION_CONFIG_FILE: Final = "generation_config.json"
EOS_SOURCES: Final = (
    (GENERATION_CONFIG_FILE, "eos_token_id"),
    (CONFIG_FILE, "eos_token_id"),
    (TOKENIZER_CONFIG_FILE, "eos_token"),
    (SPECIAL_TOKENS_FILE, "eos_token"),
)
"""Files and fields that say which tokens end a text; the first that says any wins."""
BOS_SOURCES: Final = (
    (TOKENIZER_CONFIG_FILE, "bos_token"),
    (SPECIAL_TOKENS_FILE, "bos_token"),
    (CONFIG_FILE, "bos_token_id"),
    (GENERATION_CONFIG_FILE, "bos_token_id"),
)
"""Those that say which one begins it."""

_log = get_logger("load")


_PUBLISHED: Final = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_PARAMETERS: Final[Mapping[str, str]] = {
    **{name: name for name in _PUBLISHED[:-1]},
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repeat_last_n": "repeat_last_n",
}
"""What parameters of a manifest are called, and the options that they mean."""


def read_generation_defaults(source: Source) -> SamplingOptions:
    """Return what a model's files say about sampling; raises InvalidModel for a bad file."""
    files = files_of(source)
    chosen = _read_parameters(files.read_json(PARAMETERS_FILE))
    return merge(chosen, _read_published(files.read_json(GENERATION_CONFIG_FILE)))


def _read_parameters(values: Mapping[str, Any]) -> SamplingOptions:
    """Return the sampling options in a manifest's parameters; ignore the others."""
    layers = [SamplingOptions()]
    for name, value in values.items():
        option = _PARAMETERS.get(name)
        options = None if option is None else _read_option(values, name, option)
        if options is None:
            reason = f"{value!r:.80} is not for sampling"
            _log.warning("default not used", field=name, reason=reason)
        elif _usable(options):
            layers.append(options)
    return merge(*layers)


def _read_published(values: Mapping[str, Any]) -> SamplingOptions:
    is_greedy = values.get("do_sample") is False
    layers = [SamplingOptions(temperature=0.0) if is_greedy else SamplingOptions()]
    for name in _PUBLISHED[-1:] if is_greedy else _PUBLISHED:
        options = _read_option(values, name, name)
        if options is not None and _usable(options):
            layers.append(options)
    return merge(*layers)


def _read_option(values: Mapping[str, Any], name: str, option: str) -> SamplingOptions | None:
    number = _number(values, name)
    if number is None or (option in WHOLE_OPTIONS and not number.is_integer()):
        return None
    stated: dict[str, Any] = {option: int(number) if option in WHOLE_OPTIONS else number}
    return SamplingOptions(**stated)


def _usable(options: SamplingOptions) -> bool:
    problems = sampling_violations(options, prefix=GENERATION_CONFIG_FILE)
    for problem in problems:
        _log.warning("default not used", field=problem.field, reason=problem.description)
    return not problems


def _number(values: Mapping[str, Any], name: str) -> float | None:
    value = values.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        _log.warning("default not used", field=name, reason=f"{value!r} is not a number")
        return None
    try:
        return float(value)
    except OverflowError:
        _log.warning("default not used", field=name, reason="is out of any range")
        return None
