"""Images of a chat on a terminal: shown with the next message, and given back where it fails."""

from __future__ import annotations

import pytest

from mlxd_controller.cli.chat.answering import _keeping
from mlxd_controller.cli.chat.talk import Talk
from mlxd_shared.domain.chats import ChatMessage, ContentPart
from mlxd_shared.domain.requests import SamplingOptions

IMAGE = ContentPart(image=b"x")


def talk_of(*images: ContentPart) -> Talk:
    """Return a conversation in which images wait for the next message."""
    options = SamplingOptions()
    return Talk("m", options, max_tokens=None, keep_alive_s=None, stats=False, images=images)


def test_the_next_message_shows_what_waits() -> None:
    """Before its text, once; a message without images is a text as before."""
    talk = talk_of(IMAGE)
    assert talk.say("a") == ChatMessage("user", parts=(IMAGE, ContentPart("a")))
    assert talk.say("b") == ChatMessage("user", "b")


def test_a_message_that_is_answered_anew_shows_its_images_again() -> None:
    """Taking it back returns its text, and its images wait for the next message."""
    talk = talk_of(IMAGE)
    talk.messages += [talk.say("a"), ChatMessage("assistant", "no")]
    assert talk.take_last() == "a"
    assert talk.messages == []
    assert talk.images == (IMAGE,)


def test_a_message_that_fails_keeps_its_images() -> None:
    """They are shown with the next one, and those of one that was answered are not."""
    talk = talk_of(IMAGE)
    turn = [talk.say("a")]
    with pytest.raises(ValueError, match="lost"), _keeping(talk, turn):
        raise ValueError("lost")
    assert talk.images == (IMAGE,)
    turn = [talk.say("a")]
    with _keeping(talk, turn):
        turn.append(ChatMessage("assistant", "yes"))
    assert not talk.images
    assert talk.messages == turn
