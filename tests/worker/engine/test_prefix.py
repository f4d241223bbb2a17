"""The step loop with a prefix cache, on tiny models of every kind of memory.

Whatever is reused, the tokens are those of an engine that remembers nothing (`Scene.ask`), every
byte has its account after each request, and no snapshot is left at the end.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from mlxd_shared.domain.cache_reasons import CacheReason
from mlxd_shared.domain.errors import InternalError
from mlxd_shared.domain.requests import Sampling
from mlxd_worker.cache.kept.points import GRID_TOKENS
from tests.support.effort import IN_SOAK
from tests.support.engines import GREEDY
from tests.support.remembering import MEMORIES, answer_of, kept_nbytes, remembering, tokens_of
from tests.support.tiny_model import write_tiny_model

NAN_TOKEN = 300
SEEDED = Sampling(1.0, 40, 0.95, 0.0, seed=11)


@pytest.fixture(scope="module", params=MEMORIES if IN_SOAK else ("hybrid",))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of each kind of memory; in all but the soak of states beside a whole history."""
    return MEMORIES[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def standard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose layers remember everything."""
    return MEMORIES["standard"](tmp_path_factory.mktemp("standard"))


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED])
def test_a_turn_of_a_chat_costs_its_new_tokens(folder: Path, sampling: Sampling) -> None:
    """From the second turn on at most the new tokens are evaluated, and the last of the answer."""
    with remembering(folder) as scene:
        said = tokens_of(1, 150)
        for turn in range(4):
            said += tokens_of(10 + turn, 20)
            answer = scene.ask(said, max_tokens=20, sampling=sampling)
            assert answer.left == (170 if turn == 0 else 21)
            assert answer.reason is CacheReason.NONE
            said += answer.ids


@pytest.mark.parametrize("cut", [1, 7, 30])
def test_a_turn_that_changes_the_end_of_the_answer(folder: Path, cut: int) -> None:
    """Where the client's next prompt parts from what was generated, at most 64 more are evaluated.

    As after a stop string that was cut out, or a template that renders an answer otherwise.
    """
    with remembering(folder) as scene:
        said = tokens_of(1, 150)
        said += scene.ask(said, max_tokens=70).ids
        kept = said[:-cut]

        answer = scene.ask((*kept, *tokens_of(2, 20)), max_tokens=5)
        assert answer.left <= 20 + GRID_TOKENS
        assert answer.cached <= len(kept)


def test_a_turn_that_changes_the_end_of_the_prompt(folder: Path) -> None:
    """The same where the template's last tokens before the answer are rendered otherwise."""
    with remembering(folder) as scene:
        prompt = tokens_of(1, 200)
        scene.ask(prompt)

        answer = scene.ask((*prompt[:-4], *tokens_of(2, 20)))
        assert answer.left <= 20 + GRID_TOKENS


def test_a_whole_prompt_that_is_known_is_evaluated_for_one_token(folder: Path) -> None:
    """Its last token gives the first draw, so it is never taken from the cache (fault 1)."""
    with remembering(folder) as scene:
        for length in (1, 2, 5, 130):
            prompt = tokens_of(length, length)
            assert scene.ask(prompt).left == length
            again = scene.ask(prompt)
            assert (again.left, again.reason) == (1, CacheReason.NONE)


def test_usage_counts_cached_tokens_as_prompt_tokens(standard: Path) -> None:
    """The prompt's tokens are all of them, and its duration begins before the restore (24)."""
    with remembering(standard) as scene:
        prompt = tokens_of(1, 100)
        scene.ask(prompt)
        usage = scene.tiny.alone(prompt).finished.usage

        assert (usage.prompt_tokens, usage.cached_tokens) == (100, 99)
        assert usage.prompt_s > 0


def test_rows_that_begin_alike_share_while_they_run(folder: Path) -> None:
    """A row finds what the one before it has just evaluated, though that one still runs."""
    with remembering(folder) as scene:
        shared = tokens_of(1, 140)
        prompts = [(*shared, *tokens_of(10 + i, 12)) for i in range(4)]
        sinks = [scene.tiny.submit(prompt, max_tokens=40)[1] for prompt in prompts]
        scene.tiny.run()

        answers = [answer_of(sink) for sink in sinks]
        assert answers[0].cached == 0
        assert all(answer.left <= 12 + GRID_TOKENS for answer in answers[1:])
        for prompt, answer in zip(prompts, answers, strict=True):
            assert list(answer.ids) == scene.cold.alone(prompt, max_tokens=40).ids


def test_what_a_running_row_shares_costs_nothing(standard: Path) -> None:
    """While it runs, a row's keys and values are kept once, in its arena, and read from there."""
    with remembering(standard) as scene:
        prompt = tokens_of(1, 100)
        _, first = scene.tiny.submit(prompt, max_tokens=60)
        while not first.events:
            scene.tiny.engine.step()
        _, second = scene.tiny.submit((*prompt, *tokens_of(2, 5)), max_tokens=3)
        while not second.ended:
            scene.tiny.engine.step()
            assert second.ended or scene.tiny.caches.contents.book.nbytes == 0

        assert not first.ended
        assert answer_of(second).cached == 99
        scene.tiny.run()
        assert first.ids == scene.cold.alone(prompt, max_tokens=60).ids


def test_the_branch_point_is_kept_for_the_next(folder: Path) -> None:
    """Where a prompt parts from a known one, a state is kept: the third finds it to the token."""
    with remembering(folder) as scene:
        shared = tokens_of(1, 90)
        scene.ask((*shared, *tokens_of(2, 200)))

        second = scene.ask((*shared, *tokens_of(3, 30)))
        assert second.reason in {CacheReason.DIVERGED, CacheReason.NON_TRIMMABLE_DIVERGENCE}
        third = scene.ask((*shared, *tokens_of(4, 30)))
        assert (third.cached, third.reason) == (90, CacheReason.DIVERGED)


def test_a_resume_inside_history_and_a_branch_lose_nothing(folder: Path) -> None:
    """Resuming partway into a known prompt, then branching, leaves both to be found (fault 5)."""
    with remembering(folder) as scene:
        history = tokens_of(1, 300)
        scene.ask(history)
        part = (*history[:250], *tokens_of(2, 30))
        assert scene.ask(part).left <= 30 + GRID_TOKENS
        branch = (*part[:270], *tokens_of(3, 30))
        assert scene.ask(branch).left <= 30 + GRID_TOKENS

        assert [scene.ask(known).left for known in (history, part, branch)] == [1, 1, 1]


def test_a_long_conversation_survives_a_short_one_that_begins_alike(folder: Path) -> None:
    """A row on a known beginning writes over several passes; the known rest stays (fault 6)."""
    with remembering(folder, chunk=16) as scene:
        long = tokens_of(1, 200)
        scene.ask(long, max_tokens=30)
        scene.ask((*long[:60], *tokens_of(2, 120)), max_tokens=30)

        again = scene.ask(long, max_tokens=30)
        assert again.left == 1


@pytest.mark.parametrize("steps", [1, 3, 6])
def test_a_cancelled_prefill_is_resumed_exactly_where_it_stopped(folder: Path, steps: int) -> None:
    """What was evaluated before the cancel is never evaluated again (fault 3)."""
    with remembering(folder, chunk=20) as scene:
        prompt = tokens_of(1, 180)
        request, _ = scene.tiny.submit(prompt)
        for _ in range(steps):
            scene.tiny.engine.step()
        (reached,) = (scene.tiny.caches.contents.offset(row) for row in scene.tiny.caches.rows)
        scene.tiny.engine.cancel(request.stream)
        scene.audit()

        again = scene.ask(prompt)
        assert 0 < reached == again.cached < len(prompt)


def test_repeated_time_outs_make_progress(folder: Path) -> None:
    """A prompt that never gets enough time is evaluated after all, a little at each try."""
    with remembering(folder, chunk=16) as scene:
        prompt = tokens_of(1, 150)
        reached = [0]
        while reached[-1] < len(prompt) - 1:
            request, sink = scene.tiny.submit(prompt, max_tokens=1)
            scene.tiny.engine.step()
            if sink.ended:
                break
            (row,) = scene.tiny.caches.rows
            reached.append(scene.tiny.caches.contents.offset(row))
            scene.tiny.engine.cancel(request.stream)
            assert reached[-1] > reached[-2]
        assert scene.ask(prompt).left == 1


@pytest.mark.parametrize("tokens", [0, 1, 5, 40])
def test_a_stream_cancelled_while_it_generates_is_kept_to_its_last_token(
    folder: Path, tokens: int
) -> None:
    """What was generated is recorded before it is sent, so a cancel leaves no gap (fault 14)."""
    with remembering(folder) as scene:
        prompt = tokens_of(1, 100)
        request, sink = scene.tiny.submit(prompt, max_tokens=60)
        while len(sink.ids) <= tokens:
            scene.tiny.engine.step()
        scene.tiny.engine.cancel(request.stream)

        answer = scene.ask((*prompt, *sink.ids, *tokens_of(2, 9)))
        assert answer.cached == 100 + tokens


def test_a_small_budget_is_kept_and_what_had_to_go_is_named(folder: Path) -> None:
    """Room is made before anything is copied: the budget holds after every request."""
    budget_nbytes = 3 * kept_nbytes(folder, tokens_of(0, 150))
    with remembering(folder, budget_nbytes=budget_nbytes) as scene:
        for seed in range(8):
            scene.ask(tokens_of(seed, 150))
        counts = scene.tiny.prefix.counts
        assert counts.evictions > 0
        assert counts.evicted_nbytes > 0

        gone = scene.ask(tokens_of(0, 150))
        assert (gone.cached < 149, gone.reason) == (True, CacheReason.EVICTED)
        assert counts.lookups[gone.cached > 0, CacheReason.EVICTED] == 1


def test_what_is_used_stays(standard: Path) -> None:
    """A look-up refreshes what it used and nothing else, so the unused go first (fault 11)."""
    budget_nbytes = 3 * kept_nbytes(standard, tokens_of(0, 100))
    with remembering(standard, budget_nbytes=budget_nbytes) as scene:
        for seed in (0, 1, 0, 0, 2, 0, 3, 0):
            scene.ask(tokens_of(seed, 100))
        assert [scene.ask(tokens_of(seed, 100)).left for seed in (0, 1)] == [1, 100]


@pytest.mark.parametrize("share", [0.3, 1.5])
def test_what_exceeds_the_whole_budget_is_not_copied(standard: Path, share: float) -> None:
    """A prompt larger than the budget leaves as much of its beginning as there is room for."""
    prompt = tokens_of(1, 200)
    budget_nbytes = int(share * kept_nbytes(standard, prompt))
    with remembering(standard, budget_nbytes=budget_nbytes) as scene:
        scene.ask(prompt)
        expected = min(int(share * 207), 199)
        assert scene.ask(prompt).cached == pytest.approx(expected, abs=1)


def test_a_budget_of_nothing_keeps_nothing(folder: Path) -> None:
    """Off means off: no look-up, no snapshot, no count."""
    with remembering(folder, budget_nbytes=0) as scene:
        prompt = tokens_of(1, 100)
        assert [scene.ask(prompt).cached for _ in range(2)] == [0, 0]
        assert scene.tiny.caches.contents.book.live == 0
        assert not scene.tiny.prefix.counts.lookups


def test_every_look_up_is_logged_and_counted(standard: Path) -> None:
    """With the request's id, its tokens in all, cached and left, and the reason."""
    with remembering(standard) as scene, capture_logs() as logs:
        prompt = tokens_of(1, 50)
        scene.tiny.alone(prompt, request_id="r-1")
        scene.tiny.alone((*prompt[:30], *tokens_of(2, 10)), request_id="r-2")
        counts = scene.tiny.prefix.counts

        events = [
            (log["event"], log["request_id"], log["total"], log["cached"], log["left"])
            for log in logs
            if log["event"].startswith("prefix")
        ]
        assert events == [("prefix miss", "r-1", 50, 0, 50), ("prefix hit", "r-2", 40, 30, 10)]
        assert dict(counts.lookups) == {
            (False, CacheReason.NONE): 1,
            (True, CacheReason.DIVERGED): 1,
        }
        assert counts.hit_tokens == 30


def test_a_row_without_numbers_leaves_nothing_behind(tmp_path: Path) -> None:
    """What may not be numbers is not kept: the prompt is evaluated anew, and fails anew."""
    folder = write_tiny_model(tmp_path, nan_token=NAN_TOKEN)
    with remembering(folder) as scene:
        prompt = (*tokens_of(1, 40), NAN_TOKEN, *tokens_of(2, 10))
        for _ in range(2):
            sink = scene.tiny.alone(prompt)
            assert isinstance(sink.events[-1].error, InternalError)  # type: ignore[union-attr]
        assert scene.tiny.caches.contents.book.live == 0
        assert scene.ask(tokens_of(1, 40)).cached == 0


class _Broken:
    """A decoder that fails at its third token."""

    def __init__(self) -> None:
        self.left = 3

    def push(self, token_id: int) -> str:
        """Count down, then fail."""
        self.left -= 1
        if self.left == 0:
            raise ValueError(token_id)
        return "a"

    def finish(self) -> str:
        """Hold nothing back."""
        return ""


def test_a_row_whose_text_failed_is_kept(folder: Path) -> None:
    """Its layers are sound whatever became of its text: the next begins where it stopped."""
    with remembering(folder, make_decoder=lambda _: _Broken()) as scene:
        prompt = tokens_of(1, 100)
        sink = scene.tiny.alone(prompt)
        assert isinstance(sink.events[-1].error, InternalError)  # type: ignore[union-attr]

        assert len(sink.ids) == 2
        answer = answer_of(scene.tiny.alone((*prompt, *sink.ids, *tokens_of(2, 9)), max_tokens=1))
        assert answer.cached == 102


def test_release_all_keeps_no_more_than_was_shared(folder: Path) -> None:
    """An operator's end frees every row at once; captures in flight are closed with it."""
    with remembering(folder, chunk=16) as scene:
        for seed in range(4):
            scene.tiny.submit(tokens_of(seed, 100), max_tokens=50)
        for _ in range(20):
            scene.tiny.engine.step()
        scene.tiny.prefix.clear()
        scene.tiny.engine.release_all(InternalError("id"))

        assert scene.tiny.caches.rows == ()
        assert scene.tiny.caches.contents.book.live == 0
