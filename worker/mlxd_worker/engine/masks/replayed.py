"""What a resumed stream's tokens are refused for: none that this request could have had."""

from __future__ import annotations

from mlxd_shared.domain.errors import InvalidRequest
from mlxd_worker.engine.masks.advance import Advance


def wrong_token(index: int, token_id: int, problem: str) -> InvalidRequest:
    """Return the error about a token that no stream of this request can have had."""
    return InvalidRequest.of(f"resume_token_ids[{index}]", f"token {token_id} {problem}")


def check_replayed(advance: Advance, *, first: int, min_tokens: int) -> None:
    """Refuse tokens, from index `first` on, that the constraint cannot have led to.

    Raises:
        InvalidRequest: naming the first of them.
    """
    seen, tokens = advance.seen, advance.tokens
    end = seen.over_after
    field = advance.matcher.constraint.field.partition(".")[0]
    if end is not None and first + end >= min_tokens:
        problem = f"completes what {field} asks for: the stream had ended"
        raise wrong_token(first + end - 1, tokens[end - 1], problem)
    if seen.taken < len(tokens):
        problem = f"does not go on with what {field} asks for"
        raise wrong_token(first + seen.taken, tokens[seen.taken], problem)
