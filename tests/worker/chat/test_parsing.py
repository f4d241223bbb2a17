"""Answers told apart: each family's calls and reasoning, however the text is cut, nothing lost."""

# ruff: noqa: RUF001 - the letters of marks are the models' own

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxd_worker.chat.answer import Answer
from mlxd_worker.chat.parsing import harmony
from mlxd_worker.chat.parsing.pieces import Called, Piece, Said, Tools, tools_of
from mlxd_worker.chat.parsing.registry import OutputFormat, output_format
from tests.worker.chat.conversations import CLOCK, WEATHER
from tests.worker.chat.test_templates import template_of

TOOLS = tools_of([json.dumps(WEATHER), json.dumps(CLOCK)])
BERN = Called("get_weather", '{"place": "Bern"}')
BOTH = Called("get_weather", '{"place": "7", "days": 2}')
NOW = Called("now", "{}")


def make_thought(text: str) -> Said:
    return Said(text, reasoning=True)


HERMES = output_format("<tool_call> <think>")
CODER = output_format("<tool_call> <function= <parameter=")
GLM = output_format("<tool_call> <arg_key> <think>")
MISTRAL = output_format("[TOOL_CALLS] [THINK]")
DEEPSEEK = output_format("<｜tool▁calls▁begin｜> <think>")
DSML = output_format("｜DSML｜ function_calls> <think>")
DSML_4 = output_format("｜DSML｜ tool_calls> </think>")
KIMI = output_format("<|tool_calls_section_begin|>")
LLAMA = output_format("<|python_tag|>")
HARMONY = output_format("<|channel|> <|message|>")
PLAIN = output_format("")


@dataclass(frozen=True, slots=True)
class Sample:
    """An answer and what it is made of; adjoining pieces of a kind joined."""

    wanted: OutputFormat
    text: str
    pieces: tuple[Piece, ...]
    prompt: str = ""


