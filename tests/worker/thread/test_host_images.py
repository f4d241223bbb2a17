"""A resident model that sees: its images' account, and what a rest and an unload give back."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxd_models.files.image_settings import ImageSettings
from mlxd_models.sizes.sight_sizes import SightSizes
from mlxd_shared.domain.chats import Chat, ChatMessage, ContentPart
from mlxd_shared.domain.devices import DeviceKind
from mlxd_shared.domain.errors import InvalidModel, ModelUnloaded
from mlxd_shared.domain.requests import LoadSpec
from mlxd_shared.ops.backends import choose_backend, installed_versions
from mlxd_worker.engine.request import StreamId, Submit
from mlxd_worker.models.base import Sighted
from mlxd_worker.thread.facts import Loaded, LoadJob
from mlxd_worker.thread.host import ModelHost
from mlxd_worker.thread.resident import open_gallery
from mlxd_worker.vision.sight import Sight, place_images
from tests.support.engines import GREEDY, Collected
from tests.support.gemma3_cases import write_marked_model
from tests.support.mlx_memory import live_nbytes
from tests.support.seeing import SIDE, TOKENS, write_seeing_model
from tests.support.tiny_model import write_json

HIDDEN = 32
FEATURES_NBYTES = TOKENS * HIDDEN * 4


@dataclass(slots=True)
class Hosted:
    """A host, and its model's folder."""

    host: ModelHost
    folder: Path

    def load(self) -> Loaded:
        """Load the model; return what is known of it."""
        spec = LoadSpec(rows_max=2, prefix_cache_nbytes=0)
        return self.host.load(LoadJob(self.folder, "sees", "d" * 64, spec), lambda _: None)

    def show(self, loaded: Loaded, colour: int) -> Collected:
        """Run a stream over an image of one colour to its end."""
        assert loaded.sight is not None
        sizes = loaded.sight.sizes
        pixels = bytes([colour]) * (3 * SIDE * SIDE)
        placed = place_images([4, sizes.token_id, 9, 8], [(bytes([colour]), pixels)], sizes)
        sink = Collected()
        request = Submit(
            stream=StreamId(colour),
            prompt=placed.ids,
            sampling=GREEDY,
            max_tokens=4,
            submitted_s=0.0,
            sink=sink,
            images=placed.images,
            keys=placed.keys,
        )
        self.host.submit(request)
        while not sink.ended:
            self.host.step()
        return sink

    def accounts(self) -> dict[str, int]:
        """Return the bytes of each account."""
        return {account.name: account.nbytes for account in self.host.settle().accounts}


@pytest.fixture
def hosted(tmp_path: Path) -> Iterator[Hosted]:
    """A host on this thread, and a tiny LLaVA; MLX's own limits are put back."""
    limit = mx.set_cache_limit(1 << 40)
    mx.set_cache_limit(limit)
    kind = choose_backend(installed_versions(), platform=sys.platform).kind
    live_nbytes()  # what others left behind is not freed while bytes are compared
    host = ModelHost(device=kind)
    yield Hosted(host, write_seeing_model(tmp_path / "sees"))
    host.unload(ModelUnloaded("sees"))
    mx.set_cache_limit(limit)


def test_features_have_an_account(hosted: Hosted) -> None:
    """As many bytes as features of two images have; a rest and an unload leave none, the audit
    holds."""
    others_nbytes = live_nbytes()
    loaded = hosted.load()
    assert hosted.accounts()["images"] == 0, "the warm-up keeps nothing"
    for colour in (7, 200, 7):
        assert len(hosted.show(loaded, colour).ids) == 4
    assert hosted.accounts()["images"] == 2 * FEATURES_NBYTES
    unaccounted = hosted.host.settle().unaccounted_nbytes
    assert abs(unaccounted - others_nbytes) <= 64 << 10
    hosted.host.rest()
    assert hosted.accounts()["images"] == 0
    hosted.show(loaded, 7)
    hosted.host.shrink(0)
    assert hosted.accounts()["images"] == 0
    hosted.show(loaded, 9)
    hosted.host.unload(ModelUnloaded("sees"))
    assert hosted.accounts() == dict.fromkeys(hosted.accounts(), 0)


