"""Commands of a chat: what each does, and what is refused with a hint."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxd_controller.cli.chat.slash import COMMANDS, After, Done, Refused, is_command, perform
from mlxd_controller.cli.chat.talk import Talk
from mlxd_shared.domain.chats import ChatMessage
from mlxd_shared.domain.requests import SamplingOptions

SAID = (ChatMessage("user", "Hi"), ChatMessage("assistant", "Hello", reasoning="Be polite."))


def talk(*messages: ChatMessage, chats: bool = True) -> Talk:
    """A conversation with no options."""
    return Talk("demo", SamplingOptions(), None, None, False, messages=[*messages], chats=chats)


def act(text: str, about: Talk, folder: Path = Path("/nowhere")) -> Done:
    """What a command does."""
    return perform(text, about, folder)


@pytest.mark.parametrize("text", ["/help", "/?", "/foo bar", "/usr/bin/env fails", "/set\nx"])
def test_what_begins_with_a_slash_is_a_command(text: str) -> None:
    """Known or not."""
    assert is_command(text)


@pytest.mark.parametrize("text", ["", "hi /help", " /help", "// a comment", "/* a comment", "/ 2"])
def test_what_does_not_is_a_message(text: str) -> None:
    """A blank before it will do."""
    assert not is_command(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("/hlep", "did you mean /help?"), ("/foo", "/help lists them"),
        ("/usr/bin/env", "a blank before it makes it a message"), ("/set", "write /set NAME=VALUE"),
        ("/set temperature", "write /set NAME=VALUE"), ("/set =1", "write /set NAME=VALUE"),
        ("/set temperature=hot", "no number"), ("/set top_k=1.5", "no whole number"),
        ("/set stats=maybe", "true or false"), ("/set temprature=1", "did you mean temperature?"),
        ("/regenerate", "no message"), ("/save", "no name"), ("/save ../x", "no name"),
        ("/load x", "no chat is saved as x"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused(text: str, words: str) -> None:
    """And nothing is changed by it."""
    about = talk()
    with pytest.raises(Refused, match=words.replace("?", r"\?")):
        act(text, about)
    assert about == talk()


def test_options_are_set_and_unset() -> None:
    """What answers begin with; what is no option is a variable of the template."""
    about = talk()
    for text in ("temperature=0.5", "top_k = 7", "max_tokens=9", "stats=true", "wrap=false",
                 "tone=dry", "enable_thinking=false"):  # fmt: skip
        act(f"/set {text}", about)
    assert (about.sampling.temperature, about.sampling.top_k) == (0.5, 7)
    assert (about.max_tokens, about.stats, about.wrap) == (9, True, False)
    assert about.variables == {"tone": "dry", "enable_thinking": False}
    shown = act("/show", about).words
    for words in ("temperature=0.5, top_k=7, max_tokens=9", "tone=dry", "stats      true"):
        assert words in shown
    for name in ("temperature", "top_k", "max_tokens", "stats", "wrap", "tone", "enable_thinking"):
        act(f"/set {name}=", about)
    assert about == talk()


def test_a_system_prompt_is_shown_set_and_taken_away() -> None:
    """Where the model has a template; without one nothing is kept that nobody reads."""
    about = talk()
    assert "no system prompt" in act("/system", about).words
    act("/system Be kind.\nAnd brief.", about)
    assert about.system == "Be kind.\nAnd brief."
    assert "Be kind." in act("/system", about).words
    act('/system ""', about)
    assert about.system == ""
    for text in ("/system x", "/set tone=dry"):
        with pytest.raises(Refused, match="no chat template"):
            act(text, talk(chats=False))


def test_a_chat_is_forgotten_saved_and_taken_up_again(tmp_path: Path) -> None:
    """With its system prompt and variables; another model is said."""
    about = talk(*SAID)
    about.system, about.variables = "Be kind.", {"tone": "dry"}
    act("/save first", about, tmp_path)
    act("/clear", about)
    assert about.messages == []
    other = talk()
    other.model = "other"
    assert "it was held with demo" in act("/load first", other, tmp_path).words
    assert (tuple(other.messages), other.system, other.variables) == (
        SAID, "Be kind.", {"tone": "dry"},
    )  # fmt: skip


def test_what_follows_a_command() -> None:
    """The prompt, another answer, or the end; the help has every command."""
    assert act("/regenerate", talk(*SAID)).after is After.ANSWER
    assert {act(name, talk()).after for name in ("/bye", "/exit", "/quit")} == {After.END}
    helped = act("/?", talk())
    assert helped.after is After.PROMPT
    assert all(command.usage in helped.words for command in COMMANDS.values())
    assert max(map(len, helped.words.splitlines())) <= 60
