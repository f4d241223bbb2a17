"""The build file: what is new of the arithmetic, on the parts that families share."""

from __future__ import annotations

from mlxd_worker.models.families.llama import LlamaModel


class NarrowedModel(LlamaModel):
    """A Llama by another name."""


build = NarrowedModel
