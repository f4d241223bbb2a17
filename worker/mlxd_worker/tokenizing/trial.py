"""Whether a tokenizer that inspection cannot judge reads texts at all: a child tries it."""

from __future__ import annotations

from typing import Final

from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidModel
from mlxd_worker.killable.pool import Pool
from mlxd_worker.killable.questions import Died, Late
from mlxd_worker.text.rules import FILE
from mlxd_worker.tokenizing.process import BAD, COMMAND, message

_TRY: Final = {"kind": "try"}


def try_tokenizer(
    content: bytes, *, file: str = FILE, limit_s: float = config.TOKENIZER_TRIAL_S
) -> None:
    """Have a child read a tokenizer.json, and some texts with it.

    Raises:
        InvalidModel: the library refuses it, or it takes too long or too much memory; names `file`.
    """
    children = Pool(COMMAND)
    try:
        answer = children.ask(message(_TRY, content), limit_s=limit_s)
    except Late:
        problem = f"takes longer than {limit_s:g} s to read, or a short text with it"
        raise InvalidModel(problem, file) from None
    except Died:
        most = config.TOKENIZE_CHILD_BYTES_MAX
        problem = f"takes more than {most} bytes of memory to read, or a short text with it"
        raise InvalidModel(problem, file) from None
    finally:
        children.close()
    if answer.startswith(BAD):
        raise InvalidModel(answer[len(BAD) :].decode(), file)
