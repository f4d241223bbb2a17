"""The part of `convert` that looks at lengths and times before anything is walked or reckoned."""

from __future__ import annotations

from collections.abc import Iterator

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from mlxd.v1 import inference_pb2
from mlxd_shared import config
from mlxd_shared.domain.errors import FieldViolation, InvalidRequest
from mlxd_shared.domain.requests import check_range

SECONDS_MAX = 315_576_000_000
"""Of a google.protobuf.Duration: ten thousand years."""
NANOS_MAX = 999_999_999


def list_violations(pb: inference_pb2.GenerateRequest) -> list[FieldViolation]:
    """Return which lists are too long: by their lengths alone, before any of them is walked."""
    chat, choices = pb.chat, pb.response_format.choice.choices
    ids_max = config.TOKENIZE_IDS_MAX
    lists = (
        ("stop", len(pb.stop), config.STOP_STRINGS_MAX, "strings"),
        ("stop_token_ids", len(pb.stop_token_ids), config.STOP_TOKEN_IDS_MAX, "ids"),
        ("sampling.logit_bias", len(pb.sampling.logit_bias), config.LOGIT_BIAS_MAX, "ids"),
        ("tokens.ids", len(pb.tokens.ids), ids_max, "ids"),
        ("resume_token_ids", len(pb.resume_token_ids), ids_max, "ids"),
        ("chat.messages", len(chat.messages), config.CHAT_MESSAGES_MAX, "messages"),
        ("chat.tools_json", len(chat.tools_json), config.CHAT_TOOLS_MAX, "tools"),
        ("response_format.choice.choices", len(choices), config.FORMAT_CHOICES_MAX, "choices"),
    )
    return [bad for each in lists for bad in check_count(*each)]


def check_count(field: str, count: int, most: int, things: str) -> list[FieldViolation]:
    """Return what is wrong with a field that holds this many things."""
    return [FieldViolation(field, f"at most {most} {things}")] if count > most else []


def text_of(pb: inference_pb2.TokenizeRequest) -> str:
    """Return the text of a request, which reads it anew each time.

    Raises:
        InvalidRequest: nobody would tokenise it; names the bound.
    """
    text = pb.text
    if len(text) > config.PROMPT_CHARS_MAX:
        raise InvalidRequest.of("text", f"at most {config.PROMPT_CHARS_MAX} characters")
    return text


def check_ids(pb: inference_pb2.DetokenizeRequest) -> None:
    """Refuse more ids than anybody would turn into text.

    Raises:
        InvalidRequest: naming the bound.
    """
    if len(pb.token_ids) > config.TOKENIZE_IDS_MAX:
        raise InvalidRequest.of("token_ids", f"at most {config.TOKENIZE_IDS_MAX} ids")


def duration_violations(pb: Duration, field: str) -> list[FieldViolation]:
    """Return what makes a duration none: seconds and nanoseconds have bounds, and one sign."""
    violations = check_range(f"{field}.seconds", pb.seconds, -SECONDS_MAX, SECONDS_MAX)
    violations += check_range(f"{field}.nanos", pb.nanos, -NANOS_MAX, NANOS_MAX)
    if not violations and pb.seconds * pb.nanos < 0:
        limit = f"{pb.nanos} has another sign than the {pb.seconds} s that it adds to"
        return [FieldViolation(f"{field}.nanos", limit)]
    return violations


def moment_violations(pb: Timestamp, field: str) -> Iterator[FieldViolation]:
    """Yield what makes a time none that every calendar has."""
    if not 0 <= pb.seconds <= config.UNIX_TIME_MAX_S:
        limit = f"{pb.seconds} s is outside [0, {config.UNIX_TIME_MAX_S}] after 1970"
        yield FieldViolation(field, limit)
    yield from check_range(f"{field}.nanos", pb.nanos, 0, NANOS_MAX)
