"""The registry: a family by the name in config.json, once, and no other."""

from __future__ import annotations

import pytest

from mlxd_models.families.registry import REGISTRY, DuplicateArchitecture, Registry, architecture_of
from mlxd_shared.domain.errors import InvalidModel


@pytest.mark.parametrize("value", [None, [], "LlamaForCausalLM", [3], {}])
def test_a_config_without_architecture_is_refused(value: object) -> None:
    """`architectures` must be a list that starts with a name."""
    with pytest.raises(InvalidModel, match=r"config\.json: architectures"):
        architecture_of({"architectures": value})


def test_an_unknown_architecture_lists_the_known() -> None:
    """Asking for an architecture that nobody wrote names it and what there is."""
    with pytest.raises(InvalidModel) as caught:
        REGISTRY.find("MambaForCausalLM")

    assert caught.value.field == "architectures"
    assert "'MambaForCausalLM'" in caught.value.problem
    assert "LlamaForCausalLM, MistralForCausalLM" in caught.value.problem


def test_an_architecture_is_registered_once() -> None:
    """A second registration of a name is a loud bug, and changes nothing."""
    llama = REGISTRY.find("LlamaForCausalLM")
    mistral = REGISTRY.find("MistralForCausalLM")
    registry = Registry(("Mine", llama))

    with pytest.raises(DuplicateArchitecture, match="Mine is registered twice"):
        registry.register("Mine", mistral)

    assert registry.find("Mine") is llama
    assert set(registry.entries) == {"Mine"}
