"""What a speculator learns of its steps' costs."""

from __future__ import annotations

from pathlib import Path

from mlxd_shared.domain.requests import FinishReason
from mlxd_worker.engine.speculation.depth import DepthController
from mlxd_worker.tokenizing.files import load_tokenizer
from tests.worker.engine.speculation.guessing import guessing_engine
from tests.worker.engine.test_cases import Digits, chain_engine
from tests.worker.tiny import load


class Learning(DepthController):
    """Lets nothing but plain passes be run, and notes those that it is told of."""

    def __init__(self) -> None:
        super().__init__(widths=(1,))
        self.passes: list[tuple[int, int]] = []

    def learn_pass(self, rows: int, width: int, seconds: float) -> None:
        """Note the pass."""
        self.passes.append((rows, width))
        super().learn_pass(rows, width, seconds)


def test_the_first_and_the_last_step_ahead_are_no_measure(tmp_path: Path) -> None:
    """Of one has the next one's work in it, and of the other it was done before."""
    learning = Learning()
    chain_engine(tmp_path)
    tiny = guessing_engine(
        load(tmp_path),
        load_tokenizer(tmp_path),
        controller=learning,
        make_decoder=lambda _: Digits(),
    )
    _, sink = tiny.submit([1, 2, 3], max_tokens=12)
    under_way = 0
    while tiny.engine.busy:
        tiny.engine.step()
        under_way += tiny.plain.ahead

    assert sink.reason is FinishReason.LENGTH
    assert under_way > 8
    assert learning.passes == [(1, 1)] * (under_way - 1)
