"""What mlx-lm's models take where a config says nothing: `python -m tests.worker.zoo_defaults`.

It writes `mlxd_shared/zoo_defaults.json` from the sources of the mlx-lm that is installed, which
are parsed and not run. Of several classes of a module (a text's in a model that sees) the largest
default counts; one that takes its text from another module has that one's, too.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

from mlxd_models.sizes import zoo_sizes
from mlxd_models.sizes.zoo_sizes import DEFAULTS_FILE, SIZE_MAX
from mlxd_models.sizes.zoo_types import ZOO_TYPES

_SEEING: Final = ("Vision", "Projector", "Audio")
"""What names of classes begin with that are no text's."""


def _texts_in(value: object) -> Iterator[str]:
    """Yield a text, or those in a tuple and its tuples."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, tuple):
        for each in value:
            yield from _texts_in(each)


SIZE_NAMES: Final = frozenset(
    text
    for constant, value in vars(zoo_sizes).items()
    if constant.startswith("_") and constant.isupper()
    for text in _texts_in(value)
)
"""Every name that sizes are looked for by."""


def read_defaults() -> dict[str, dict[str, int]]:
    """Return the sizes that each type has by default, by type and name."""
    sizes_by_name = {name: _of_module(name) for name in sorted(ZOO_TYPES)}
    return {name: dict(sorted(sizes.items())) for name, sizes in sizes_by_name.items() if sizes}


@cache
def _of_module(name: str) -> dict[str, int]:
    tree = ast.parse((_models() / f"{name}.py").read_text(encoding="utf-8"))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    texts = [node for key, node in classes.items() if not key.startswith(_SEEING)]
    stated = [pair for node in texts for pair in _fields(node)]
    others = set(_bases(texts))
    if any(field == "text_config" for field, _ in stated):
        others |= set(_imported_modules(tree))
    sizes: dict[str, int] = {}
    for other in sorted(others & (ZOO_TYPES - {name})):
        sizes |= {key: max(value, sizes.get(key, 0)) for key, value in _of_module(other).items()}
    own: dict[str, int] = {}
    for field, value in stated:
        if field in SIZE_NAMES and type(value) is int and 0 < value <= SIZE_MAX:
            own[field] = max(value, own.get(field, 0))
    return sizes | own


def _models() -> Path:
    package = importlib.util.find_spec("mlx_lm")
    assert package is not None, "mlx-lm is a tool of development"
    assert package.origin is not None, "it has files"
    return Path(package.origin).parent / "models"


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, object]]:
    """Yield a class's fields with their defaults; None where one has none, or no plain one."""
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            value = item.value.value if isinstance(item.value, ast.Constant) else None
            yield item.target.id, value


def _bases(classes: list[ast.ClassDef]) -> Iterator[str]:
    """Yield the modules that classes' arguments are built on."""
    for node in classes:
        for base in node.bases:
            if isinstance(base, ast.Attribute) and isinstance(base.value, ast.Name):
                yield base.value.id


def _imported_modules(tree: ast.Module) -> Iterator[str]:
    """Yield the modules beside it that a module takes something from."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            yield from [node.module] if node.module else [alias.name for alias in node.names]


def main() -> None:
    """Write the file."""
    lines = [
        f" {json.dumps(name)}: {json.dumps(defaults)}" for name, defaults in read_defaults().items()
    ]
    DEFAULTS_FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    sys.stdout.write(f"{len(lines)} types\n")


if __name__ == "__main__":
    main()
