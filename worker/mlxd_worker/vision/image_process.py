"""The process in which images are decoded, so that no file can harm, hold up or fill the worker.

A decoder is a program that a stranger's file steers. So it runs here, in a process that limits its
memory and that is killed when it is late (`killable`). A question is a line of JSON, then the
file's bytes; an answer is a byte that says which it is, then the image's name and its pixels, or
why there are none.
"""

from __future__ import annotations

from mlxd_shared import config
from mlxd_worker.killable.process import serve
from mlxd_worker.vision.asking import BAD, GOOD, parts_of
from mlxd_worker.vision.decoding import Refused, Target, decode_image


def answer_to(question: bytes) -> bytes:
    """Return the answer to a question."""
    header, content = parts_of(question)
    try:
        name, pixels = decode_image(content, header["media_type"], Target(**header["target"]))
    except Refused as error:
        return BAD + str(error).encode(errors="replace")
    return GOOD + name + pixels


def main() -> None:
    """Serve standard input, within bounds of its own."""
    serve(answer_to, limit_s=config.IMAGE_READ_S, memory_nbytes_max=config.IMAGE_READ_BYTES_MAX)


if __name__ == "__main__":
    main()
