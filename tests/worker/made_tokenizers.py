"""Small tokenizers of both families in use: byte-level BPE, and BPE with byte fallback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer

SENTENCES = ["once upon a time there was a little fox", "the fox said hello to the café 日本"] * 4
SPECIAL = ("<unk>", "<s>", "</s>")
BOS_ID, EOS_ID = 1, 2


def byte_level() -> Tokenizer:
    """Return a byte-level BPE tokenizer, as of GPT-2, Llama 3 and Qwen, that adds nothing."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(
        vocab_size=320, initial_alphabet=alphabet, special_tokens=list(SPECIAL), show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Return a BPE tokenizer with a token for each byte, as of Llama 2 and Mistral."""
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefghijklmnop"]
    vocabulary = {piece: index for index, piece in enumerate([*pieces, "▁a", "▁ab"])}
    merges = [("▁", "a"), ("▁a", "b")]
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(piece, special=True) for piece in SPECIAL])
    return tokenizer


def with_bos(tokenizer: Tokenizer) -> Tokenizer:
    """Return it with a post-processor that begins a text with BOS."""
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS_ID)])
    return tokenizer


def write_folder(folder: Path, tokenizer: Tokenizer, **files: Any) -> Path:
    """Write tokenizer.json and, for each keyword, `<keyword>.json`; return the folder."""
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder
