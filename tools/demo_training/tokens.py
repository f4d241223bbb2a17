"""The tokenizer, and the corpus as one stream of token ids.

Invariant: the stream is `0 story 0 story 0 ... story 0`. Token 0, `<|endoftext|>`, is the only
document boundary: it ends a story (EOS) and begins the next one (BOS), so a bare prompt reads
like the opening of a story, and a story can end.

Two more special tokens, the last ids of the vocabulary, begin and end a turn of a chat. No text
of the corpus holds them.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOUNDARY = "<|endoftext|>"
BOUNDARY_ID = 0
VOCABULARY = 4096
TURN_BEGIN = "<|im_start|>"
TURN_END = "<|im_end|>"
TURN_BEGIN_ID = VOCABULARY - 2
TURN_END_ID = VOCABULARY - 1
SPECIAL_TOKENS = {BOUNDARY_ID: BOUNDARY, TURN_BEGIN_ID: TURN_BEGIN, TURN_END_ID: TURN_END}
STORIES_PER_BATCH = 64

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

Ids = npt.NDArray[np.uint16]


def train_tokenizer(texts: Sequence[str]) -> Tokenizer:
    """Train a byte-level BPE on `texts`; encoding puts the boundary token first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TURN_BEGIN_ID,
        special_tokens=[BOUNDARY],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOUNDARY} $A", pair=None, special_tokens=[(BOUNDARY, BOUNDARY_ID)]
    )
    turns = [AddedToken(token, special=True, normalized=False) for token in (TURN_BEGIN, TURN_END)]
    tokenizer.add_special_tokens(turns)
    assert tokenizer.token_to_id(BOUNDARY) == BOUNDARY_ID
    assert tokenizer.token_to_id(TURN_BEGIN) == TURN_BEGIN_ID
    assert tokenizer.token_to_id(TURN_END) == TURN_END_ID
    assert tokenizer.get_vocab_size() == VOCABULARY
    return tokenizer


def story_ids(tokenizer: Tokenizer, texts: Sequence[str]) -> Iterable[list[int]]:
    """Yield the ids of each text, without boundaries, a bounded batch at a time."""
    for start in range(0, len(texts), STORIES_PER_BATCH):
        batch = list(texts[start : start + STORIES_PER_BATCH])
        for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
            yield encoding.ids


def token_stream(tokenizer: Tokenizer, texts: Sequence[str]) -> Ids:
    """Return all texts as one stream, a boundary before, between and after them."""
    boundary = np.array([BOUNDARY_ID], np.uint16)
    parts = [boundary]
    for ids in story_ids(tokenizer, texts):
        parts += [np.array(ids, np.uint16), boundary]
    return np.concatenate(parts)


def tokenizer_config(context: int) -> dict[str, object]:
    """Return tokenizer_config.json for a model of this context length."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "bos_token": BOUNDARY,
        "eos_token": BOUNDARY,
        "unk_token": None,
        "pad_token": None,
        "add_bos_token": True,
        "add_eos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
        "added_tokens_decoder": {
            str(token_id): {
                "content": token,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
            for token_id, token in SPECIAL_TOKENS.items()
        },
    }


def write_tokenizer(tokenizer: Tokenizer, folder: Path, *, context: int) -> None:
    """Write tokenizer.json and tokenizer_config.json into `folder`."""
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = json.dumps(tokenizer_config(context), indent=2)
    (folder / "tokenizer_config.json").write_text(config + "\n", encoding="utf-8")
