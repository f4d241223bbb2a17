"""Architectures by the name in config.json's `architectures[0]`.

A new one is a file of its own in `families` and one line in `REGISTRY`.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from mlxd_shared.errors import InvalidModel
from mlxd_worker.models.architecture import Architecture
from mlxd_worker.models.families import (
    deepseek_v2,
    deepseek_v3,
    gemma3,
    glm4_moe_lite,
    gpt_oss,
    llama,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
)
from mlxd_worker.models.fields import CONFIG_FILE


class DuplicateArchitecture(Exception):
    """A bug: two architectures under one name."""


class Registry:
    """A set of architectures under unique names."""

    def __init__(self, *entries: tuple[str, Architecture[Any]]) -> None:
        """Return a registry of `entries`.

        Raises:
            DuplicateArchitecture: a name occurs twice.
        """
        self._entries: dict[str, Architecture[Any]] = {}
        for name, architecture in entries:
            self.register(name, architecture)

    def register(self, name: str, architecture: Architecture[Any]) -> None:
        """Add one.

        Raises:
            DuplicateArchitecture: the name is taken.
        """
        if name in self._entries:
            raise DuplicateArchitecture(f"architecture {name} is registered twice")
        self._entries[name] = architecture

    def find(self, name: str) -> Architecture[Any]:
        """Return the architecture of this name.

        Raises:
            InvalidModel: unknown; the error lists the known ones.
        """
        try:
            return self._entries[name]
        except KeyError:
            known = ", ".join(sorted(self._entries))
            problem = f"architecture {name!r} is not supported; known: {known}"
            raise InvalidModel(problem, file=CONFIG_FILE, field="architectures") from None

    @property
    def entries(self) -> Mapping[str, Architecture[Any]]:
        """All of them, by name."""
        return MappingProxyType(self._entries)


REGISTRY = Registry(
    ("DeepseekV2ForCausalLM", deepseek_v2.DEEPSEEK_V2),
    ("DeepseekV3ForCausalLM", deepseek_v3.DEEPSEEK_V3),
    ("Gemma3ForCausalLM", gemma3.GEMMA3),
    ("Gemma3ForConditionalGeneration", gemma3.GEMMA3_NESTED),
    ("Glm4MoeLiteForCausalLM", glm4_moe_lite.GLM4_MOE_LITE),
    ("GptOssForCausalLM", gpt_oss.GPT_OSS),
    ("LlamaForCausalLM", llama.LLAMA),
    ("MistralForCausalLM", llama.MISTRAL),
    ("Qwen2ForCausalLM", qwen2.QWEN2),
    ("Qwen3ForCausalLM", qwen3.QWEN3),
    ("Qwen3MoeForCausalLM", qwen3_moe.QWEN3_MOE),
    ("Qwen3NextForCausalLM", qwen3_next.QWEN3_NEXT),
    ("Qwen3_5ForCausalLM", qwen3_5.QWEN3_5),
    ("Qwen3_5MoeForCausalLM", qwen3_5_moe.QWEN3_5_MOE),
)
