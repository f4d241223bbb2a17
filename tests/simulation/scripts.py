"""Scripted conversations with the core: events in, the expected actions out, as plain text.

A script opens with `#` lines that say what it proves, then `machine ...`, then events. What the
core answers stands below each event, indented. `python -m tests.simulation.scripts --rewrite` puts
the present answers in place of those that stand there; the change is read as a diff.

    machine 2.0 [kind=cuda] [max_loaded=N] [age=S] [keep_alive=S]   room for two models of size 1
    machine 2.0 3.0 [...]                                           two devices, gpu0 and gpu1
    arrive TICKET MODEL [size=MIB] [keep_alive=S]
    load TICKET MODEL [size=MIB] [pinned=yes|no] [priority=N] [keep_alive=S] [context=N]
    adopt MODEL [size=MIB] [pinned=yes]                     a ready worker of a former controller
    release TICKET | unload TICKET MODEL [grace=S] [force=yes]
    ready MODEL | fail MODEL | die MODEL | gone MODEL               news of the model's own worker
    shrunk MODEL                                                    it has answered to a shrink
    late ready|gone|died|shrunk WORKER                              news of a worker by its number
    memory ROOM ... [MODEL=MIB ...]        what is usable of each device, what workers say they hold
    memory lost ROOM ... [MODEL=MIB ...]   likewise; the machine of this device is out of reach
    wait S | shutdown S
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

from mlxd_controller.core import actions as a
from mlxd_controller.core import events as ev
from mlxd_controller.core.schedule import decide
from mlxd_controller.core.state import State, next_wake_s
from mlxd_models.fit.plan import Device
from mlxd_models.fit.planner import plan_load
from mlxd_shared.config import MIB
from mlxd_shared.domain.errors import WorkerExited, WorkerLost
from mlxd_shared.domain.requests import LoadSpec
from tests.controller.core.conversation import check_state
from tests.support.model_facts import device, facts, need_mib

FOLDER = Path(__file__).with_name("scenarios")
SIZE_MIB = 10
ANSWER = "    "
WAKES_MAX = 20


def machine(words: list[str]) -> State:
    """Return the state that a `machine` line describes."""
    rooms, options = [word for word in words if "=" not in word], _options(words)
    kind = options.get("kind", "cpu")
    names = ["cpu"] if len(rooms) == 1 else [f"gpu{index}" for index in range(len(rooms))]
    return State(
        devices=tuple(_device(room, kind, name) for room, name in zip(rooms, names, strict=True)),
        max_loaded=int(options["max_loaded"]) if "max_loaded" in options else None,
        age_min_s=float(options.get("age", "0")),
        keep_alive_s=float(options.get("keep_alive", "300")),
    )


def _device(room: str, kind: str, name: str) -> Device:
    return device(math.ceil(float(room) * need_mib(SIZE_MIB, kind=kind)), kind=kind, name=name)


def _options(words: list[str]) -> dict[str, str]:
    return dict(word.split("=", 1) for word in words if "=" in word)


class Script:
    """One conversation; time stands still but for `wait`, which wakes as the edge would."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.now_s = 0.0
        self._models: dict[str, str] = {}

    def say(self, line: str) -> list[str]:
        """Return the core's answers to one line, as text."""
        verb, *words = line.split()
        if verb == "wait":
            return self._wait(float(words[0]))
        return [self._text(action) for action in self._send(self._event(verb, words))]

    def _wait(self, seconds: float) -> list[str]:
        """Let time pass, with a tick whenever the core asked for one."""
        until_s = self.now_s + seconds
        answers = []
        for _ in range(WAKES_MAX):
            self.now_s = max(self.now_s, min(until_s, next_wake_s(self.state)))
            passed = self.now_s - until_s + seconds
            said = [self._text(action) for action in self._send(ev.Tick())]
            answers += [f"{text} after {passed:g} s" for text in said]
            if self.now_s >= until_s:
                return answers
        raise AssertionError("the core wakes up for nothing, again and again")

    def _send(self, event: ev.Event) -> tuple[a.Action, ...]:
        self.state, wanted = decide(self.state, event, self.now_s)
        check_state(self.state)
        return wanted

    def _event(self, verb: str, words: list[str]) -> ev.Event:
        named = [word for word in words if "=" not in word]
        options = _options(words)
        match verb, named:
            case (("arrive" | "load"), [ticket, name]):
                return self._make_request(verb, ticket, name, options)
            case "adopt", [name]:
                return self._make_adopted(name, options)
            case "release", [ticket]:
                return ev.Released(ticket, self._models[ticket])
            case "unload", [ticket, name]:
                self._models[ticket] = name
                grace_s = float(options.get("grace", "30"))
                return ev.UnloadAsked(ticket, name, grace_s, options.get("force") == "yes")
            case (("ready" | "fail" | "die" | "gone" | "shrunk"), [name]):
                return _news(verb, self._worker(name), name)
            case "late", [what, worker]:
                return _news({"died": "die"}.get(what, what), int(worker), "m")
            case "memory", rooms:
                return self._memory(rooms, options)
            case "shutdown", [grace_s]:
                return ev.ShutDown(float(grace_s))
            case _:
                raise ValueError(f"not an event: {verb} {words}")

    def _memory(self, rooms: list[str], options: dict[str, str]) -> ev.Event:
        measured = tuple(
            replace(known, lost=True)
            if room == "lost"
            else replace(_device(room, known.kind, known.name), budget_bytes=known.budget_bytes)
            for known, room in zip(self.state.devices, rooms, strict=True)
        )
        arrays = {self._worker(name): int(mib) * MIB for name, mib in options.items()}
        return ev.MemoryRead(measured, arrays)

    def _worker(self, name: str) -> int:
        worker = self.state.models[name].worker
        assert worker is not None, f"{name} has no worker"
        return worker

    def _text(self, action: a.Action) -> str:
        """Return an action as text; where it begins a load, if there is a choice."""
        text = _text(action)
        if not isinstance(action, a.StartLoad) or len(self.state.devices) == 1:
            return text
        return f"{text}, on {action.plan.device}"

    def _make_request(self, verb: str, ticket: str, name: str, options: dict[str, str]) -> ev.Event:
        self._models[ticket] = name
        model = facts(int(options.get("size", SIZE_MIB)))
        keep_alive_s = float(options["keep_alive"]) if "keep_alive" in options else None
        if verb == "arrive":
            return ev.Arrived(ticket, name, name, f"/{name}", model, keep_alive_s)
        spec = LoadSpec(
            context_length=int(options["context"]) if "context" in options else None,
            pinned=options["pinned"] == "yes" if "pinned" in options else None,
            priority=int(options["priority"]) if "priority" in options else None,
            keep_alive_s=keep_alive_s,
        )
        return ev.LoadAsked(ticket, name, name, f"/{name}", model, spec)

    def _make_adopted(self, name: str, options: dict[str, str]) -> ev.Event:
        model = facts(int(options.get("size", SIZE_MIB)))
        home = self.state.device_named(options.get("on", self.state.devices[0].name))
        assert home is not None
        choice = replace(plan_load(model, LoadSpec(), home).choice, prefix_bytes=0)
        spec = LoadSpec(pinned=options.get("pinned") == "yes")
        return ev.Adopted(
            self.state.next_worker,
            name,
            name,
            f"/{name}",
            model,
            choice,
            home.name,
            spec,
            load_s=1.0,
        )


