"""Rendering in a process of its own: what hostile templates cost, and what clients are told."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from array import array
from collections.abc import AsyncIterator
from types import FrameType
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from mlxd_models.files.chat_template import ChatTemplate
from mlxd_shared.domain.chats import Chat, ChatMessage, ToolCall
from mlxd_shared.domain.errors import (
    InvalidModel,
    InvalidRequest,
    MlxdError,
    QueueFull,
    ShuttingDown,
)
from mlxd_worker.chat.format import ChatFormat, ChatPrompt
from mlxd_worker.chat.render_process import answer_job
from mlxd_worker.chat.room import RenderRoom
from mlxd_worker.killable.questions import Stop
from mlxd_worker.text.tokenizer import Tokenizer
from tests.support.busy_threads import busy_threads
from tests.worker.chat.test_control_tokens import make_raw
from tests.worker.made_tokenizers import BOS_ID, EOS_ID

DOUBLING = (
    "{% set x = namespace(s='a' * 1000) %}"
    "{% for i in range(99) %}{% set x.s = x.s ~ x.s %}{% endfor %}"
)
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
LONG_S = 60.0
"""More than any rendering that ends takes, and the start of a process before it."""
HELLO = Chat((ChatMessage("user", "hello"),), now_s=86_400.0 * 200)


def format_of(template: str) -> ChatFormat:
    tokenizer = Tokenizer(make_raw("level"), bos_id=BOS_ID, add_bos=None, eos_ids=(EOS_ID,))
    return ChatFormat(ChatTemplate(template, template, ()), tokenizer)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def room() -> AsyncIterator[RenderRoom]:
    """One room for all: processes that were killed are replaced."""
    made_room = RenderRoom(limit_s=LONG_S)
    yield made_room
    await made_room.close()


async def trouble(room: RenderRoom, template: str, chat: Chat = HELLO) -> MlxdError:
    with pytest.raises(MlxdError) as caught:
        await room.render(format_of(template), chat)
    return caught.value


@pytest.mark.asyncio(loop_scope="module")
async def test_a_conversation_is_rendered_at_the_time_it_is_told(room: RenderRoom) -> None:
    """The template's clock is the request's, so that every worker renders the same."""
    prompt = await room.render(
        format_of("{{ strftime_now('%d %b %Y') }}: {{ messages[0].content }}"), HELLO
    )
    assert prompt.text == "20 Jul 1970: hello"


@pytest.mark.asyncio
async def test_a_rendering_waits_for_no_other_work_on_threads() -> None:
    """The event loop's own threads may all be at work: a rendering has one of its own."""
    own = RenderRoom(limit_s=LONG_S)
    try:
        async with busy_threads():
            assert isinstance(await trouble(own, "{{ messages.append(1) }}"), InvalidRequest)
    finally:
        await own.close()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ 'ab' * 100000000000 }}", "memory"),
        (DOUBLING, "its rendering"),
        ("{{ '%0999999999999d' % 1 }}", "memory"),
        ("{% for i in range(99999) %}{{ 'abcdefghij' * 99 }}{% endfor %}", "above 8388608"),
        ("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", "nested too deep"),
        ("{{ range(999999999) | list }}", "line 1): OverflowError"),
        ("{{ ''.__class__.__mro__ }}", "line 1): SecurityError"),
        ("{{ messages.append(1) }}", "line 1): SecurityError"),
        ("{{ messages[0].nothing.at_all }}", "line 1): UndefinedError"),
        (
            "{% set x = namespace() %}{% set x._a = 1 %}",
            "line 1): SecurityError",
        ),
    ],
)
async def test_a_hostile_template_is_stopped(room: RenderRoom, template: str, words: str) -> None:
    """Whatever it tries, it ends with an error that names the field, and the next one is served."""
    error = await trouble(room, template)
    assert isinstance(error, InvalidRequest)
    assert error.violations[0].field == "chat"
    assert words in error.violations[0].description
    assert (await room.render(format_of("fine"), HELLO)).text == "fine"


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("template", [ENDLESS, "{{ 7 ** (7 ** 9) }}"], ids=["loops", "a number"])
async def test_a_template_that_does_not_end_is_stopped(template: str) -> None:
    """Its time is bounded, and the next one is served, by a process of its own."""
    hurried = RenderRoom(limit_s=1.0)
    try:
        error = await trouble(hurried, template)
        hurried._limit_s = LONG_S  # which a process that is started anew has, too
        assert (await hurried.render(format_of("fine"), HELLO)).text == "fine"
    finally:
        await hurried.close()
    assert isinstance(error, InvalidRequest)
    assert error.violations[0].field == "chat"
    assert "takes longer than 1 s" in error.violations[0].description


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("chat", "field"),
    [
        (Chat((ChatMessage("user", "a\ud800"),)), "chat.messages[0].content"),
        (Chat((ChatMessage("user"),), tools_json=('{"a": "\\ud800"}',)), "chat.tools_json[0]"),
        (
            Chat((ChatMessage("user"),), variables_json='{"\\udfff": 1}'),
            "chat.template_variables_json",
        ),
        (
            Chat((ChatMessage("assistant", tool_calls=(ToolCall("f", '{"a": "\\ud8ff"}'),)),)),
            "chat.messages[0].tool_calls[0].arguments_json",
        ),
    ],
)
async def test_half_a_character_is_no_fault_of_the_models(
    room: RenderRoom, chat: Chat, field: str
) -> None:
    """It is the request's field that has it, not the template that writes it out."""
    error = await trouble(room, "{{ messages }}{{ tools }}", chat)
    assert isinstance(error, InvalidRequest)
    assert error.violations[0].field == field
    assert "half a character" in error.violations[0].description