CALL = '{"name": "get_weather", "arguments": {"place": "Bern"}}'
SAMPLES = {
    "plain": Sample(PLAIN, " Hi <think>you</think>\n", (Said(" Hi <think>you</think>\n"),)),
    "hermes": Sample(
        HERMES,
        f"<think>\nWell.\n\n</think>\n\nI look.\n<tool_call>\n{CALL}\n</tool_call>\n"
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        (make_thought("Well."), Said("I look."), BERN, NOW),
    ),
    "hermes text only": Sample(
        HERMES, "\n a < b, <tool> and <think>x</think>  \n", (
            Said("\n a < b, <tool> and <think>x</think>  \n"),
        ),
    ),
    "opened by the prompt": Sample(
        HERMES, "\nWell.</think>Yes", (make_thought("Well."), Said("Yes")), prompt="...<think>\n"
    ),
    "reasoning cut": Sample(HERMES, "<think>So far </th", (make_thought("So far </th"),)),
    "call without its end": Sample(HERMES, f"<tool_call>{CALL}", (BERN,)),
    "call cut": Sample(
        HERMES, 'Hm.\n<tool_call>{"name": "get', (Said('Hm.\n<tool_call>{"name": "get'),)
    ),
    "no call": Sample(
        HERMES,
        'See \n<tool_call>not JSON</tool_call> then\n<tool_call>{"a": 1}</tool_call>',
        (Said('See \n<tool_call>not JSON</tool_call> then\n<tool_call>{"a": 1}</tool_call>'),),
    ),
    "arguments as text": Sample(
        HERMES,
        '<tool_call>{"name": "get_weather", "arguments": "{\\"place\\": \\"Bern\\"}"}</tool_call>',
        (BERN,),
    ),
    "text behind a call": Sample(
        HERMES, f"<tool_call>{CALL}</tool_call>\n\nDone.\n", (BERN, Said("Done.\n"))
    ),
    "coder": Sample(
        CODER,
        "I look.\n<tool_call>\n<function=get_weather>\n<parameter=place>\n7\n</parameter>\n"
        "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>",
        (Said("I look."), BOTH),
    ),
    "coder, no call": Sample(
        CODER, "<tool_call>\n<function=f>\n<parameter=a>1\n</tool_call>", (
            Said("<tool_call>\n<function=f>\n<parameter=a>1\n</tool_call>"),
        ),
    ),
    "glm": Sample(
        GLM,
        "\n<think>Hm.</think>\nOk\n<tool_call>get_weather\n<arg_key>place</arg_key>\n"
        "<arg_value>7</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"
        "<tool_call>now</tool_call>",
        (make_thought("Hm."), Said("Ok"), BOTH, NOW),
    ),
    "mistral list": Sample(
        MISTRAL, f'[TOOL_CALLS][{CALL}, {{"name": "now", "arguments": {{}}}}]', (BERN, NOW)
    ),
    "mistral named": Sample(
        MISTRAL,
        '[THINK]Hm.[/THINK]Ok[TOOL_CALLS]get_weather[ARGS]{"place": "Bern"}'
        "[TOOL_CALLS]now[CALL_ID]abc123def[ARGS]{}",
        (make_thought("Hm."), Said("Ok"), BERN, NOW),
    ),
    "mistral, no call": Sample(MISTRAL, "a [TOOL_CALLS][1] b", (Said("a [TOOL_CALLS][1] b"),)),
    "deepseek fenced": Sample(
        DEEPSEEK,
        "Hm.</think>\n\nOk<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather"
        '\n```json\n{"place": "Bern"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function'
        "<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        (make_thought("Hm."), Said("Ok"), BERN, NOW),
        prompt="<think>\n",
    ),
    "deepseek bare": Sample(
        DEEPSEEK,
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"place": "Bern"}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        (BERN,),
    ),
    "dsml": Sample(
        DSML,
        'Hm.</think>Ok\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="place" string="true">7</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        (make_thought("Hm."), Said("Ok"), BOTH, NOW),
        prompt="<think>",
    ),
    "dsml of V4": Sample(
        DSML_4,
        '<｜DSML｜tool_calls><｜DSML｜invoke name="now"></｜DSML｜invoke></｜DSML｜tool_calls>',
        (NOW,),
    ),
    "dsml, no call": Sample(
        DSML,
        '<｜DSML｜function_calls><｜DSML｜invoke name="now"><｜DSML｜parameter name="a"'
        ' string="false">oh</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜function_calls>',
        (
            Said(
                '<｜DSML｜function_calls><｜DSML｜invoke name="now"><｜DSML｜parameter name="a"'
                ' string="false">oh</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜function_calls>'
            ),
        ),
    ),
    "kimi": Sample(
        KIMI,
        "Ok<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        '<|tool_call_argument_begin|>{"place": "Bern"}<|tool_call_end|><|tool_call_begin|>'
        "functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        (Said("Ok"), BERN, NOW),
    ),
    "llama": Sample(
        LLAMA,
        ' {"name": "get_weather", "parameters": {"place": "Bern"}}; {"name": "now"}',
        (BERN, NOW),
    ),
    "llama tag": Sample(
        LLAMA,
        '<|python_tag|>{"type": "function", "name": "get_weather", "parameters": {"place":"Bern"}}',
        (BERN,),
    ),
    "llama method": Sample(LLAMA, '<|python_tag|>get_weather.call(place="Bern")', (BERN,)),
    "llama code": Sample(LLAMA, "<|python_tag|>print(1)", (Said("<|python_tag|>print(1)"),)),
    "llama, another tool": Sample(LLAMA, '{"name": "Bob"}', (Said('{"name": "Bob"}'),)),
    "llama text": Sample(LLAMA, "{a} set, and {b}", (Said("{a} set, and {b}"),)),
    "harmony": Sample(
        HARMONY,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary"
        ' to=functions.get_weather <|constrain|>json<|message|>{"place": "Bern"}<|call|>',
        (make_thought("Hm."), BERN),
    ),
    "harmony, recipient first": Sample(
        HARMONY,
        "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>"
        "<|start|>assistant<|channel|>final<|message|>Yes <|return|>",
        (NOW, Said("Yes ")),
    ),
    "harmony, preamble": Sample(
        HARMONY, "<|channel|>commentary<|message|>I look.<|end|>", (Said("I look."),)
    ),
    "harmony, no call": Sample(
        HARMONY,
        "<|channel|>commentary to=functions.now<|message|>{oh<|call|>",
        (Said("<|channel|>commentary to=functions.now<|message|>{oh<|call|>"),),
    ),
    "harmony, plain text": Sample(HARMONY, "today <| is", (Said("today <| is"),)),
    "harmony cut": Sample(
        HARMONY, "<|channel|>final<|message|>So <|en", (Said("So <|en"),)
    ),
}  # fmt: skip


def join_pieces(pieces: list[Piece]) -> list[Piece]:
    """Return pieces with what adjoins and is of a kind made one."""
    whole: list[Piece] = []
    for piece in pieces:
        last = whole[-1] if whole else None
        if isinstance(piece, Said) and isinstance(last, Said) and piece.reasoning == last.reasoning:
            whole[-1] = Said(last.text + piece.text, reasoning=last.reasoning)
        else:
            whole.append(piece)
    return whole


def parse_pieces(sample: Sample, texts: list[str], *, ends: bool = True) -> list[Piece]:
    """Return what an answer that comes in these pieces is made of."""
    parser = sample.wanted.parser(TOOLS, prompt=sample.prompt)
    pieces = [piece for text in texts for piece in parser.push(text)]
    return join_pieces(pieces + parser.finish() if ends else pieces)


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    return [text[a:b] for a, b in itertools.pairwise(ends)]


