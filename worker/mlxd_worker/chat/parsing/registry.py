"""Which family writes its answers how: a line a family, found by what its template writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from mlxd_worker.chat.parsing import harmony, syntaxes
from mlxd_worker.chat.parsing.harmony import HarmonyParser
from mlxd_worker.chat.parsing.llama3 import PYTHON_TAG, Llama3Parser
from mlxd_worker.chat.parsing.marked import MarkedParser
from mlxd_worker.chat.parsing.pieces import Begin, CallSyntax, Parser, Think, Tools

Make = Callable[[Tools, Begin], Parser]


@dataclass(frozen=True, slots=True)
class Family:
    """How calls are written. It is the first whose `written` all stand in the template."""

    name: str
    written: tuple[str, ...]
    syntax: CallSyntax | None = None
    """None where the family has a parser of its own."""
    marks: tuple[str, ...] = ()
    """Marks beside those of the syntax, which must be seen in the output."""
    make: Make | None = None


_DSML: Final = syntaxes.DSML_MARK
FAMILIES: Final = (
    Family("harmony", (harmony.CHANNEL, harmony.MESSAGE), None, harmony.MARKS, HarmonyParser),
    Family("deepseek", (syntaxes.DEEPSEEK.open,), syntaxes.DEEPSEEK, syntaxes.DEEPSEEK_MARKS),
    Family("deepseek_dsml", (_DSML, "function_calls>"), syntaxes.DSML_V3, (_DSML,)),
    Family("deepseek_dsml", (_DSML, "tool_calls>"), syntaxes.DSML_V4, (_DSML,)),
    Family("kimi", (syntaxes.KIMI.open,), syntaxes.KIMI, syntaxes.KIMI_MARKS),
    Family("mistral", (syntaxes.MISTRAL.open,), syntaxes.MISTRAL, syntaxes.MISTRAL_MARKS),
    Family("glm4", ("<tool_call>", "<arg_key>"), syntaxes.GLM4),
    Family("qwen3_coder", ("<tool_call>", "<function=", "<parameter="), syntaxes.QWEN3_CODER),
    Family("hermes", ("<tool_call>",), syntaxes.HERMES),
    Family("llama3", (PYTHON_TAG,), None, (PYTHON_TAG,), Llama3Parser),
    Family("llama3", ('"parameters": dictionary',), None, (PYTHON_TAG,), Llama3Parser),
)
PLAIN: Final = Family("plain", ())
THINKS: Final = (Think("<think>", "</think>"), Think("[THINK]", "[/THINK]"))


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """How the answers of one model are told apart."""

    family: Family
    think: Think | None

    @property
    def bare_json(self) -> bool:
        """Whether a call is JSON that no mark sets apart."""
        return self.family.make is Llama3Parser

    def without_calls(self) -> OutputFormat:
        """Return the same for answers in which nothing is a call."""
        return OutputFormat(PLAIN, self.think)

    @property
    def marks(self) -> tuple[str, ...]:
        """Every mark that is looked for."""
        syntax = self.family.syntax
        own = () if syntax is None else (syntax.open, *filter(None, (syntax.close,)))
        think = () if self.think is None else (self.think.open, self.think.close)
        return (*own, *self.family.marks, *think)

    def parser(
        self, tools: Tools, *, prompt: str, continued: str | None = None, held: bool = False
    ) -> Parser:
        """Return what reads one answer.

        prompt, continued: as `begin` takes them. held: whether its calls are drawn under a grammar,
        so that their JSON is sound.
        """
        begin = self.begin(prompt, continued)
        if self.family.make is not None:
            return self.family.make(tools, begin)
        return MarkedParser(self.think, self.family.syntax, tools, begin, held=held)

    def begin(self, prompt: str, continued: str | None = None) -> Begin:
        """Return where an answer begins.

        prompt: the end of the rendered conversation, which may have opened the reasoning.
        continued: the content that the answer continues; None for a new message.
        """
        think = self.think
        if continued is not None:
            inside = think is not None and continued.rfind(think.open) > continued.rfind(
                think.close
            )
            return Begin(reasoning=inside, middle=not inside)
        return Begin(reasoning=think is not None and prompt.rstrip().endswith(think.open))


def output_format(template: str) -> OutputFormat:
    """Return how a model of this template writes its answers."""
    fits = (each for each in FAMILIES if all(mark in template for mark in each.written))
    family = next(fits, PLAIN)
    if family.make is HarmonyParser:
        return OutputFormat(family, None)
    # Some templates only take reasoning out of former answers: the model opens it by itself.
    thinks = (each for each in THINKS if each.open in template or each.close in template)
    return OutputFormat(family, next(thinks, None))
