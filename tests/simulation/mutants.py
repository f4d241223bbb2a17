"""Faults sown into copies of the core, one at a time: the simulation must find each of them.

A mutant is an edit of one file, of text that stands there exactly once. It runs in a process of its
own, in which the copy of the package stands before the real one on the path.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "controller" / "mlxd_controller" / "core"
RUN_S_MAX = 150.0


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault: in `file` of the core, `text` becomes `instead`."""

    name: str
    file: str
    text: str
    instead: str
    seed: int = 0
    """Of a history that finds it; the short run begins there."""


MUTANTS = (
    Mutant(
        "pins are not respected",
        "victims.py",
        "        and not model.pinned\n        and now_s >=",
        "        and now_s >=",
    ),
    Mutant(
        "the young are evicted too",
        "victims.py",
        "        and now_s >= ready.since_s + state.age_min_s\n    ]",
        "    ]",
    ),
    Mutant(
        "who waits for models in use waits for ever",
        "queueing.py",
        "if turn.now_s >= queued.gives_up_s:",
        "if turn.now_s >= queued.gives_up_s + 1e9:",
    ),
    Mutant(
        "what loads has no claim on memory",
        "room.py",
        "        if plan is None or not model.reserved_bytes:\n",
        "        if plan is None or not isinstance(model.phase, Draining | Unloading):\n",
    ),
    Mutant(
        "others are evicted for what can never fit",
        "room.py",
        "if plan.need_bytes <= device.budget_bytes:",
        "if plan.need_bytes <= 999 * device.budget_bytes:",
    ),
    Mutant(
        "what others hold counts as free",
        "room.py",
        "0 if device.lost else device.usable_bytes for",
        "0 if device.lost else device.budget_bytes for",
    ),
    Mutant(
        "room of another device is counted",
        "room.py",
        "0 if device.lost else device.usable_bytes for",
        "sum(one.usable_bytes for one in state.devices) for",
    ),
    Mutant(
        "who lives elsewhere is counted on the first device",
        "room.py",
        "for home in free_bytes.keys() & {*plan.devices}:",
        "for home in [state.devices[0].name]:",
    ),
    Mutant(
        "the dearer eviction is chosen",
        "victims.py",
        "return min(affordable, key=",
        "return max(affordable, key=",
        seed=2,
    ),
    Mutant(
        "the second device is not looked at",
        "homes.py",
        "for plan in queued.plans]\n    open_",
        "for plan in queued.plans[:1]]\n    open_",
    ),
    Mutant(
        "two loads at once on a GPU",
        "room.py",
        "gpu = not device.on_cpu",
        'gpu = device.kind == "metal"',
    ),
    Mutant(
        "those who were refused go on waiting",
        "turn.py",
        "return self.put(replace(model, phase=phases.with_demand(model.phase, NO_DEMAND)))",
        "return self.put(model)",
        seed=13,
    ),
    Mutant(
        "one who leaves takes the others along",
        "demand.py",
        "tuple(w for w in self.waiters if w.ticket != ticket)",
        "tuple(w for w in self.waiters if w.ticket == ticket)",
    ),
    Mutant(
        "a draining model takes leases",
        "schedule.py",
        "        turn.do(a.Refuse(event.ticket, e.ModelDraining(model.name)))\n",
        "        phase = replace(model.phase, leases=model.leases | {event.ticket})\n"
        "        turn.put(replace(model, phase=phase))\n"
        "        turn.do(a.Grant(event.ticket, phase.worker, 0.0))\n",
        seed=7,
    ),
    Mutant(
        "the last stream of a draining model ends, and nothing follows",
        "schedule.py",
        "if isinstance(phase, phases.Draining) and not leases:",
        "if isinstance(phase, phases.Draining) and phase.reason is None:",
    ),
    Mutant(
        "a worker that is being stopped is made ready by late news",
        "schedule.py",
        "case ev.Ready(), phases.Loading() as loading:\n",
        "case ev.Ready(), phases.Unloading() as late:\n"
        "            ready = phases.Ready(late.worker, late.plan, since_s=turn.now_s)\n"
        "            turn.serve_waiters(model, ready, late.demand.waiters)\n"
        "        case ev.Ready(), phases.Loading() as loading:\n",
    ),
    Mutant(
        "the death of a worker goes unnoticed",
        "schedule.py",
        "case ev.WorkerDied(_, error), phases.Ready():",
        "case ev.WorkerDied(_, error), phases.Failed():",
    ),
    Mutant(
        "who waits for a model that is leaving is forgotten",
        "ends.py",
        "if unloading.demand.stands:",
        "if unloading.demand.wanted:",
    ),
    Mutant(
        "what a model was measured to take does not count",
        "schedule.py",
        "plan=correct(ready.plan, known)",
        "plan=ready.plan",
        seed=158,
    ),
    Mutant(
        "what a model was measured to take is forgotten with its worker",
        "homes.py",
        "known=model.measured",
        "known=()",
    ),
    Mutant(
        "a hold never ends",
        "holding.py",
        "if not awaited or model.pinned or turn.now_s >= hold.until_s:",
        "if hold.until_s > turn.now_s + 1e9:",
    ),
    Mutant(
        "a model is held again and again",
        "holding.py",
        "hold_again_s=until_s + config.HOLD_PAUSE_S",
        "hold_again_s=until_s",
        seed=36,
    ),
    Mutant(
        "above the hard mark nothing is given back",
        "pressure.py",
        "if was else above_hard_mark(state, device)",
        "if was else False",
    ),
    Mutant(
        "memory is relieved down to the hard mark only",
        "pressure.py",
        "state.excess_on(device) > 0 if was else above_hard_mark(state, device)",
        "above_hard_mark(state, device)",
        seed=9,
    ),
    Mutant(
        "pressure on one device evicts from another",
        "pressure.py",
        "for model in candidates(state, turn.now_s) if state.lives_on(model, device)]",
        "for model in candidates(state, turn.now_s)]",
        seed=68,
    ),
    Mutant(
        "a lost answer is waited for for ever",
        "pressure.py",
        "until_s = turn.now_s + config.SHRINK_TIMEOUT_S",
        "until_s = turn.now_s + config.SHRINK_TIMEOUT_S + 1e9",
        seed=15,
    ),
    Mutant(
        "models go before they have shrunk",
        "pressure.py",
        "if candidate is not None:",
        "if candidate is not None and candidate[1].leases:",
    ),
    Mutant(
        "the busy shrink before the idle",
        "pressure.py",
        "(bool(ready.leases), model.last_used_s",
        "(not ready.leases, model.last_used_s",
        seed=9,
    ),
    Mutant(
        "a group gives back what the device lacks that lacks least",
        "pressure.py",
        "excess_bytes = max(\n",
        "excess_bytes = min(\n",
        seed=160,
    ),
    Mutant(
        "a load begins above the marks",
        "placing.py",
        "if fitting and turn.state.is_pressed(fitting[0].device):",
        "if fitting and turn.state.stopping:",
        seed=18,
    ),
    Mutant(
        "workers of a former controller stay though they do not fit",
        "adopting.py",
        "if state.reserved_on(one, here) + need_bytes * ranks > one.budget_bytes:",
        "if need_bytes * ranks > one.budget_bytes:",
    ),
    Mutant(
        "what has no room is forgotten while it still lives",
        "adopting.py",
        "turn.stop_worker(model, phases.StopReason.SURPLUS)",
        "turn.do(StopWorker(event.worker, event.digest, phases.StopReason.SURPLUS))",
    ),
    Mutant(
        "models live on where their machine is lost",
        "machines.py",
        "for model in turn.models() if device.lost else ():",
        "for model in turn.models() if device.lost and turn.state.stopping else ():",
    ),
    Mutant(
        "a load is placed on a lost machine",
        "homes.py",
        "present = tuple(plan for plan, place in useful if not place.lost)",
        "present = tuple(plan for plan, place in useful)",
    ),
    Mutant(
        "queued models keep the plans that they had",
        "machines.py",
        "        plan_anew(turn)\n",
        "",
    ),
    Mutant(
        "who could live on a lost machine alone waits for it",
        "homes.py",
        "if error is None and closest.lost:",
        "if error is None and closest.lost and not closest.node:",
    ),
    Mutant(
        "who could live on a lost machine alone is too large",
        "homes.py",
        "places = groups_of(devices, ranks)\n",
        "present = tuple(device for device in devices if not device.lost)\n"
        "        places = groups_of(present or devices, ranks)\n",
    ),
    Mutant(
        "who waits for a load on a lost machine is forgotten",
        "ends.py",
        "            if demand.stands:\n",
        "            if demand.wanted:\n",
    ),
    Mutant(
        "what drains on a lost machine drains on",
        "ends.py",
        "        case phases.Draining():\n            turn.end(model, phases.UNLOADED)\n",
        "",
        seed=243,
    ),
    Mutant(
        "what leaves a lost machine never has left",
        "ends.py",
        "        case phases.Unloading() as unloading:\n"
        "            end_unload(turn, model, unloading)\n",
        "",
    ),
    Mutant(
        "the places of a device are not counted",
        "room.py",
        "            free_places[home] -= 1\n",
        "",
        seed=40,
    ),
    Mutant(
        "workers that come back stay though there is no place",
        "adopting.py",
        "len(here) >= one.models_max",
        "len(here) > one.models_max",
        seed=272,
    ),
    Mutant(
        "a group begins where one of its devices has room",
        "victims.py",
        "nbytes = max(lack.nbytes for lack in lacks)",
        "nbytes = min(lack.nbytes for lack in lacks)",
        seed=39,
    ),
    Mutant(
        "ranks beyond the first count on no device",
        "room.py",
        "for home in free_bytes.keys() & {*plan.devices}:",
        "for home in free_bytes.keys() & {plan.devices[0]}:",
        seed=68,
    ),
    Mutant(
        "a group begins beside loads on its other devices",
        "state.py",
        "not device.parts.keys().isdisjoint(plan.devices)",
        "next(iter(device.parts)) in plan.devices",
        seed=382,
    ),
    Mutant(
        "victims for a group need free its first device alone",
        "victims.py",
        "first, *further = short.each\n    return",
        "first, *further = short.each[:1]\n    return",
        seed=184,
    ),
    Mutant(
        "a grace never ends",
        "schedule.py",
        "turn.now_s >= phase.until_s:",
        "turn.now_s >= phase.until_s + 1e9:",
    ),
)


def describe_finding(mutant: Mutant, folder: Path, *, seeds: int, first: int = 0) -> str | None:
    """Return what the simulation says of a mutant; None: it does not notice, in so many seeds."""
    package = folder / "mlxd_controller"
    shutil.copytree(CORE, package / "core", ignore=shutil.ignore_patterns("__pycache__"))
    (package / "__init__.py").touch()
    (target,) = (package / "core").rglob(mutant.file)
    source = target.read_text(encoding="utf-8")
    assert source.count(mutant.text) == 1, f"{mutant.file} does not say {mutant.text!r} once"
    target.write_text(source.replace(mutant.text, mutant.instead), encoding="utf-8")
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    ran = subprocess.run(
        [sys.executable, "-m", "tests.simulation.run", str(first), str(first + seeds)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=RUN_S_MAX,
        check=False,
    )
    assert ran.returncode in (0, 1), ran.stderr
    if ran.returncode == 0:
        return None
    by_rule = ("Violation", "AssertionError")
    assert ran.stdout.startswith("seed "), ran.stdout + ran.stderr
    assert any(f" {kind}: " in ran.stdout for kind in by_rule), (
        f"no fault, but broken: {ran.stdout}"
    )
    return ran.stdout.strip()
