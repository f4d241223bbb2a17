"""A stream's journal: what it keeps, in how little, and what it does not take for the stream."""

from __future__ import annotations

from mlxd.v1 import inference_pb2
from mlxd_controller.services.journal import UNPARSED_NBYTES_MAX, Journal


def frame(offset: int, *ids: int, **fields: object) -> bytes:
    """Return a message as it comes from a worker."""
    message = inference_pb2.GenerateResponse(offset=offset, token_ids=ids)
    message.MergeFrom(inference_pb2.GenerateResponse(**fields))  # type: ignore[arg-type]
    return message.SerializeToString()


def test_it_tells_where_the_stream_stands() -> None:
    """Ids in order, after those that the client had; seed and prompt of the first message."""
    journal = Journal((7, 8))
    assert (journal.messages, journal.offset, journal.seed) == (0, 2, None)
    assert journal.prompt_tokens == 0
    journal.add(frame(2, 9, seed=5, text="x", prompt_tokens=4))
    journal.add(frame(3, 10, 11))
    journal.add(frame(5))

    assert list(journal.token_ids) == [7, 8, 9, 10, 11]
    assert (journal.messages, journal.offset, journal.seed, journal.problem) == (3, 5, 5, "")
    assert journal.prompt_tokens == 4


def test_what_does_not_go_on_is_not_part_of_it() -> None:
    """A gap ends the journal: nothing after it counts, and it is told what was wrong."""
    journal = Journal()
    for each in (frame(0, 1), frame(2, 3), frame(3, 4)):
        journal.add(each)
    journal.add(frame(1, 2))

    assert list(journal.token_ids) == [1]
    assert journal.problem == "a message begins at token 2, after 1 tokens"
    assert journal.offset == 1


def test_a_message_is_checked_before_it_goes_out() -> None:
    """It begins where the one before ended, or its place is told."""
    journal = Journal((1, 2))
    for offset, sound in ((1, False), (2, True), (3, False)):
        message = inference_pb2.GenerateResponse(offset=offset)
        assert (journal.check(message) == "") is sound


def test_a_long_stream_is_kept_in_little() -> None:
    """Beyond the bound only ids are kept, whatever the messages carried."""
    journal = Journal()
    text = "x" * 1000
    for index in range(10 * UNPARSED_NBYTES_MAX // len(text)):
        journal.add(frame(index, index, text=text))
        assert journal.unparsed_nbytes <= UNPARSED_NBYTES_MAX

    assert list(journal.token_ids) == list(range(journal.messages))
    assert journal.unparsed_nbytes == 0
