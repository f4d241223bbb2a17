"""What a long text takes that is read on a thread of the worker: no more than its bound."""

from __future__ import annotations

import lzma
import sys
from pathlib import Path

import pytest

from mlxd_shared import config
from tests.real_inputs import real_input
from tests.worker.fresh_process import environment, run

PEAK = """
import sys
from pathlib import Path
from mlxd_shared import config
from mlxd_worker.tokenizing.files import load_tokenizer

def told(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))

tokenizer = load_tokenizer(Path({folder!r}))
assert tokenizer.is_modest
text = {character!r} * (config.TOKENIZE_HERE_BYTES_MAX // len({character!r}.encode()))
tokenizer.encode("a")
Path("/proc/self/clear_refs").write_text("5")
before = told("VmRSS")
ids = tokenizer.encode(text)
print([len(ids), told("VmHWM") - before])
"""


@pytest.mark.skipif(sys.platform == "darwin", reason="the peak is read where Linux writes it")
def test_the_longest_text_takes_no_more_than_the_bound(tmp_path: Path) -> None:
    """Of a character whose normal form is three, each byte of which is a token of its own."""
    content = real_input("tokenizers", "gpt-neox-20b", "tokenizer.json.xz").read_bytes()
    (tmp_path / "tokenizer.json").write_bytes(lzma.decompress(content))
    tokens, peak_nbytes = run(
        PEAK.format(folder=str(tmp_path), character="\U0001d160"), environment()
    )
    assert tokens == 3 * config.TOKENIZE_HERE_BYTES_MAX
    assert peak_nbytes > config.TOKENIZE_HERE_MEMORY_BYTES_MAX // 4
    assert peak_nbytes <= config.TOKENIZE_HERE_MEMORY_BYTES_MAX
