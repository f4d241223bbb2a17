"""The dialects of calls that are served, a vocabulary with all their marks, and some tools."""

# ruff: noqa: RUF001 - letters of the models' own

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jsonschema
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer

from mlxd_worker.chat.parsing.pieces import Called, Parser, Piece, Said, tools_of
from mlxd_worker.chat.parsing.registry import OutputFormat, output_format
from mlxd_worker.constraints.calls.grammar import CallFormat
from mlxd_worker.constraints.compiler import Constraints
from mlxd_worker.text.control_tokens import ControlTokens
from mlxd_worker.text.tokenizer import Tokenizer
from mlxd_worker.tokenizing.files import load_tokenizer
from tests.support.tiny_model import VOCAB, write_tiny_model
from tests.worker.made_tokenizers import SPECIAL, with_bos

WRITTEN = {
    "hermes": "<tool_call></tool_call><think></think>",
    "qwen3_coder": "<tool_call></tool_call><function=<parameter=",
    "glm4": "<tool_call></tool_call><arg_key></arg_key><arg_value></arg_value><think></think>",
    "mistral": "[TOOL_CALLS][ARGS][CALL_ID][THINK][/THINK]",
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜><｜tool▁call▁begin｜><｜tool▁call▁end｜>"
    "<｜tool▁sep｜><think></think>",
    "deepseek_v3_2": "｜DSML｜ function_calls><think></think>",
    "deepseek_v4": "｜DSML｜ tool_calls><think></think>",
    "kimi": "<|tool_calls_section_begin|><|tool_calls_section_end|><|tool_call_begin|>"
    "<|tool_call_end|><|tool_call_argument_begin|>",
    "llama3": "<|python_tag|>",
    "harmony": "<|start|><|channel|><|message|><|constrain|><|end|>",
}
"""What the templates of each family write."""
MARKS = (
    "<tool_call>", "</tool_call>", "<think>", "</think>", "<arg_key>", "</arg_key>",
    "<arg_value>", "</arg_value>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]",
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "｜DSML｜", "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>",
    "<|tool_call_argument_begin|>", "<|python_tag|>", "<|start|>", "<|channel|>", "<|message|>",
    "<|constrain|>", "<|end|>",
)  # fmt: skip
PIECES = ("!</", "</parameter>", '": "', '"}', ">\n", ">x")
"""Ordinary tokens, some of which have the end of a mark and more."""
WEATHER = {
    "type": "object",
    "properties": {
        "place": {"type": "string"},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
        "unit": {"type": "string", "enum": ["C", "F"]},
    },
    "required": ["place", "unit"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": WEATHER,
    "now": NOTHING,
    "note": {"type": "object"},
}
TOOLS = (
    json.dumps(
        {
            "type": "function",
            "function": {"name": "get_weather", "strict": True, "parameters": WEATHER},
        }
    ),
    json.dumps({"name": "now", "strict": True}),
    json.dumps({"name": "note", "parameters": {"type": "object", "properties": {}}}),
)


def write_marked_model(folder: Path) -> Path:
    """Write a model of random weights whose vocabulary is bytes, `PIECES` and `MARKS`."""
    write_tiny_model(folder, context_max=1024)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: index for index, text in enumerate([*SPECIAL, *alphabet])}
    raw = RawTokenizer(models.BPE(vocabulary, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    raw.add_tokens([AddedToken(text, normalized=False) for text in PIECES])
    # Families differ in whether their marks are special.
    raw.add_tokens(
        [
            AddedToken(text, special=index % 2 == 0, normalized=False)
            for index, text in enumerate(MARKS)
        ]
    )
    assert raw.get_vocab_size() <= VOCAB
    with_bos(raw).save(str(folder / "tokenizer.json"))
    return folder


@dataclass(frozen=True)
class Speech:
    """One dialect, as a model with `tokenizer` speaks it."""

    name: str
    tokenizer: Tokenizer

    @cached_property
    def output(self) -> OutputFormat:
        """How its answers are told apart."""
        return output_format(WRITTEN[self.name])

    @cached_property
    def control(self) -> ControlTokens:
        """Its control tokens."""
        return self.tokenizer.control_tokens(written=WRITTEN[self.name], named=())

    @cached_property
    def constraints(self) -> Constraints:
        """What compiles its grammars."""
        return Constraints(self.tokenizer, VOCAB, self.control.ids)

    @property
    def shown(self) -> dict[int, str]:
        """The marks that are tokens."""
        return self.control.ids_of(self.output.marks)

    def format_of(self, tools: Sequence[str] = TOOLS, **fields: Any) -> CallFormat:
        """Return what calls of `tools` are held to."""
        return CallFormat(self.output, tuple(tools), **fields)

    def parser(self) -> Parser:
        """Return what reads an answer."""
        return self.output.parser(tools_of(TOOLS), prompt="", held=True)

    def read(self, text: str) -> list[Piece]:
        """Return the pieces of a whole answer."""
        parser = self.parser()
        return [*parser.push(text), *parser.finish()]


def load_speech(name: str, folder: Path) -> Speech:
    """Return a dialect as the model in `folder` speaks it."""
    return Speech(name, load_tokenizer(folder))


def calls_of(pieces: Sequence[Piece]) -> list[Called]:
    """Return the calls among an answer's pieces."""
    return [piece for piece in pieces if isinstance(piece, Called)]


def text_of(pieces: Sequence[Piece]) -> str:
    """Return what an answer says beside calls and reasoning."""
    return "".join(
        piece.text for piece in pieces if isinstance(piece, Said) and not piece.reasoning
    ).strip()


def check_calls(pieces: Sequence[Piece], *, several: bool) -> None:
    """Assert that an answer is calls of `TOOLS` whose arguments match."""
    calls = calls_of(pieces)
    assert calls
    assert not text_of(pieces)
    assert several or len(calls) == 1
    for call in calls:
        jsonschema.validate(json.loads(call.arguments_json), SCHEMAS[call.name])
