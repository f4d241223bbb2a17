"""The best of several completions, prompt by prompt."""

from __future__ import annotations

from mlxd import Completion, Finished, FinishReason, PositionLogprobs, TokenLogprob, Usage
from mlxd_gateway.openai.choosing import choose

USAGE = Usage(
    prompt_tokens=0, cached_tokens=0, completion_tokens=0, total_tokens=0, queue_s=0.0, load_s=0.0,
    prompt_s=0.0, completion_s=0.0, seed=0, migrations=0, near_ties=0,
)  # fmt: skip
END = Finished(FinishReason.EOS, None, USAGE, "r", "d")


def completion(text: str, *logprobs: float) -> Completion:
    """Return a completion of so many tokens."""
    positions = [PositionLogprobs(TokenLogprob(1, value, b"x"), ()) for value in logprobs]
    return Completion(text, (1,) * len(logprobs), END, tuple(positions))


def test_the_likeliest_by_token_come_first() -> None:
    """However long; equal ones in their order, those without a token last; each prompt's alone."""
    made = [
        completion("a", -1.0, -2.0), completion("b", -1.4), completion("c"),
        completion("d", -9.0), completion("e", -9.0), completion("f", -8.0, -8.0, -8.0),
    ]  # fmt: skip
    best = choose(made, made=3, kept=2, shows_logprobs=True)
    assert [each.text for each in best] == ["b", "a", "f", "d"]
    assert best[0].logprobs == made[1].logprobs
    whole = choose(made, made=3, kept=3, shows_logprobs=False)
    assert [each.text for each in whole] == ["b", "a", "c", "f", "d", "e"]
    assert not any(each.logprobs for each in whole)
