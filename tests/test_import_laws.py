"""Every import law holds, and fails once what it forbids is imported somewhere."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from typing import Any, Final

import grimp
import pytest
from importlinter import configuration
from importlinter.application.use_cases import read_user_options
from importlinter.contracts.forbidden import ForbiddenContract
from importlinter.contracts.layers import LayersContract

from tests.tidy.tree import ROOT

configuration.configure()
OPTIONS: Final = read_user_options(config_filename=str(ROOT / "pyproject.toml"))
CONTRACTS: Final[list[dict[str, Any]]] = OPTIONS.contracts_options
KINDS: Final = {"layers": LayersContract, "forbidden": ForbiddenContract}


@cache
def imports() -> grimp.ImportGraph:
    """Return who imports whom in the tree, packages of others included."""
    return grimp.build_graph(
        *OPTIONS.session_options["root_packages"], include_external_packages=True, cache_dir=None
    )


def holds(options: dict[str, Any], importer: str = "", imported: str = "") -> bool:
    """Return whether a law holds; of a tree in which one module imports another, if named."""
    graph = deepcopy(imports())
    if importer:
        for module in {importer, imported} - graph.modules:
            graph.add_module(module, is_squashed=True)
        graph.add_import(importer=importer, imported=imported)
    contract = KINDS[options["type"]](
        name=options["name"], session_options=OPTIONS.session_options, contract_options=options
    )
    return contract.check(graph, verbose=False).kept


def breaches(options: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield an import for each two neighbouring layers, or for each package that is watched."""
    if options["type"] == "forbidden":
        for number, module in enumerate(options["source_modules"]):
            yield module, options["forbidden_modules"][number % len(options["forbidden_modules"])]
        return
    for container in options.get("containers", [""]):
        prefix = f"{container}." if container else ""
        layers = [layer.replace("|", " ").replace(":", " ").split() for layer in options["layers"]]
        for higher, lower in itertools.pairwise(layers):
            yield prefix + lower[0], prefix + higher[-1]
        for siblings in (layer for layer in options["layers"] if "|" in layer):
            first, second, *_ = siblings.replace("|", " ").split()
            yield prefix + first, prefix + second


@pytest.mark.parametrize("options", CONTRACTS, ids=lambda options: options["name"])
def test_the_law_holds(options: dict[str, Any]) -> None:
    """As `make imports` checks it."""
    assert holds(options)


@pytest.mark.parametrize("options", CONTRACTS, ids=lambda options: options["name"])
def test_a_breach_is_seen(options: dict[str, Any]) -> None:
    """One import that the law forbids, at any of its places, breaks it."""
    sown = list(breaches(options))

    assert sown
    assert [breach for breach in sown if holds(options, *breach)] == []
