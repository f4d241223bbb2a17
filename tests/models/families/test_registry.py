"""The registry: a family by the name in config.json, once, and no other."""

from __future__ import annotations

import pytest

from mlxd_models.families.registry import REGISTRY, architecture_of, find_family
from mlxd_shared.domain.errors import InvalidModel


@pytest.mark.parametrize("value", [None, [], "LlamaForCausalLM", [3], {}])
def test_a_config_without_architecture_is_refused(value: object) -> None:
    """`architectures` must be a list that starts with a name."""
    with pytest.raises(InvalidModel, match=r"config\.json: architectures"):
        architecture_of({"architectures": value})


def test_an_unknown_architecture_lists_the_known() -> None:
    """Asking for an architecture that nobody wrote names it and what there is."""
    with pytest.raises(InvalidModel) as caught:
        find_family(REGISTRY, "MambaForCausalLM")

    assert caught.value.field == "architectures"
    assert "'MambaForCausalLM'" in caught.value.problem
    assert "LlavaForConditionalGeneration, MistralForCausalLM" in caught.value.problem
