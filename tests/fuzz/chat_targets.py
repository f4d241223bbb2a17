"""Targets about chats: templates through the process that renders them, answers, tokenizers."""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import random
import time
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from mlxd_models.files.chat_template import read_template
from mlxd_shared.domain.chats import Chat, ChatMessage, ToolCall, json_object
from mlxd_shared.domain.errors import InvalidRequest
from mlxd_worker.chat.answer import Answer, PartPiece
from mlxd_worker.chat.format import ChatFormat
from mlxd_worker.chat.parsing.pieces import tools_of
from mlxd_worker.chat.parsing.registry import OutputFormat, output_format
from mlxd_worker.chat.room import RenderRoom
from mlxd_worker.text.tokenizer import Tokenizer as OwnTokenizer
from mlxd_worker.tokenizing.files import load_tokenizer
from tests.fuzz.inputs import encode, text_of, wrong
from tests.real_inputs import REAL_INPUTS
from tests.worker.made_tokenizers import BOS_ID, EOS_ID, byte_fallback, byte_level, with_bos

RENDER_S: Final = 3.0
"""Of which the start of a process may take a part, which is large on a busy machine."""
RENDER_WALL_S_MAX: Final = 60.0
LETTERS_MAX: Final = 2000
"""Longer answers do not come letter by letter."""
CHATML: Final = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}{{ strftime_now('%d %B') }}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
STATEMENTS: Final = (
    "{% for m in messages %}", "{% for a in range(99999) %}", "{% endfor %}", "{% if m %}",
    "{% elif tools %}", "{% else %}", "{% endif %}", "{% set x = m %}", "{% set x.y = 'a' * 9 %}",
    "{% macro f(x) %}", "{% endmacro %}", "{% break %}", "{% continue %}", "{% generation %}",
    "{% endgeneration %}", "{% include 'a' %}", "{% import '/etc/passwd' as x %}", "{% raw %}",
    "{% endraw %}", "{% filter upper %}", "{% endfilter %}", "{% call f() %}", "{% endcall %}",
    "{#", "#}", "{{", "}}", "{%", "%}", "<|im_start|>", "<think>", "\n", "a",
)  # fmt: skip
VALUES: Final = (
    "messages", "m", "m.content", "tools", "'ab'", "7", "9e99", "none", "x", "namespace(s='a')",
    "range(9999999)", "cycler(1, 2)", "joiner()", "lipsum(9)", "dict(a=1)", "self", "loop",
    "raise_exception", "strftime_now('%Y' * 99)", "''.__class__", "bos_token", "[[]] * 9",
)  # fmt: skip
FILTERS: Final = (
    "trim", "tojson", "tojson(indent=9999)", "dictsort", "list", "upper", "join('x')", "length",
    "replace('a', 'aaaa')", "center(99999)", "map(attribute='a')", "groupby('a')", "batch(2)",
    "format(1, 2)", "pprint", "urlize", "wordwrap(0)", "first", "sum", "int", "attr('__class__')",
)  # fmt: skip
OPERATORS: Final = ("+", "~", "*", "**", "-", "%", "in", "is defined and", "if m else", "[1:]")
TEXTS: Final = (
    "", "hi", "<|im_start|>", "<|im_", "end|>", "<think>", "{{ 7 * 7 }}", "\x00",
    "\u2028é日本\U0001f600",
    " \n ", "a" * 999, "</think>x", "<s>" * 50,
)  # fmt: skip
TOOL: Final = '{"name": "f", "parameters": {"properties": {"a": {"type": "string"}, "b": {}}}}'
CALLS: Final[dict[OutputFormat, str]] = {
    output_format(written): call
    for written, call in (
        ("<tool_call> <think>", '<tool_call>{"name": "f", "arguments": {"a": "b"}}</tool_call>'),
        (
            "<tool_call> <function= <parameter= <think>",
            "<tool_call><function=f><parameter=a>b</parameter></function></tool_call>",
        ),
        (
            "<tool_call> <arg_key> <think>",
            "<tool_call>f<arg_key>b</arg_key><arg_value>[1]</arg_value></tool_call>",
        ),
        ("[TOOL_CALLS] [THINK]", '[TOOL_CALLS]f[ARGS]{"a": "b"}'),
        (
            "<\uff5ctool\u2581calls\u2581begin\uff5c> </think>",
            (
                "<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>f"
                "<\uff5ctool\u2581sep\uff5c>{}<\uff5ctool\u2581call\u2581end\uff5c>"
                "<\uff5ctool\u2581calls\u2581end\uff5c>"
            ),
        ),
        (
            "\uff5cDSML\uff5c function_calls>",
            (
                '<\uff5cDSML\uff5cfunction_calls><\uff5cDSML\uff5cinvoke name="f">'
                "</\uff5cDSML\uff5cinvoke></\uff5cDSML\uff5cfunction_calls>"
            ),
        ),
        (
            "<|tool_calls_section_begin|>",
            (
                "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
                "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"
            ),
        ),
        ("<|python_tag|>", '{"name": "f", "parameters": {"a": "b"}}'),
        (
            "<|channel|> <|message|>",
            "<|start|>assistant to=functions.f<|channel|>commentary<|message|>{}<|call|>",
        ),
        ("", ""),
    )
}
"""How each family calls."""
PIECES: Final = (
    "<function=f>", "</function>", "<parameter=a>", "</parameter>", "<arg_key>", "</arg_key>",
    "<arg_value>", "</arg_value>", '<\uff5cDSML\uff5cinvoke name="f">', "</\uff5cDSML\uff5cinvoke>",
    '<\uff5cDSML\uff5cparameter name="a" string="false">', "</\uff5cDSML\uff5cparameter>",
    "```json",
    "```", "[ARGS]", "functions.f:0", " to=functions.f", "final", "analysis", "f.call(a=1)", "f",
    " ", "\n", " " * 99, "x", "1e999", '"\\ud800"', "NaN", "[" * 2000, "é日本\U0001f600",
)  # fmt: skip


