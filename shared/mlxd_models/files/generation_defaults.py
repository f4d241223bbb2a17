"""Sampling defaults that a model brings in generation_config.json, or in its manifest's parameters.

Invariants:
- A value out of its range is passed over with a warning: the file is advice, not a request.
- A manifest's parameters were chosen for this very model and go before its publisher's.
- `do_sample: false` means greedy; where it is not said, the values given are taken as meant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from mlxd_models.files.model_source import Source, files_of
from mlxd_models.files.ollama_manifest import PARAMETERS_FILE
from mlxd_shared.domain.requests import SamplingOptions, merge, sampling_violations
from mlxd_shared.ops.logs import get_logger

GENERATION_CONFIG_FILE: Final = "generation_config.json"

_log = get_logger("load")


def _whole(value: float) -> int | None:
    return int(value) if value.is_integer() else None


_PARAMETERS: Final[Mapping[str, Callable[[float], SamplingOptions]]] = {
    "temperature": lambda value: SamplingOptions(temperature=value),
    "top_k": lambda value: SamplingOptions(top_k=_whole(value)),
    "top_p": lambda value: SamplingOptions(top_p=value),
    "min_p": lambda value: SamplingOptions(min_p=value),
    "repeat_penalty": lambda value: SamplingOptions(repetition_penalty=value),
    "presence_penalty": lambda value: SamplingOptions(presence_penalty=value),
    "frequency_penalty": lambda value: SamplingOptions(frequency_penalty=value),
    "repeat_last_n": lambda value: SamplingOptions(repeat_last_n=_whole(value)),
}
"""What parameters of a manifest are called, and mean."""


def read_generation_defaults(source: Source) -> SamplingOptions:
    """Return what a model's files say about sampling; nothing where they say nothing.

    Raises:
        InvalidModel: a file is too large, unreadable or not a JSON object.
    """
    files = files_of(source)
    chosen = _read_parameters(files.read_json(PARAMETERS_FILE))
    return merge(chosen, _read_published(files.read_json(GENERATION_CONFIG_FILE)))


def _read_parameters(values: Mapping[str, Any]) -> SamplingOptions:
    """Return what parameters of a manifest say; what says nothing about sampling is passed over."""
    layers = [SamplingOptions()]
    for name, value in values.items():
        make = _PARAMETERS.get(name)
        number = None if make is None else _number(values, name)
        options = None if make is None or number is None else make(number)
        if options is None:
            _log.warning(
                "default not used", field=name, reason=f"{value!r:.80} is not for sampling"
            )
        elif _usable(options):
            layers.append(options)
    return merge(*layers)


def _read_published(values: Mapping[str, Any]) -> SamplingOptions:
    penalty = SamplingOptions(repetition_penalty=_number(values, "repetition_penalty"))
    if values.get("do_sample") is False:
        return merge(SamplingOptions(temperature=0.0), *(o for o in (penalty,) if _usable(o)))
    top_k = _number(values, "top_k")
    published_options = (
        SamplingOptions(temperature=_number(values, "temperature")),
        SamplingOptions(top_k=None if top_k is None or not top_k.is_integer() else int(top_k)),
        SamplingOptions(top_p=_number(values, "top_p")),
        SamplingOptions(min_p=_number(values, "min_p")),
        penalty,
    )
    return merge(*(options for options in published_options if _usable(options)))


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
