"""Which modules of the packages a running program can reach, from imports alone.

The roots are the console scripts, the modules that the Makefile runs with -m, each package's
__main__ and the public client. What no root reaches is dead: tests alone do not keep a module.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterable, Iterator

from tests.tidy.tree import ROOT, Source

PUBLIC_MODULES = ("mlxd.client",)


def roots(known: Iterable[str]) -> set[str]:
    """Name the modules of `known` that something outside the packages starts or imports."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    scripts = {target.partition(":")[0] for target in project["scripts"].values()}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    started = set(re.findall(r"-m ([\w.]+)", makefile))
    mains = {name for name in known if name.endswith(".__main__")}
    return (scripts | started | mains | set(PUBLIC_MODULES)) & set(known)


def imported_names(source: Source) -> Iterator[str]:
    """Every dotted name that importing this file may import; not all of them are modules."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _with_parents(alias.name)
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from _with_parents(node.module)
            for alias in node.names:
                yield f"{node.module}.{alias.name}"
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value  # a module named to importlib or to `python -m`


def unreachable(sources: Iterable[Source]) -> list[Source]:
    """Answer the package files that no root reaches, sorted by name."""
    by_module = {source.module: source for source in sources if source.in_package}
    waiting = [name for root in roots(by_module) for name in _with_parents(root)]
    reached: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in by_module and name not in reached:
            reached.add(name)
            waiting.extend(_with_parents(name))
            waiting.extend(imported_names(by_module[name]))
    return [by_module[name] for name in sorted(by_module) if name not in reached]


def _with_parents(module: str) -> Iterator[str]:
    parts = module.split(".")
    for count in range(1, len(parts) + 1):
        yield ".".join(parts[:count])
