"""The prepared corpus: everything training needs, in one folder.

Preparing takes a few minutes of CPU and is deterministic; training reads only this folder, so
the two can run on different machines.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from demo_training.chats.packing import Marks, chat_windows
from demo_training.chats.requests import training_chats
from demo_training.corpus import Removal, Story, split_corpus
from demo_training.shape import Shape
from demo_training.tokens import Ids, token_stream, train_tokenizer

CHATS_SEED = 20260102
STREAM_FILE = "stream.npz"
CHATS_FILE = "chats.npz"
FACTS_FILE = "facts.json"
TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class Prepared:
    """The training stream, the chats, the tokenizer, the held-out stories, the corpus facts."""

    stream: Ids
    chat_windows: Ids
    """`[count, context + 1]`, each beginning with a chat."""
    chat_marks: Marks
    """Of the same shape: where an answer first names whom it was asked for."""
    chats: int
    tokenizer: Tokenizer
    held_out: tuple[Story, ...]
    removal: Removal
    corpus_sha256: str
    stories_trained: int


def prepare(data: Path, folder: Path) -> None:
    """Read the corpus under `data` and write the prepared form into `folder`."""
    split = split_corpus(data)
    tokenizer = train_tokenizer(split.training)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / TOKENIZER_FILE), pretty=False)
    np.savez(folder / STREAM_FILE, stream=token_stream(tokenizer, split.training))
    chats = training_chats(split.training, [story.text for story in split.held_out], CHATS_SEED)
    context = Shape().max_position_embeddings
    windows, marks = chat_windows(tokenizer, chats, context)
    np.savez(folder / CHATS_FILE, windows=windows, marks=marks)
    facts = {
        "corpus_sha256": split.corpus_sha256,
        "stories_trained": len(split.training),
        "chats": len(chats),
        "removal": asdict(split.removal),
        "held_out": [asdict(story) for story in split.held_out],
    }
    (folder / FACTS_FILE).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def load_prepared(folder: Path) -> Prepared:
    """Read what `prepare` wrote."""
    facts = json.loads((folder / FACTS_FILE).read_text(encoding="utf-8"))
    with np.load(folder / STREAM_FILE) as arrays:
        stream: Ids = arrays["stream"]
    with np.load(folder / CHATS_FILE) as arrays:
        windows: Ids = arrays["windows"]
        marks: Marks = arrays["marks"]
    return Prepared(
        stream=stream,
        chat_windows=windows,
        chat_marks=marks,
        chats=facts["chats"],
        tokenizer=Tokenizer.from_file(str(folder / TOKENIZER_FILE)),
        held_out=tuple(Story(**story) for story in facts["held_out"]),
        removal=Removal(**facts["removal"]),
        corpus_sha256=facts["corpus_sha256"],
        stories_trained=facts["stories_trained"],
    )