@functools.cache
def _room() -> RenderRoom:
    return RenderRoom(limit_s=RENDER_S)


def close() -> None:
    """End the processes that rendered; others are made when they are needed."""
    asyncio.run(_room().close())
    _room.cache_clear()


@functools.cache
def _tokenizer() -> OwnTokenizer:
    raw = with_bos(byte_level())
    raw.add_special_tokens([AddedToken("<|im_start|>"), AddedToken("<|im_end|>")])
    raw.add_tokens([AddedToken("<think>"), AddedToken("</think>")])
    return OwnTokenizer(raw, bos_id=BOS_ID, add_bos=None, eos_ids=(EOS_ID,))


@functools.cache
def _real_templates() -> tuple[str, ...]:
    files = sorted((REAL_INPUTS / "templates").glob("*.jinja*"))
    return CHATML, *(file.read_text(encoding="utf-8") for file in files)


def warm() -> None:
    """Read what every input needs, whose files lie elsewhere."""
    _real_templates()
    _tokenizer()


def template(rng: random.Random, place: Path) -> None:
    """A real template with a few things wrong, or one out of a grammar, and any conversation."""
    text = (
        _mutate(rng.choice(_real_templates()), rng) if rng.random() < 0.6 else _make_template(rng)
    )
    (place / "chat_template.jinja").write_text(text, encoding="utf-8")
    template_found = read_template(place)
    assert template_found is not None
    begin_s = time.monotonic()
    prompt = asyncio.run(_room().render(ChatFormat(template_found, _tokenizer()), _chat(rng)))
    assert time.monotonic() - begin_s < RENDER_WALL_S_MAX
    assert max(prompt.ids, default=0) < _tokenizer().vocab_size


def answers(rng: random.Random, place: Path) -> None:
    """Any text as the answer of any family, however it comes; one without a call is refused."""
    wanted = rng.choice(list(CALLS))
    text = "".join(_answer_bit(wanted, rng) for _ in range(rng.randrange(20)))
    ends = sorted({0, len(text), *(rng.randrange(len(text) + 1) for _ in range(rng.randrange(9)))})
    whole = _parts(wanted, [text])
    assert _parts(wanted, [text[a:b] for a, b in itertools.pairwise(ends)]) == whole
    if len(text) < LETTERS_MAX:
        assert _parts(wanted, list(text)) == whole
    calls = [part.call for part in whole if part.call is not None]
    for call in calls:
        json_object(call.arguments_json)
        call.name.encode()
    if not calls:
        raise InvalidRequest.of("answer", f"no call in {place.name}")


def tokenizer(rng: random.Random, place: Path) -> None:
    """A tokenizer.json and its settings with a few things wrong, read and then used."""
    settings = {
        "bos_token": "<s>", "eos_token": {"content": "</s>"}, "add_bos_token": True,
        "chat_template": rng.choice([CHATML, [{"name": "default", "template": CHATML}]]),
    }  # fmt: skip
    written: dict[str, Any] = {
        "tokenizer.json": rng.choice(_made_files()), "tokenizer_config.json": settings,
    }  # fmt: skip
    odd = rng.choice(["tokenizer.json"] * 4 + ["tokenizer_config.json"])
    for name, value in written.items():
        raw = json.dumps(value).encode()
        if name == odd:
            mutated = wrong(value, rng)
            raw = text_of(mutated, rng) if rng.random() < 0.2 else encode(mutated)
        (place / name).write_bytes(raw)
    own = load_tokenizer(place)
    template_found = read_template(place)
    for text in (*TEXTS, "once upon a time"):
        ids = own.encode(text)
        own.decode(ids, skip_special=False)
        stream = own.detokenizer()
        "".join((*map(stream.push, ids), stream.finish())).encode()
    for token_id in range(min(own.vocab_size, 8)):
        own.token_bytes(token_id)
    if template_found is not None:
        wanted = ChatFormat(template_found, own)
        wanted.job(_chat(rng))
        wanted.encode("<|im_start|>user\n<think>hi<|im_end|>", "123")


