"""The process in which chat templates are rendered, so that none can hold up or fill the worker.

A template is a program. What it computes cannot be bounded by looking at it: loops in loops, texts
that double. So it runs here, in a process that limits its memory and that is killed when it is
late (`killable`). Asked and answered is JSON, of a job (`Job`) and of what `answered` returns.
"""

from __future__ import annotations

import json
from typing import Any

import jinja2

from mlxd_shared import config
from mlxd_worker.chat.environment import NotContinued, Refusal, TooLong, render_chat
from mlxd_worker.killable.process import serve


def answered(job: dict[str, Any]) -> dict[str, str]:
    """Return the text of a job, or `kind` and `problem` of what keeps it from having one."""
    try:
        text = render_chat(
            job["template"],
            job["variables"],
            now_s=job["now_s"],
            chars_max=config.PROMPT_CHARS_MAX,
            continues=job["continues"],
        )
        text.encode()  # half a character, which no tokenizer takes
    except Exception as error:  # noqa: BLE001 - a template's own: any class there is
        kind, problem = _judged(error)
        return {"kind": kind, "problem": problem}
    return {"text": text}


def _judged(error: Exception) -> tuple[str, str]:
    """Return what kind of trouble a rendering met, and what to say about it."""
    told = next((it for kind, it in _TOLD.items() if isinstance(error, kind)), None)
    match error:
        case jinja2.TemplateSyntaxError():
            told = ("syntax", f"line {error.lineno}: {error.message}")
        case Refusal():
            told = ("refused", str(error.message))
    return told or ("fails", f"{type(error).__name__}: {error}")


_TOLD = {
    NotContinued: ("continue", "the template leaves its content out"),
    TooLong: ("bound", f"above {config.PROMPT_CHARS_MAX} characters"),
    MemoryError: ("bound", "takes more memory than there is for it"),
    RecursionError: ("bound", "nested too deep"),
}


def main() -> None:
    """Serve standard input, within bounds of its own."""
    serve(
        lambda job: json.dumps(answered(json.loads(job))).encode(),
        limit_s=config.CHAT_RENDER_S,
        memory_nbytes_max=config.CHAT_RENDER_BYTES_MAX,
    )


if __name__ == "__main__":
    main()