def test_a_model_that_does_not_say_how_it_sees_reads_text(hosted: Hosted) -> None:
    """And knows which file is missing; one whose token people write is refused."""
    (hosted.folder / "preprocessor_config.json").rename(hosted.folder / "kept")
    blind = hosted.load()
    assert blind.sight is None
    assert "preprocessor_config.json" in blind.unseeing
    hosted.host.unload(ModelUnloaded("sees"))
    (hosted.folder / "kept").rename(hosted.folder / "preprocessor_config.json")
    config = hosted.folder / "config.json"
    said = config.read_text(encoding="utf-8")
    place = hosted.load().sight
    assert place is not None
    hosted.host.unload(ModelUnloaded("sees"))
    written = f'"image_token_id": {place.sizes.token_id}'
    config.write_text(said.replace(written, '"image_token_id": 100'), encoding="utf-8")
    with pytest.raises(InvalidModel, match="no control token"):
        hosted.load()


class Towers(Sighted):
    """Sees nothing but how many images it is shown, and fails where it is to."""

    def __init__(self, *, fails: bool = False) -> None:
        """Be shown nothing yet."""
        self.shown: list[int] = []
        self._fails = fails

    def see(self, pixels: mx.array, settings: ImageSettings) -> mx.array:
        """Return features of nothing."""
        if self._fails:
            raise RuntimeError("no kernel")
        self.shown.append(pixels.shape[0])
        return mx.zeros((pixels.shape[0], TOKENS, HIDDEN))


@pytest.mark.parametrize(("device", "shown"), [(DeviceKind.CPU, []), (DeviceKind.CUDA, [1])])
def test_one_blank_image_warms_a_tower(device: DeviceKind, shown: list[int]) -> None:
    """Where something is compiled for it, and then nothing of it is kept; where that fails, it is
    the model that is refused."""
    plain = ImageSettings(SIDE, None, 3, 1.0, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    sizes = SightSizes(token_id=5, tokens=TOKENS, side=SIDE, hidden=HIDDEN, pass_values=1)
    towers: Any = Towers()
    gallery = open_gallery(towers, Sight(sizes, plain), device)
    assert gallery is not None
    assert towers.shown == shown
    assert not gallery.arrays()
    failing: Any = Towers(fails=True)
    if shown:
        with pytest.raises(InvalidModel, match="cannot see a blank image: no kernel"):
            open_gallery(failing, Sight(sizes, plain), device)


def test_a_template_that_writes_a_mark_alone_is_completed(tmp_path: Path) -> None:
    """A Gemma 3 that is loaded has all of an image where its template writes the first mark; one
    whose mark anybody could write is refused."""
    limit = mx.set_cache_limit(1 << 40)
    mx.set_cache_limit(limit)
    folder = write_marked_model(tmp_path / "marked")
    host = ModelHost(device=choose_backend(installed_versions(), platform=sys.platform).kind)
    job = LoadJob(folder, "marked", "d" * 64, LoadSpec(rows_max=1, prefix_cache_nbytes=0))
    loaded = host.load(job, lambda _: None)
    assert loaded.sight is not None
    assert loaded.chat is not None
    before, place, behind = loaded.sight.sizes.around or (0, 0, 0)
    chat = Chat((ChatMessage("user", parts=(ContentPart(image=b"file"),)),))
    ids = loaded.chat.encode(loaded.chat.show(chat, "a <start_of_image> b"), "0")
    at = ids.index(place)
    assert (ids[at - 1], ids[at + 1]) == (before, behind)
    host.unload(ModelUnloaded("marked"))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    write_json(folder / "config.json", config | {"eoi_token_index": 100})
    with pytest.raises(InvalidModel, match="100, which stands for an image, is no control token"):
        host.load(job, lambda _: None)
    host.unload(ModelUnloaded("marked"))
    mx.set_cache_limit(limit)