def _news(verb: str, worker: int, name: str) -> ev.Event:
    match verb:
        case "ready":
            return ev.Ready(worker)
        case "fail":
            return ev.LoadFailed(worker, WorkerExited(name, (), 3))
        case "die":
            return ev.WorkerDied(worker, WorkerLost(name, cause="signal 9"))
        case "gone":
            return ev.Unloaded(worker)
        case "shrunk":
            return ev.Shrunk(worker)
        case _:
            raise ValueError(f"no such news: {verb}")


def _text(action: a.Action) -> str:
    match action:
        case a.StartLoad():
            plan = f"{action.plan.context_length} tokens, {action.plan.need_bytes // MIB} MiB"
            return f"start {action.worker} for {action.name}: {plan}"
        case a.StopWorker(worker, digest, reason):
            return f"stop {worker} of {digest}: {reason.value}"
        case a.Shrink(worker, digest, target_bytes):
            return f"shrink {worker} of {digest} to {target_bytes // MIB} MiB"
        case a.AbortStreams(tickets, error):
            return f"abort {' '.join(tickets)}: {type(error).__name__}"
        case a.Grant(ticket, worker, waited_s):
            return f"grant {ticket} on {worker}, waited {waited_s:g} s"
        case a.Done(ticket, streams_aborted):
            return f"done {ticket}" + (f", {streams_aborted} aborted" if streams_aborted else "")
        case a.Refuse(ticket, error):
            return f"refuse {ticket}: {type(error).__name__}"
        case a.DescribeRanks():
            return "describe what ranks have"


def replay(text: str) -> str:
    """Return the script with the core's present answers."""
    lines: list[str] = []
    script: Script | None = None
    for line in text.splitlines():
        if line.startswith(ANSWER):
            continue
        lines.append(line)
        if not line or line.startswith("#"):
            continue
        verb, *words = line.split()
        if verb == "machine":
            script = Script(machine(words))
            continue
        assert script is not None, "a script begins with its machine"
        lines += [ANSWER + answer for answer in script.say(line)]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Compare every script, or rewrite it; the exit status is the number of those that differ."""
    differing = 0
    for path in sorted(FOLDER.glob("*.txt")):
        text = path.read_text(encoding="utf-8")
        replay_text = replay(text)
        if replay_text == text:
            continue
        differing += 1
        if "--rewrite" in sys.argv[1:]:
            path.write_text(replay_text, encoding="utf-8")
        sys.stdout.write(f"{path.name} differs\n")
    return differing


if __name__ == "__main__":
    sys.exit(main())
