"""The process in which a grammar is tried out before this worker's own library sees it.

The library cannot be interrupted, and what it meets in a grammar may cost it hours, or the stack.
So a grammar is compiled here first, over a vocabulary of single bytes, by a process that can be
killed and that limits itself (`killable`). Asked is a grammar's text, answered the reason why it is
refused, or an empty text.
"""

from __future__ import annotations

from typing import Final

from llguidance import LLMatcher, LLTokenizer

from mlxd_shared import config
from mlxd_worker.engine.masks.limits import limits_of
from mlxd_worker.killable.process import serve

BYTES: Final = 256
_STRIDE: Final = 7
"""Takes the walk to other bytes than the first that is allowed."""


WALK_BYTES: Final = 64
"""So much output is made up under a grammar, to see whether it stays within its limits."""


def try_grammar(tokenizer: LLTokenizer, source: str) -> str:
    """Return why a grammar is refused; an empty text where it is good."""
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=limits_of(source))
    for step in range(WALK_BYTES):
        if matcher.is_stopped():  # at its end, or in error
            break
        mask = matcher.compute_bitmask()
        allowed = [i for i in range(BYTES) if mask[i >> 3] >> (i & 7) & 1]
        if not allowed or matcher.is_error():
            break
        matcher.consume_token(allowed[_STRIDE * step % len(allowed)])
    return matcher.get_error()


def main() -> None:
    """Serve standard input, within bounds of its own."""
    tokenizer = LLTokenizer("byte")
    serve(
        lambda source: try_grammar(tokenizer, source.decode()).encode(),
        limit_s=config.CONSTRAINT_COMPILE_S,
        memory_nbytes_max=config.CONSTRAINT_TRIAL_BYTES_MAX,
    )


if __name__ == "__main__":
    main()
