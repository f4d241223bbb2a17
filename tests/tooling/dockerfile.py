"""Enough of a Dockerfile's grammar to ask what a stage is made of, and to run what it runs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction: its keyword in capitals, and the rest of its line."""

    keyword: str
    rest: str


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage: its name, what it begins from, and its instructions in order."""

    name: str
    parent: str
    body: tuple[Instruction, ...]

    def all(self, keyword: str) -> list[str]:
        """The rest of each instruction of this kind."""
        return [one.rest for one in self.body if one.keyword == keyword]


def parse(text: str) -> dict[str, Stage]:
    """Answer the stages by name; each of ours has one."""
    stages: dict[str, Stage] = {}
    body: list[Instruction] = []
    head = ("", "")
    for instruction in (*_instructions(text), Instruction("FROM", "end AS end")):
        if instruction.keyword != "FROM":
            body.append(instruction)
            continue
        if head[0]:
            stages[head[0]] = Stage(*head, tuple(body))
        parent, _, name = instruction.rest.partition(" AS ")
        head, body = (name, parent), []
    return stages


def chain(stages: Mapping[str, Stage], name: str) -> list[Stage]:
    """Answer the stages that `name` begins from, the first one first, itself last."""
    stages_of_chain: list[Stage] = []
    while name in stages:
        stages_of_chain.insert(0, stages[name])
        name = stages[name].parent
    return stages_of_chain


def sources(stages: Mapping[str, Stage], name: str) -> set[str]:
    """Answer the other stages that a stage copies from, through all it begins from."""
    copies = (line for stage in chain(stages, name) for line in stage.all("COPY"))
    return {match[1] for line in copies if (match := re.match(r"--from=(\S+)", line))}


def exec_form(rest: str) -> list[str]:
    """Answer the words of a CMD, also the one inside a HEALTHCHECK."""
    words = json.loads(rest[rest.index("[") :])
    assert all(isinstance(word, str) for word in words)
    return list(words)


def _instructions(text: str) -> Iterator[Instruction]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in "\n".join(lines).replace("\\\n", "").splitlines():
        keyword, _, rest = line.strip().partition(" ")
        if keyword:
            yield Instruction(keyword.upper(), rest.strip())
