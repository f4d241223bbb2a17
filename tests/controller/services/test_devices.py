"""A controller of several devices: what clients, metrics and launches are told of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlxd.v1 import model_pb2, status_pb2, types_pb2
from mlxd_controller.core import phases
from mlxd_models.fit.plan import Device
from mlxd_shared.domain.figures import HostMemory
from tests.support.controller_stack import Stack, controller_stack, store_of
from tests.support.model_facts import device, need_mib

ONE = need_mib(10, kind="cuda")


def gpu(index: int, rooms: float) -> Device:
    """A GPU with room for so many models of 10 MiB."""
    gpu_device = device(int(rooms * ONE), kind="cuda", name=f"gpu{index}")
    return replace(gpu_device, id=f"GPU-{index}", product="NVIDIA H200")


async def status_of(stack: Stack) -> status_pb2.Status:
    """Return the controller's status."""
    answer = await stack.status.GetStatus(status_pb2.GetStatusRequest())
    return answer.status


async def fit_of(stack: Stack, model: str) -> types_pb2.FitReport:
    """Return what a load would do."""
    request = model_pb2.LoadModelRequest(model=model, validate_only=True)
    (answer,) = [message async for message in stack.models.LoadModel(request)]
    return answer.fit


@pytest.mark.asyncio
async def test_every_view_names_the_device_of_a_model() -> None:
    """Models, their workers' launches, promises in status and metrics, and the fit report."""
    store = store_of({"a": 10, "b": 10, "c": 10})
    async with controller_stack(store=store, memory=gpu(0, 1.5), others=(gpu(1, 1.2),)) as stack:
        assert (await fit_of(stack, "a")).device == "gpu0"
        await stack.generate("a")
        assert (await fit_of(stack, "b")).device == "gpu1"
        await stack.generate("b")

        assert stack.workers.launcher.devices == ["gpu0", "gpu1"]
        listed = await stack.models.ListModels(model_pb2.ListModelsRequest())
        assert [(m.name, m.device) for m in listed.models] == [
            ("a", "gpu0"), ("b", "gpu1"), ("c", ""),
        ]  # fmt: skip
        status = await status_of(stack)
        first, second = status.devices
        assert (first.name, first.id, first.product) == ("gpu0", "GPU-0", "NVIDIA H200")
        assert first.usable_bytes == first.budget_bytes
        assert (second.name, second.held_bytes, second.pressed) == ("gpu1", 1000, False)
        assert 0 < second.reserved_bytes < second.budget_bytes
        reserved = next(f for f in status.metrics if f.name == "mlxd_memory_reserved_bytes")
        assert [dict(point.labels) for point in reserved.points] == [
            {"model": "a", "device": "gpu0"},
            {"model": "b", "device": "gpu1"},
        ]
        report = await fit_of(stack, "c")
        assert (report.fits_now, report.device) == (False, "gpu0")
        assert list(report.would_evict) == ["a"]


@pytest.mark.asyncio
async def test_a_device_above_its_marks_is_shown_and_the_others_serve_on() -> None:
    """Pressure is told of the device that has it, in status and metrics; loads go elsewhere."""
    store = store_of({"a": 10, "b": 10})
    async with controller_stack(store=store, memory=gpu(0, 3), others=(gpu(1, 2),)) as stack:
        await stack.generate("a")
        stack.probe.device = replace(stack.probe.device, budget_bytes=4000, usable_bytes=100)
        stack.runtime.measure()
        await stack.settle()

        status = await status_of(stack)
        assert [shown.pressed for shown in status.devices] == [True, False]
        pressed = next(f for f in status.metrics if f.name == "mlxd_memory_pressed")
        assert {point.labels["device"]: point.value for point in pressed.points} == {
            "gpu0": 1,
            "gpu1": 0,
        }
        await stack.generate("b")
        assert isinstance(stack.model("b").phase, phases.Ready)
        assert stack.workers.launcher.devices[-1] == "gpu1"


@pytest.mark.asyncio
async def test_a_lost_machine_is_shown_and_its_models_are_loaded_elsewhere() -> None:
    """Memory by machine in the status; a stream begun anew goes to the machine that is there."""
    here, there = (
        replace(gpu(index, room), name=f"n{index}/gpu0", node=f"n{index}")
        for index, room in enumerate((1.2, 1.5))
    )
    store = store_of({"a": 10})
    async with controller_stack(store=store, memory=here, others=(there,)) as stack:
        await stack.generate("a")
        stack.probe.others = (replace(there, lost=True, models_max=2),)
        stack.probe.elsewhere = (
            HostMemory("n0", "id-0", total_nbytes=9, available_nbytes=5, resident_nbytes=1),
            HostMemory("n1", "id-1", lost=True),
        )
        stack.runtime.measure()
        await stack.settle()
        assert isinstance(stack.model("a").phase, phases.Failed)
        stack.workers.launcher.processes[0].end(255)

        await stack.generate("a")

        assert stack.workers.launcher.devices == ["n1/gpu0", "n0/gpu0"]
        status = await status_of(stack)
        shown = [(d.machine, d.lost, d.models_max) for d in status.devices]
        assert shown == [("n0", False, 0), ("n1", True, 2)]
        machines = [(m.machine, m.machine_id, m.lost) for m in status.machines]
        assert machines == [("n0", "id-0", False), ("n1", "id-1", True)]
        first = status.machines[0]
        assert (first.total_bytes, first.available_bytes, first.resident_bytes) == (9, 5, 1)
        (live,) = (worker for worker in status.workers if not worker.HasField("exit_code"))
        assert live.state == types_pb2.MODEL_STATE_READY