@pytest.mark.parametrize("name", SAMPLES)
def test_an_answer_is_told_apart(name: str) -> None:
    """Whole or letter by letter, and at every place where it may be cut in two."""
    sample = SAMPLES[name]
    expected = list(sample.pieces)
    assert parse_pieces(sample, [sample.text]) == expected
    assert parse_pieces(sample, list(sample.text)) == expected
    for place in range(len(sample.text)):
        assert parse_pieces(sample, [sample.text[:place], sample.text[place:]]) == expected


@pytest.mark.parametrize("name", SAMPLES)
@given(places=st.lists(st.integers(0, 400), max_size=8), end=st.integers(0, 400))
def test_what_was_told_depends_on_the_text_alone(name: str, places: list[int], end: int) -> None:
    """At any moment, not only at the end: so a stream that is resumed goes on as it was."""
    sample = SAMPLES[name]
    text = sample.text[: end % (len(sample.text) + 1)]
    pieces = parse_pieces(sample, [text], ends=False)
    assert parse_pieces(sample, cut(text, places), ends=False) == pieces
    assert parse_pieces(sample, cut(text, places)) == parse_pieces(sample, [text])


UNREADABLE = {
    "half a character": (HERMES, '<tool_call>{"name": "now", "arguments": {"a": "\\ud800"}}'),
    "half a name": (HERMES, '<tool_call>{"name": "\\udc00", "arguments": {}}</tool_call>'),
    "no number": (HERMES, '<tool_call>{"name": "now", "arguments": {"a": NaN}}</tool_call>'),
    "beyond numbers": (MISTRAL, '[TOOL_CALLS][{"name": "now", "arguments": {"a": 1e999}}]'),
    "beyond numbers, bare": (KIMI, ("<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0"
                             '<|tool_call_argument_begin|>{"a": -1e999}<|tool_call_end|>')),
    "too deep": (HERMES, '<tool_call>{"name": "now", "arguments": {"a": ' + "[" * 100_000),
    "too deep for words": (LLAMA, "<|python_tag|>now.call(a=" + "-" * 100_000 + "1)"),
    "beyond numbers, in words": (LLAMA, "<|python_tag|>now.call(a=1e999)"),
    "words of words": (LLAMA, "<|python_tag|>now.call(**{'a': 1})"),
    "a name cut": (GLM, "<tool_call>get_wea"),
    "arguments cut": (
        GLM, "<tool_call>get_weather<arg_key>place</arg_key><arg_value>Bern</arg_value>"
    ),
    "key in key": (
        GLM,
        ("<tool_call>now<arg_key>a</arg_key>b<arg_key>c</arg_key><arg_value>1</arg_value>"
        "</tool_call>"),
    ),
    "parameters cut": (
        CODER, "<tool_call><function=get_weather><parameter=place>Bern</parameter>"
    ),
    "elements cut": (DSML, '<｜DSML｜function_calls><｜DSML｜invoke name="now">'),
}  # fmt: skip


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_is_no_whole_call_is_text(name: str) -> None:
    """Neither what no JSON can carry nor what the answer's end cut off becomes a call."""
    wanted, text = UNREADABLE[name]
    assert parse_pieces(Sample(wanted, text, ()), [text]) == [Said(text)]


DEEP = "[" * 200_000 + "]" * 200_000
"""JSON, but deeper than any Python reads: how deep one reads differs by its version."""


def test_values_that_are_no_json_are_text() -> None:
    """Bare values of a parameter that may be anything are JSON, or themselves."""
    values = ("2", "NaN", "-Infinity", "1e999", '"\\ud800"', "[1", DEEP)
    for value in values:
        call = f"<tool_call>now<arg_key>a</arg_key><arg_value>{value}</arg_value></tool_call>"
        (piece,) = parse_pieces(Sample(GLM, call, ()), [call])
        assert isinstance(piece, Called)
        assert json.loads(piece.arguments_json) == {"a": 2 if value == "2" else value}


FORMATS = [PLAIN, HERMES, CODER, GLM, MISTRAL, DEEPSEEK, DSML, DSML_4, KIMI, LLAMA, HARMONY]


def drop_headers(bits: list[str]) -> Iterator[str]:
    """Yield what stands outside of harmony's headers, whose roles and channels are no text."""
    rest = list(bits)
    while rest:
        bit = rest.pop(0)
        if bit in {harmony.START, harmony.CHANNEL} and harmony.MESSAGE in rest:
            rest = rest[rest.index(harmony.MESSAGE) :]
        else:
            yield bit


