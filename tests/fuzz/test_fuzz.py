"""Every target, for its time; and proof that the harness sees what it is there to see."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxd_shared.domain.errors import InvalidModel
from tests.fuzz import chat_targets
from tests.fuzz.harness import Breach, Target, fuzz, seconds
from tests.fuzz.store_targets import TARGETS as STORE_TARGETS
from tests.worker import fresh_process

TARGETS: tuple[Target, ...] = (*STORE_TARGETS, *chat_targets.TARGETS)
"""Whoever has more adds them here; the time in CI is shared by all."""


@pytest.fixture(autouse=True, scope="module")
def _processes() -> Iterator[None]:
    """What renders templates ends with the tests."""
    chat_targets.warm()
    yield
    chat_targets.close()


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.__name__)
def test_wrong_inputs_are_refused(target: Target, tmp_path: Path) -> None:
    """Nothing but our own errors, nothing opened outside, no hang, bounded memory."""
    tried = fuzz(target, tmp_path, for_s=seconds(len(TARGETS)))
    sys.stdout.write(f"{target.__name__}: {tried}\n")
    assert 0 < tried.refused < tried.runs


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.__name__)
def test_wrong_inputs_are_refused_for_long(target: Target, tmp_path: Path) -> None:
    """The same, with another seed each time and for minutes."""
    seed = random.SystemRandom().randrange(1 << 32)
    for_s = seconds(len(TARGETS), soak=True)
    tried = fuzz(target, tmp_path, for_s=for_s, seed=seed, runs_max=None)
    sys.stdout.write(f"{target.__name__}, seed {seed}: {tried}\n")


def _raises(rng: random.Random, place: Path) -> None:
    raise KeyError(rng.random(), place)


def _opens(rng: random.Random, place: Path) -> None:
    (place / "link").unlink(missing_ok=True)
    (place / "link").symlink_to("/etc/hostname")
    (place / "link").read_bytes()
    raise InvalidModel(str(rng.random()))


GROWS = """
import json
from pathlib import Path
from tests.fuzz.harness import Breach, fuzz
from tests.support.peaks import peak_nbytes

NBYTES = peak_nbytes() + (600 << 20)

def grows(rng, place):
    assert len(bytearray(NBYTES)) > rng.random()

try:
    fuzz(grows, Path(sys.argv[1]), for_s=0.0, runs_min=1, runs_max=1)
except Breach as breach:
    print(json.dumps(str(breach)))
"""


def test_growth_is_seen(tmp_path: Path) -> None:
    """In a process of its own: beyond a peak that others have left it would take gigabytes."""
    code = GROWS.replace("sys.argv[1]", repr(str(tmp_path)))
    breach = fresh_process.run(code, fresh_process.environment())
    assert breach.startswith("grows")
    assert "MiB more" in breach


@pytest.mark.parametrize(("target", "words"), [(_raises, "KeyError"), (_opens, "opened /etc")])
def test_a_breach_is_seen(target: Target, words: str, tmp_path: Path) -> None:
    """Errors that are not ours and files elsewhere: each ends the run and names the target."""
    with pytest.raises(Breach, match=words) as caught:
        fuzz(target, tmp_path, for_s=0.0, runs_min=1, runs_max=1)
    assert target.__name__ in str(caught.value)
