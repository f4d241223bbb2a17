"""A Llama can be read whole: from its config to its logits it is a few files, and none is hidden.

The files are those that its description and its model import, and these in turn, within the two
packages of models. What is left out is named here, with what makes it no part of a Llama.
"""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

FILES_MAX, LINES_MAX = 5, 900
ROOTS = ("mlxd_models.families.llama", "mlxd_worker.models.families.llama")
PACKAGES = ("mlxd_models.families.", "mlxd_worker.models.")
LEFT_OUT = {
    "mlxd_models.families.common.experts": "a Llama has none",
    "mlxd_models.families.common.family": "what any family hands to the registry",
    "mlxd_models.families.common.fields": "how keys of any config are read",
    "mlxd_models.families.common.packing": "how any weight is packed",
    "mlxd_models.families.common.rope_fields": "how the keys of any rotation are read",
    "mlxd_models.families.common.tensors": "what a stored tensor is",
    "mlxd_models.families.common.windows": "a Llama has none: any are refused",
    "mlxd_worker.models.base": "what any model offers the engine",
    "mlxd_worker.models.layers.experts": "a Llama has none",
    "mlxd_worker.models.weights.fused": "products with weights, with what stands beside them",
    "mlxd_worker.models.weights.linear": "products with weights, however these are stored",
    "mlxd_worker.models.weights.pacing": "when packed weights are unpacked, if they are",
    "mlxd_worker.models.weights.reader": "where any model takes its tensors from",
}


def source_of(module: str) -> Path:
    """Return a module's file; it is not imported."""
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin)


def imports_of(module: str) -> set[str]:
    """Return the modules of the two packages that a module imports from."""
    nodes = ast.walk(ast.parse(source_of(module).read_text()))
    named = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    return {name for name in named if name.startswith(PACKAGES)}


def test_a_llama_can_be_read_whole() -> None:
    """At most 5 files and 900 lines; and nothing is left out that is not reached."""
    read, met, waiting = set[str](), set[str](), list(ROOTS)
    while waiting:
        module = waiting.pop()
        if module in LEFT_OUT:
            met.add(module)
        elif module not in read:
            read.add(module)
            waiting += imports_of(module)
    lines = {module: len(source_of(module).read_text().splitlines()) for module in sorted(read)}

    assert len(lines) <= FILES_MAX, lines
    assert sum(lines.values()) <= LINES_MAX, lines
    assert met == set(LEFT_OUT)