@pytest.mark.parametrize("wanted", FORMATS, ids=lambda sample_format: sample_format.family.name)
@given(data=st.data())
def test_nothing_is_lost_of_any_text(wanted: OutputFormat, data: st.DataObject) -> None:
    """Marks in any order: cut anyhow it is the same, and every letter between marks comes out."""
    bits = st.sampled_from([*wanted.marks, "x", "y z", " ", "\n", "{", '"', CALL, "<", "<|"])
    drawn = data.draw(st.lists(bits, max_size=12))
    text = "".join(drawn)
    said = drop_headers(drawn) if wanted is HARMONY else drawn
    letters = "".join(bit for bit in said if bit in {"x", "y z"})
    sample = Sample(wanted, text, ())
    pieces = parse_pieces(sample, [text])
    assert parse_pieces(sample, list(text)) == pieces
    told_text = "".join(
        p.text if isinstance(p, Said) else p.name + p.arguments_json for p in pieces
    )
    for letter in "xyz":
        assert told_text.count(letter) >= letters.count(letter)


def test_without_tools_a_call_is_text() -> None:
    """Who offers none may be shown how one is written."""
    for sample in (SAMPLES["hermes"], SAMPLES["llama"], SAMPLES["mistral list"]):
        parser = sample.wanted.parser(Tools(), prompt="")
        pieces = parser.push(sample.text) + parser.finish()
        assert not any(isinstance(piece, Called) for piece in pieces)
        assert "get_weather" in "".join(p.text for p in pieces if isinstance(p, Said))


def test_an_answer_that_goes_on_begins_in_the_middle() -> None:
    """What was said before decides whether the rest is thought or text."""
    thinking = HERMES.parser(TOOLS, prompt="", continued="<think>so")
    assert join_pieces(thinking.push(" far</think>Yes")) == [make_thought("far"), Said("Yes")]
    telling = HERMES.parser(TOOLS, prompt="", continued="<think>so</think>Ye")
    assert join_pieces(telling.push("s <think>")) == [Said("s <think>")]
    final = HARMONY.parser(TOOLS, prompt="", continued="Ye")
    assert join_pieces(final.push("s")) == [Said("s")]


def test_parts_are_numbered_and_calls_have_ids_of_their_own() -> None:
    """The same numbers and ids wherever the answer is read, others for another request."""

    def read(request_id: str, texts: list[str]) -> dict[int, str]:
        answer = Answer(HERMES.parser(TOOLS, prompt=""), request_id)
        parts: dict[int, str] = {}
        for text in [*texts, ""]:
            for piece in answer.read(text, ends=text == ""):
                call = piece.call
                said = piece.text if call is None else f"{call.id}:{call.name}"
                parts[piece.index] = parts.get(piece.index, "") + said
        return parts

    text = SAMPLES["hermes"].text
    parts = read("a", [text])
    assert parts == read("a", list(text))
    assert [*parts] == [0, 1, 2, 3]
    ids = [parts[2].split(":")[0], parts[3].split(":")[0]]
    assert all(len(call_id) == 9 and call_id.isalnum() for call_id in ids)
    assert len({*ids, read("b", [text])[2].split(":")[0]}) == 3


FAMILIES = {
    "Qwen-Qwen2.5-7B-Instruct.jinja": ("hermes", False),
    "Qwen-Qwen3-0.6B.jinja": ("hermes", True),
    "Qwen3-Coder.jinja": ("qwen3_coder", False),
    "tool-chat-hermes.jinja": ("hermes", False),
    "GLM-4.7-Flash.jinja": ("glm4", True),
    "mistralai-Mistral-Nemo-Instruct-2407.jinja": ("mistral", False),
    "mistralai-Ministral-3-14B-Reasoning-2512.jinja": ("mistral", True),
    "deepseek-ai-DeepSeek-V3.1.jinja": ("deepseek", True),
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B.jinja": ("deepseek", True),
    "deepseek-r1-distill-qwen-14b.jinja": ("deepseek", True),
    "deepseek-ai-DeepSeek-V3.2.jinja": ("deepseek_dsml", True),
    "deepseek-ai-DeepSeek-V4.jinja": ("deepseek_dsml", True),
    "moonshotai-Kimi-K2.jinja": ("kimi", False),
    "meta-llama-Llama-3.1-8B-Instruct.jinja": ("llama3", False),
    "meta-llama-Llama-3.2-3B-Instruct.jinja": ("llama3", False),
    "google-gemma-2-2b-it.jinja": ("plain", False),
    "gpt-oss": ("harmony", False),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_known_by_its_template(name: str) -> None:
    """What a real template writes says how its model answers."""
    output = output_format(template_of(name))
    assert (output.family.name, output.think is not None) == FAMILIES[name]
