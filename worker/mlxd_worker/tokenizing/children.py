"""The processes that try out a tokenizer and read its long texts, and whom their failures blame.

Invariants:
- The failure of a process that reads the tokenizer is blamed on tokenizer.json; that of one that
  reads a text, on the text.
- A tokenizer's bytes are put together for a starting process, and kept no longer than that.
"""

from __future__ import annotations

from typing import Any

from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidModel, InvalidRequest
from mlxd_worker.killable.pool import First, Pool
from mlxd_worker.killable.questions import Died, Late, Stop, Unready
from mlxd_worker.text.rules import FILE
from mlxd_worker.text.tokenizer import Tokenizer
from mlxd_worker.tokenizing.process import BAD, COMMAND, GOOD, LONG, message


def try_tokenizer(
    content: bytes, *, file: str = FILE, limit_s: float = config.TOKENIZER_TRIAL_S
) -> None:
    """Have a child read a tokenizer.json that inspection cannot judge, and tokenise some texts.

    Raises:
        InvalidModel: the library refuses it, or it takes too long or too much memory; names `file`.
    """
    children = Pool(COMMAND)
    try:
        _check(children.ask(message({"kind": "try"}, content), limit_s=limit_s), file)
    except Late:
        problem = f"takes longer than {limit_s:g} s to read, or a short text with it"
        raise InvalidModel(problem, file) from None
    except Died:
        most = config.TOKENIZE_CHILD_BYTES_MAX
        problem = f"takes more than {most} bytes of memory to read, or a short text with it"
        raise InvalidModel(problem, file) from None
    finally:
        children.close()


class Children:
    """The processes of one tokenizer. Any thread."""

    def __init__(self, tokenizer: Tokenizer, command: tuple[str, ...], *, learn_s: float) -> None:
        """Start none yet; each has `learn_s` to read the tokenizer."""
        self.tokenizer = tokenizer
        self._learn_s = learn_s
        self._pool = Pool(command, first=First(self._teach, learn_s, _check))

    def ask(
        self, how: dict[str, Any], content: bytes, *, field: str, limit_s: float, stop: Stop
    ) -> memoryview:
        """Return the answer of a process; waits for it.

        field: the content's name in errors.

        Raises:
            InvalidRequest: it takes too long or too much memory, or its text is too long; names
                `field`.
            InvalidModel: the tokenizer fails on it, or cannot be read; names its file.
            Stopped, Closed: the answer is no longer wanted.
        """
        try:
            answer = self._pool.ask(message(how, content), limit_s=limit_s, stop=stop)
        except Unready as error:
            most = config.TOKENIZE_CHILD_BYTES_MAX
            problem = f"a process of at most {most} bytes died of reading it"
            if error.is_late:
                problem = f"takes a process longer than {self._learn_s:g} s to read"
            raise InvalidModel(problem, FILE) from None
        except Late:
            problem = f"takes longer than {limit_s:.0f} s to read with the model's {FILE}"
            raise InvalidRequest.of(field, problem) from None
        except Died:
            most = config.TOKENIZE_CHILD_BYTES_MAX
            problem = f"takes more than {most} bytes of memory to read with the model's {FILE}"
            raise InvalidRequest.of(field, problem) from None
        _check(answer)
        if answer.startswith(LONG):
            raise InvalidRequest.of(field, answer[len(LONG) :].decode())
        return memoryview(answer)[len(GOOD) :]

    def rest(self) -> None:
        """End the idle ones."""
        self._pool.rest()

    def close(self) -> None:
        """End all of them and start no more; waits until they have ended."""
        self._pool.close()

    def _teach(self) -> bytes:
        return message({"kind": "learn", **self.tokenizer.settings}, self.tokenizer.content)


def _check(answer: bytes, file: str = FILE) -> None:
    """Raise what the library reported as the fault of its file."""
    if answer.startswith(BAD):
        raise InvalidModel(answer[len(BAD) :].decode(), file)
