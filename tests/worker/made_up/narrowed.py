"""The description: a Llama whose feed-forward is `sixths` sixths as wide as its config says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from mlxd_models.families.common.decoder import DecoderConfig, llama_tensors, parse_decoder
from mlxd_models.families.common.family import Family, llama_footprint
from mlxd_models.families.common.fields import Fields


def parse_narrowed(config: Mapping[str, Any]) -> DecoderConfig:
    """Return the config of a `NarrowedForCausalLM`.

    Raises:
        InvalidModel: as `parse_decoder`; or `sixths` is missing or not in 1..4.
    """
    fields = Fields(config)
    parsed = parse_decoder(fields)
    return replace(parsed, mlp=parsed.mlp // 6 * fields.integer("sixths", low=1, high=4))


NARROWED: Final = Family(
    builder="tests.worker.made_up.builder",
    parse=parse_narrowed,
    tensors=llama_tensors,
    footprint=llama_footprint,
)
