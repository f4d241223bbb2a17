"""Sampling defaults that a model brings in generation_config.json.

Invariants:
- A value out of its range is passed over with a warning: the file is advice, not a request.
- `do_sample: false` means greedy; where it is not said, the values given are taken as meant.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from mlxd_shared.config import CONFIG_FILE_BYTES_MAX
from mlxd_shared.logs import get_logger
from mlxd_shared.model_files import parse_json_object, read_file
from mlxd_shared.requests import SamplingOptions, merge, sampling_violations

GENERATION_CONFIG_FILE: Final = "generation_config.json"

_log = get_logger("load")


def read_generation_defaults(folder: Path) -> SamplingOptions:
    """Return what the folder's generation_config.json says about sampling; nothing without one.

    Raises:
        InvalidModel: the file is too large, unreadable or not a JSON object.
    """
    values = _read(folder / GENERATION_CONFIG_FILE)
    penalty = SamplingOptions(repetition_penalty=_number(values, "repetition_penalty"))
    if values.get("do_sample") is False:
        return merge(SamplingOptions(temperature=0.0), *(o for o in (penalty,) if _usable(o)))
    top_k = _number(values, "top_k")
    given = (
        SamplingOptions(temperature=_number(values, "temperature")),
        SamplingOptions(top_k=None if top_k is None or not top_k.is_integer() else int(top_k)),
        SamplingOptions(top_p=_number(values, "top_p")),
        SamplingOptions(min_p=_number(values, "min_p")),
        penalty,
    )
    return merge(*(options for options in given if _usable(options)))


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


def _read(path: Path) -> Mapping[str, Any]:
    raw = read_file(path, bytes_max=CONFIG_FILE_BYTES_MAX)
    return {} if raw is None else parse_json_object(raw, file=path.name)
