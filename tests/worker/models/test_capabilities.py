"""What models state of themselves: each its own, and nothing by inheritance."""

from __future__ import annotations

import ast
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from mlxd_worker.cache.layers.tokens import TOKEN_SIZES
from mlxd_worker.kernels.device import runs_cpu
from mlxd_worker.kernels.packed.product import BLOCK_ROWS_MAX
from mlxd_worker.models import base
from tests.worker.kin import QWEN3, QWEN3_MOE, build, write_kin, write_quantised
from tests.worker.tiny import load


def bodies(source: str) -> list[str]:
    """Return the members of Protocols in `source` that do something."""
    members = [
        member
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef)
        and any(ast.unparse(kind) == "Protocol" for kind in node.bases)
        for member in node.body
        if isinstance(member, ast.FunctionDef)
    ]
    return [member.name for member in members if not all(map(is_constant, member.body))]


def is_constant(statement: ast.stmt) -> bool:
    """Return whether a statement is a docstring, or dots."""
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def test_what_a_model_offers_has_no_bodies() -> None:
    """A model has no member that was not written for it: the Protocols' own do nothing."""
    assert bodies(Path(base.__file__).read_text(encoding="utf-8")) == []
    assert bodies("class A(Protocol):\n    def b(self) -> int:\n        return 1") == ["b"]


def test_a_model_of_experts_may_evaluate_in_a_pass(tmp_path: Path) -> None:
    """A dense model's step evaluates nothing; on a CPU one of experts looks at its choice."""
    dense = load(write_kin(tmp_path / "dense", QWEN3)).capabilities
    experts = load(write_kin(tmp_path / "experts", QWEN3_MOE)).capabilities

    assert (dense.stays_lazy, experts.stays_lazy) == (True, not runs_cpu())
    assert (dense.on_cpu, experts.on_cpu) == (runs_cpu(), runs_cpu())


def test_packed_weights_keep_passes_apart(tmp_path: Path) -> None:
    """They are unpacked a few layers at a time: a joined pass would not read them once."""
    folder = write_quantised(tmp_path, QWEN3)

    numbers, packed = build(folder).capabilities, build(folder, packed=True).capabilities
    assert numbers.joins_passes
    assert not packed.joins_passes
    assert numbers.flat_tokens_max == TOKEN_SIZES[-1]
    assert packed.flat_tokens_max in {0, BLOCK_ROWS_MAX}, "a GPU's kernel may keep more packed"


def test_what_a_model_is_capable_of_never_changes(tmp_path: Path) -> None:
    """It is stated when the model is built, and is the same value ever after."""
    model = load(write_kin(tmp_path, QWEN3))

    assert model.capabilities is model.capabilities
    with pytest.raises(FrozenInstanceError):
        model.capabilities.embeds = False  # type: ignore[misc]