TARGETS = (template, answers, tokenizer)


def _chat(rng: random.Random) -> Chat:
    messages = [ChatMessage("user", rng.choice(TEXTS), name=rng.choice(["", "Bo"]))]
    for _ in range(rng.randrange(4)):
        call = ToolCall(
            "f", rng.choice(['{"a": "<s>"}', "{}", '{"a": [1, {"b": null}]}']), "abc123def"
        )
        messages += [
            ChatMessage(
                "assistant", rng.choice(TEXTS), rng.choice(TEXTS), (call,) * rng.randrange(3)
            ),
            rng.choice([ChatMessage("tool", "42", tool_call_id="abc123def"), messages[0]]),
        ]  # fmt: skip
    continues = rng.random() < 0.1
    if continues:
        messages.append(ChatMessage("assistant", rng.choice(TEXTS)))
    tools = (TOOL,) if rng.random() < 0.5 else ()
    return Chat(tuple(messages), tools, continue_final_message=continues or None, now_s=1e9)


def _mutate(text: str, rng: random.Random) -> str:
    """Return a template with bits left out, doubled, put elsewhere or put in."""
    for _ in range(rng.randrange(3)):
        a, b = sorted(rng.randrange(len(text) + 1) for _ in range(2))
        b = min(b, a + rng.choice([1, 4, 40]))
        place = rng.randrange(len(text) + 1)
        match rng.randrange(4):
            case 0:
                text = text[:a] + text[b:]
            case 1:
                text = text[:b] + text[a:b] + text[b:]
            case 2:
                text = text[:place] + text[a:b] + text[place:]
            case _:
                text = text[:place] + rng.choice(STATEMENTS) + text[place:]
    return text


def _make_template(rng: random.Random) -> str:
    bits: list[str] = []
    for _ in range(rng.randrange(1, 12)):
        if rng.random() < 0.5:
            bits.append(rng.choice(STATEMENTS))
            continue
        value = rng.choice(VALUES)
        for _ in range(rng.randrange(3)):
            more = f" | {rng.choice(FILTERS)}"
            both = f" {rng.choice(OPERATORS)} {rng.choice(VALUES)}"
            value += rng.choice([more, both])
        bits.append(f"{{{{ {value} }}}}")
    return "".join(bits)


def _answer_bit(wanted: OutputFormat, rng: random.Random) -> str:
    match rng.randrange(5):
        case 0:
            return rng.choice(PIECES)
        case 1 if wanted.marks:
            mark = rng.choice(wanted.marks)
            return mark[: rng.choice([len(mark)] * 5 + [rng.randrange(len(mark))])]
        case 2:
            value = wrong({"name": "f", "arguments": {"a": "b", "b": [1]}}, rng)
            return text_of(value, rng).decode("utf-8", "replace")[:999]
        case 3:
            return CALLS[wanted]
        case _:
            return rng.choice(['{"name": "f", "arguments": {"a": 1}}', '{"a": "b"}', "{}", "text"])


def _parts(wanted: OutputFormat, texts: list[str]) -> list[PartPiece]:
    """Return the parts of an answer that comes in these texts, the pieces of each as one."""
    answer = Answer(wanted.parser(tools_of([TOOL]), prompt=""), "r")
    parts: dict[int, PartPiece] = {}
    for text in (*texts, ""):
        for piece in answer.read(text, ends=False):
            _join(parts, piece)
    for piece in answer.read("", ends=True):
        _join(parts, piece)
    return list(parts.values())


def _join(parts: dict[int, PartPiece], piece: PartPiece) -> None:
    known = parts.get(piece.index)
    text = piece.text if known is None else known.text + piece.text
    parts[piece.index] = PartPiece(piece.index, text, piece.reasoning, piece.call)


@functools.cache
def _made_files() -> tuple[dict[str, Any], ...]:
    """Return small tokenizers of each kind there is, as JSON."""
    words = {"[UNK]": 0, "<s>": 1, "</s>": 2, "a": 3, "##b": 4, "once": 5}
    piece = Tokenizer(models.WordPiece(words, unk_token="[UNK]"))
    level = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    level.pre_tokenizer = pre_tokenizers.Whitespace()
    grams = Tokenizer(
        models.Unigram([("<unk>", 0.0), ("<s>", -1.0), ("</s>", -1.5), ("a", -2.0)], 0)
    )
    tokenizers = (with_bos(byte_level()), with_bos(byte_fallback()), piece, level, grams)
    read: list[dict[str, Any]] = [
        json.loads(raw_tokenizer.to_str()) for raw_tokenizer in tokenizers
    ]
    return tuple(read)
