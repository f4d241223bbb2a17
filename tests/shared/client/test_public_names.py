"""What programs import from `mlxd`: a fixed list, with every error, and nothing before its use."""

from __future__ import annotations

import ast
import dataclasses
import subprocess
import sys
import typing
from contextvars import ContextVar
from pathlib import Path

import pytest

import mlxd
from mlxd_shared.domain import errors
from mlxd_shared.domain.errors import MlxdError
from tests.tidy.tree import ROOT

FACE = ROOT / "shared" / "mlxd" / "__init__.py"


def imported_names() -> set[str]:
    """Return the names that a type checker finds in the package."""
    tree = ast.parse(FACE.read_text(encoding="utf-8"))
    return {
        alias.name
        for guarded in ast.walk(tree)
        if isinstance(guarded, ast.If)
        for node in ast.walk(guarded)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def all_errors(root: type[MlxdError]) -> set[str]:
    """Return the names of an error and of all below it that controller and worker raise."""
    below = [each for each in root.__subclasses__() if each.__module__ == errors.__name__]
    return {root.__name__}.union(*map(all_errors, below))


def test_the_list_is_what_there_is() -> None:
    """A type checker and the interpreter find the same names, each listed once, in order."""
    assert sorted(mlxd.__all__) == mlxd.__all__
    assert set(mlxd.__all__) == imported_names()
    assert dir(mlxd) == mlxd.__all__
    for name in mlxd.__all__:
        assert isinstance(getattr(mlxd, name), type | ContextVar), name


def test_every_error_is_public() -> None:
    """Whoever handles an error needs no other package."""
    assert all_errors(MlxdError) <= set(mlxd.__all__)


def test_what_public_types_are_made_of_is_public() -> None:
    """The fields of a public dataclass, the server's own among them, need no other package."""
    public = {getattr(mlxd, name) for name in mlxd.__all__}
    missing = {
        f"{kind}.{name}: {made_of}"
        for kind in public
        if dataclasses.is_dataclass(kind)
        for name, wanted in typing.get_type_hints(kind).items()
        for made_of in leaves(wanted)
        if made_of.__module__.startswith("mlxd") and made_of not in public
    }
    assert missing == set()


def leaves(wanted: typing.Any) -> list[type]:
    """Return the plain types that a type is made of."""
    parts = typing.get_args(wanted)
    if parts:
        return [leaf for part in parts if part is not Ellipsis for leaf in leaves(part)]
    return [wanted] if isinstance(wanted, type) else []


def test_no_other_name_is_public() -> None:
    """A name that is gone fails where it is asked for."""
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = mlxd.Nothing


def test_the_package_alone_imports_nothing() -> None:
    """The stubs lie in it, and neither controller nor worker is to pay for a client."""
    code = "import mlxd, sys; assert not {'grpc', 'mlxd.client'} & sys.modules.keys(); mlxd.Client"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path("/"))