BITS = (
    "{% for m in messages %}", "{% endfor %}", "{% if m %}", "{% else %}", "{% endif %}",
    "{{ m.a }}",
    "{{ m.content ", "| trim ", "| tojson ", "| dictsort ", "+ m ", "* 3 ", "[1:]", "(m)", " }}",
    "{% set x = m %}", "{% macro f(x) %}", "{% endmacro %}", "{{ f(m) }}", "{%- break %}", "{#",
    "{{ cycler(1).next }}", "{% generation %}", "{% endgeneration %}", "{{", "}}", "{%", "%}", "a",
)  # fmt: skip


@given(bits=st.lists(st.sampled_from(BITS), max_size=12))
def test_any_template_gives_a_text_or_says_what_is_wrong(bits: list[str]) -> None:
    """Nothing that a template holds ends the process that renders it."""
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None}]
    job = {
        "template": "".join(bits),
        "variables": {"messages": messages},
        "now_s": 0.0,
        "continues": False,
    }
    answer = answer_job(job)
    assert answer.keys() in ({"text"}, {"kind", "problem", "line", "field"})


@pytest.mark.asyncio(loop_scope="module")
async def test_what_is_wrong_is_told_where_it_is(room: RenderRoom) -> None:
    """A template that is none names its file, one that refuses says why, without our marks."""
    error = await trouble(room, "a\n{% if %}")
    assert isinstance(error, InvalidModel)
    assert error.file == "chat_template.jinja"
    assert "line 2" in error.problem

    chat = Chat((ChatMessage("user", "<|im_end|>"),))
    error = await trouble(room, "{{ raise_exception('no: ' + messages[0].content) }}", chat)
    assert isinstance(error, InvalidRequest)
    assert error.violations[0].field == "chat.messages"
    assert error.violations[0].description.endswith("no: <|im_end|>")

    chat = Chat((ChatMessage("assistant", "a"),), continue_final_message=True)
    error = await trouble(room, "nothing", chat)
    assert isinstance(error, InvalidRequest)
    assert error.violations[0].field == "chat.continue_final_message"


class HeldRoom(RenderRoom):
    """Renders one at a time, once it is told to; one more waits."""

    def __init__(self) -> None:
        super().__init__(renders_max=1, waiting_max=1, limit_s=LONG_S)
        self.go = threading.Event()

    def _render(self, wanted: ChatFormat, chat: Chat, stop: Stop) -> tuple[str, str, ChatPrompt]:
        assert self.go.wait(LONG_S)
        return super()._render(wanted, chat, stop)


@pytest.mark.asyncio(loop_scope="module")
async def test_who_leaves_gives_no_turn_away() -> None:
    """A rendering that nobody waits for any more keeps its turn to its end, and no longer."""
    narrow = HeldRoom()
    try:
        left = asyncio.ensure_future(narrow.render(format_of("gone"), HELLO))
        begun = asyncio.ensure_future(narrow.render(format_of("fine"), HELLO))
        await asyncio.sleep(0)  # one renders, the other waits
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        with pytest.raises(QueueFull):
            await narrow.render(format_of("fine"), HELLO)
        narrow.go.set()
        assert (await begun).text == "fine"
        assert (await narrow.render(format_of("fine"), HELLO)).text == "fine"
    finally:
        narrow.go.set()
        await narrow.close()


@pytest.mark.asyncio(loop_scope="module")
async def test_so_many_wait_and_no_more() -> None:
    """Above its bound the room refuses at once, and those before are served."""
    crowded = RenderRoom(renders_max=1, waiting_max=1, limit_s=LONG_S)
    try:
        wanted = format_of("fine")
        first, second, third = await asyncio.gather(
            *(crowded.render(wanted, HELLO) for _ in range(3)), return_exceptions=True
        )
    finally:
        await crowded.close()
    assert not isinstance(first, BaseException)
    assert not isinstance(second, BaseException)
    assert isinstance(third, QueueFull)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_long_prompt_is_looked_at_by_threads_alone(room: RenderRoom) -> None:
    """The loop calls nothing of its text but what tells whether it is ASCII, and hands the ids on
    as they came: it makes no object of each."""
    wanted = format_of("{{ messages[0].content * 30000 }}")
    prompt = await room.render(wanted, HELLO)  # all is started
    assert len(prompt.ids) > 16 * 1024
    calls: list[str] = []

    def note(frame: FrameType, event: str, called: Any) -> None:
        text = getattr(called, "__self__", None)
        if event == "c_call" and isinstance(text, str) and len(text) > 1000:
            calls.append(called.__name__)
        elif event == "call" and frame.f_code == ChatFormat.prompt.__code__:
            calls.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        prompt = await room.render(wanted, HELLO)
    finally:
        sys.setprofile(None)
    assert set(calls) <= {"isascii"}
    assert isinstance(prompt.ids, array)
    assert prompt.text == "hello" * 30000
    assert prompt.tail == prompt.text[-64:]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_room_that_closes_ends_what_it_renders() -> None:
    """However long that would take; whoever waits, or comes later, is told why."""
    closing = RenderRoom(limit_s=LONG_S)
    rendering = asyncio.ensure_future(closing.render(format_of(ENDLESS), HELLO))

    def begin() -> None:
        while not closing._children._children:
            os.sched_yield()

    await asyncio.to_thread(begin)
    await closing.close()
    for task in (rendering, asyncio.ensure_future(closing.render(format_of("fine"), HELLO))):
        with pytest.raises(ShuttingDown):
            await task
    assert not closing._children._children
