"""What the page asks for: each field once, with what there is to say of it."""

from __future__ import annotations

from typing import Annotated

import msgspec

from mlxd import KVFormat, Weights
from mlxd_gateway.common.fates import honour
from mlxd_shared import config

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=config.PAGE_NAME_CHARS_MAX)]
_Whole = Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)]


class _Options(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What a load is asked with, or a fit. Whatever is null is left to the controller."""

    model: _Name
    context_length: _Whole | None = None
    rows_max: _Whole | None = None
    weights: Weights = Weights.AUTO
    kv_format: KVFormat | None = None


class FitRequest(_Options, kw_only=True):
    """POST /page/api/fit."""


class LoadRequest(_Options, kw_only=True):
    """POST /page/api/load."""

    pinned: Annotated[
        bool | None, honour("whether it is never evicted; null: as it was; of a loaded model too")
    ] = None


class UnloadRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /page/api/unload."""

    model: _Name
    force: Annotated[bool, honour("end the streams in progress at once")] = False
    grace_s: Annotated[
        float | None, honour("how long streams in progress may go on; null: 30 s")
    ] = None


class WatchQuery(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """GET /page/api/watch."""

    interval_s: Annotated[
        float,
        msgspec.Meta(ge=config.PAGE_INTERVAL_MIN_S, le=config.PAGE_INTERVAL_MAX_S),
        honour(f"{config.PAGE_INTERVAL_MIN_S} to {config.PAGE_INTERVAL_MAX_S:g}"),
    ] = config.WATCH_INTERVAL_DEFAULT_S


class LogsQuery(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """GET /page/api/logs."""

    model: _Name
    tail: Annotated[int, honour("how many of the last lines come first, at most 2000")] = 500
