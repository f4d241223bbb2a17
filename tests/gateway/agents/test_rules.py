"""What each rule for agents recognises, what it does, and what all of them leave as it is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxd import Chat, ChatMessage, ContentPart
from mlxd_gateway.agents import rules
from mlxd_gateway.agents.heads import HEAD_CHARS_MAX
from mlxd_gateway.agents.reminders import is_reminder, remind
from mlxd_gateway.agents.rules import OF_ANTHROPIC, OF_ANY_API, Rule, apply_rules

DOCUMENT = Path(__file__).parents[3] / "docs" / "http.md"
HEADER = "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch=fa690;"
LEFT = "<total_tokens>14999436 tokens left</total_tokens>"
TODAY = "Today's date: 2026-11-24"
NOW = "Current time: 12:34:56"
BEHIND = "\n\n" + remind(LEFT)


def settle(*messages: ChatMessage, by: Sequence[Rule] = OF_ANTHROPIC) -> tuple[ChatMessage, ...]:
    """Return what the rules make of messages."""
    return apply_rules(by, Chat(messages), ())[0].messages


def system(text: str) -> ChatMessage:
    """Return what the system says."""
    return ChatMessage("system", text)


def user(text: str) -> ChatMessage:
    """Return what the user says."""
    return ChatMessage("user", text)


def tool(text: str) -> ChatMessage:
    """Return a tool's answer."""
    return ChatMessage("tool", text, tool_call_id="t")


ANSWER = ChatMessage("assistant", "ok")


def developer(text: str) -> ChatMessage:
    """Return what the application says, as OpenAI's newer clients call it."""
    return ChatMessage("developer", text)


def test_a_conversation_has_one_head() -> None:
    """All of it in one message that every template knows; what comes later stays where it is."""
    one = system("a\n\nb\n\nc")
    late = (user("u"), ANSWER, developer("d"), user("v"))
    assert settle(developer("a"), system("b"), developer("c"), *late, by=OF_ANY_API) == (one, *late)
    assert settle(developer("a"), user("u")) == (system("a"), user("u"))
    seen = ChatMessage("developer", parts=(ContentPart(text="a"),))
    for kept in ((system("a"), user("u")), (user("u"),), (seen, system("b"))):
        assert settle(*kept, by=OF_ANY_API) == kept


def test_an_apis_default_effort_is_the_models_own() -> None:
    """Of Anthropic's API alone, and nothing but `high`: another effort is asked for."""
    for sent, left in (
        ('{"reasoning_effort": "high"}', ""),
        ('{"enable_thinking": true, "reasoning_effort": "high"}', '{"enable_thinking": true}'),
        ('{"reasoning_effort": "low"}', '{"reasoning_effort": "low"}'),
        ("", ""), ("[", "["),
    ):  # fmt: skip
        chat = Chat((user("u"),), variables_json=sent)
        assert apply_rules(OF_ANTHROPIC, chat, ())[0].variables_json == left
        assert apply_rules(OF_ANY_API, chat, ())[0] is chat


def test_a_billing_header_is_left_out() -> None:
    """The first line of what the system says, or all of it; not where somebody quotes it."""
    assert settle(system(f"{HEADER}\nYou help."), user("u")) == (system("You help."), user("u"))
    assert settle(system(HEADER), user("u")) == (user("u"),)
    quoted = (system(f"You help.\n{HEADER}"), user(HEADER), ANSWER)
    assert settle(*quoted) == quoted


@pytest.mark.parametrize(
    "line",
    [TODAY, "  Today's date: Mon Nov 24 2026", "- Current date: 11/24/2026",
     "Today's date is 2026-11-24.", "The current date is November 24, 2026"],
)  # fmt: skip
def test_a_date_goes_in_front_of_the_first_user(line: str) -> None:
    """Behind system and tools, and to the same place in each turn."""
    head = system(f"<env>\nPlatform: linux\n{line}\n</env>")
    first, *others = settle(head, user("u"), ANSWER, user("v"))
    assert first == system("<env>\nPlatform: linux\n</env>")
    assert others == [user(f"{remind(line.strip())}\n\nu"), ANSWER, user("v")]


@pytest.mark.parametrize(
    ("line", "head"),
    [(LEFT, "a\n{}"), (LEFT, "a\n{0}\n{0}"), (NOW, "{}\na"),
     ("Current date and time: 2026-11-24 12:34 UTC", "{}\na")],
)  # fmt: skip
def test_what_changes_with_every_request_goes_behind_the_last_message(line: str, head: str) -> None:
    """As a reminder, in the order in which it came; a tool's answer takes it, too."""
    lines = remind("\n".join([line] * head.count("{")))
    for last in (user("u"), tool("t")):
        text = f"{last.content}\n\n{lines}"
        moved = ChatMessage(last.role, text, tool_call_id=last.tool_call_id)
        assert settle(system(head.format(line)), user("q"), ANSWER, last) == (
            system("a"), user("q"), ANSWER, moved,
        )  # fmt: skip


def test_what_has_no_place_to_go_stays() -> None:
    """Behind an answer that is to go on, before no user, in a text of parts or too long a one."""
    begun = (system(f"a\n{LEFT}"), user("u"), ANSWER)
    nobody = (system(f"a\n{TODAY}"), ANSWER)
    parts = (
        system(f"a\n{LEFT}\n{TODAY}"),
        ChatMessage("user", parts=(ContentPart("u"),)),
    )
    long = (system(f"{HEADER}\n{TODAY}\n{'x' * HEAD_CHARS_MAX}"), user("u"))
    for messages in (begun, nobody, parts, long):
        assert settle(*messages) == messages


