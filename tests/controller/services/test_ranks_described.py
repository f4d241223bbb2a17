"""ModelService describes what ranks have of a model for who asks for ranks, or needs them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlxd.v1 import types_pb2
from tests.controller.services.test_models import load
from tests.fakes.store import FakeStore
from tests.support.controller_stack import controller_stack
from tests.support.divided import Describing
from tests.support.model_facts import device, need_mib


@pytest.mark.asyncio
async def test_what_ranks_have_is_described_for_who_asks_for_ranks() -> None:
    """Before what was asked for is checked and reckoned; where one device does, for nobody."""
    describing = Describing(10)
    describing.may_end.set()
    store = FakeStore({"a": ("digest-a", describing.facts())})
    async with controller_stack(store=store, memory=device(1 << 14)) as stack:
        (whole,) = await load(stack, "a", validate_only=True)
        assert (whole.fit.ranks, describing.count) == (1, 0)
        options = types_pb2.LoadOptions(ranks=2)
        (shared,) = await load(stack, "a", validate_only=True, options=options)
        assert (shared.fit.ranks, describing.count) == (2, 1)

    small = device(need_mib(10, kind="cuda"), kind="cuda", name="gpu0")
    others = (replace(small, name="gpu1"),)
    describing.count, store = 0, FakeStore({"a": ("digest-a", describing.facts())})
    async with controller_stack(store=store, memory=small, others=others) as stack:
        (fit,) = await load(stack, "a", validate_only=True)
        assert (fit.fit.ranks, describing.count) == (2, 1)
