"""How an agent starts workers on its own machine."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

from mlxd_controller.fleet.machine import OwnMachine
from tests.support.fleets import OPTIONS


def test_workers_do_not_outlive_their_agent() -> None:
    """The grace is the agent's; another agent could not take them over."""
    with closing(OwnMachine("a", "127.0.0.1")) as machine:
        arguments = machine.launcher(replace(OPTIONS, orphan_grace_s=60.0)).arguments
    assert arguments[arguments.index("--orphan-grace") + 1] == "0.0"


def test_what_workers_are_started_with_has_no_grace() -> None:
    """A controller with another grace adopts them."""
    assert replace(OPTIONS, orphan_grace_s=1.0).of_workers == OPTIONS.of_workers
    assert replace(OPTIONS, tls="/tls").of_workers != OPTIONS.of_workers