@pytest.mark.parametrize(
    "line",
    ["Today's date: tomorrow", "Note: Today's date: 2026-11-24", "today's date: 2026-11-24",
     "Current time: soon", "<total_tokens>many tokens left</total_tokens>", f"{LEFT} or so",
     "x-anthropic-billing-header: cch", "<system-reminder>a</system-reminder>"],
)  # fmt: skip
def test_what_is_not_exactly_so_stays(line: str) -> None:
    """No rule guesses; and what the user says is nobody's to look through."""
    messages = (system(f"{line}\na"), user(f"{TODAY}\n{LEFT}\n{NOW}"), ANSWER, user("v"))
    assert settle(*messages) == messages


def test_the_system_is_heard_where_it_speaks() -> None:
    """At the end of what a user or a tool says before; otherwise as a message with the user's."""
    assert settle(system("s"), user("u"), system(LEFT), ANSWER, tool("t"), system("n")) == (
        system("s"), user(f"u{BEHIND}"), ANSWER, tool(f"t\n\n{remind('n')}"),
    )  # fmt: skip
    assert settle(user("u"), ANSWER, system("a"), system("b"), user("v"), user("w")) == (
        user("u"), ANSWER, user(f"{remind('a')}\n\n{remind('b')}\n\nv"), user("w"),
    )  # fmt: skip
    kept = (user("u"), system("s"), ANSWER)
    assert settle(*kept, by=OF_ANY_API) == kept


def test_a_reminder_behind_a_tool_is_part_of_its_answer() -> None:
    """Reminders alone; with a word of the user's own it is a question."""
    two = f"{remind('a')}\n{remind('b')}"
    assert settle(tool("t"), user(two), ANSWER) == (tool(f"t\n\n{two}"), ANSWER)
    question = (tool("t"), user(f"{two} and now?"), ANSWER)
    assert settle(*question) == question
    assert not is_reminder("<system-reminder>a")
    assert not is_reminder(" \n")


def test_reasoning_is_kept_where_tools_are_on_offer() -> None:
    """By both names that templates have for it, unless the request says one of them."""
    chat = Chat((user("u"),), tools_json=("{}",), variables_json='{"a": 1}')
    variables = json.loads(apply_rules(OF_ANY_API, chat, ())[0].variables_json)
    assert variables == {"a": 1, "clear_thinking": False, "preserve_thinking": True}
    for sent in ('{"clear_thinking": true}', "[", "[]"):
        said = Chat((user("u"),), tools_json=("{}",), variables_json=sent)
        assert apply_rules(OF_ANY_API, said, ())[0] is said


def test_fields_are_named_as_the_request_has_them() -> None:
    """What is wrong with a message is told by its own place, whatever has gone before it."""
    chat = Chat((system(HEADER), user("u"), system("s"), ANSWER))
    settled, places = apply_rules(OF_ANTHROPIC, chat, ("system", "messages[0]"))
    assert [message.role for message in settled.messages] == ["user", "assistant"]
    assert places == ("messages[0]", "messages[3]")


LINES = st.sampled_from([HEADER, LEFT, TODAY, NOW, "a", "b", "", remind("r"), "Today's date: no"])
TEXTS = st.lists(LINES, max_size=4).map("\n".join)
MESSAGES = st.builds(
    ChatMessage, st.sampled_from(["system", "developer", "user", "assistant", "tool"]), TEXTS
)
CHATS = st.lists(MESSAGES, min_size=1, max_size=8).map(tuple).map(Chat)
RULES = st.sampled_from([OF_ANY_API, OF_ANTHROPIC])


@given(CHATS, RULES)
def test_nothing_is_lost_and_once_is_enough(chat: Chat, by: tuple[Rule, ...]) -> None:
    """But for headers and empty lines the same lines are there; a second time changes nothing."""
    settled, places = apply_rules(by, chat, ())
    assert len(places) == len(settled.messages)
    marks = [*remind("").split("\n"), "", HEADER]

    def lines_of(one: Chat) -> list[str]:
        lines = (line for message in one.messages for line in message.content.split("\n"))
        return sorted(line for line in lines if line not in marks)

    assert lines_of(settled) == lines_of(chat)
    assert apply_rules(by, settled, places) == (settled, places)


@given(CHATS, RULES)
def test_a_chat_that_no_rule_knows_is_not_touched(chat: Chat, by: tuple[Rule, ...]) -> None:
    """It is the same object."""
    plain = Chat(
        tuple(
            ChatMessage("user" if m.role in rules.OF_SYSTEM else m.role, f"{m.role}: {index}")
            for index, m in enumerate(chat.messages)
        )
    )
    assert apply_rules(by, plain, ())[0] is plain


@given(st.lists(MESSAGES, min_size=1, max_size=5), st.lists(MESSAGES, min_size=2, max_size=3))
def test_a_turn_only_appends(before: list[ChatMessage], turn: list[ChatMessage]) -> None:
    """All but the last message is the same when an answer and more follow.

    A head that changes in what is for every request changes nothing but the end.
    """
    head, question = system(f"{HEADER}\na\n{TODAY}\n{LEFT}"), user("q")
    later = system(f"{HEADER.replace('fa690', '00000')}\na\n{TODAY}\n{LEFT.replace('9', '8')}")
    said = (question, *before, user("now"))
    now, then = settle(head, *said), settle(later, *said, ANSWER, *turn, user("then"))
    assert then[: len(now) - 1] == now[:-1]


def test_rules_are_listed() -> None:
    """docs/http.md has a row for each, in their order."""
    text = DOCUMENT.read_text(encoding="utf-8")
    rows = [f"| `{rule.name}` | {rule.recognises} | {rule.does} |" for rule in OF_ANTHROPIC]
    assert "\n".join(rows) in text
