"""Where streams wait for their conversations to be rendered, off the event loop.

Invariants:
- At most CHAT_RENDERS_MAX conversations are rendered at once, abandoned ones included, and at
  most CHAT_RENDERS_WAITING_MAX more wait.
- The event loop looks at no text that was rendered, nor at its ids: whatever takes time in
  proportion to them is done on the thread that asked for the text, or that has the ids found.
- A rendering is over after CHAT_RENDER_S, or when nobody waits for its text any more: its child is
  killed then, and replaced when needed.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from typing import Any, Final

from mlxd_shared import config
from mlxd_shared.domain.chats import Chat
from mlxd_shared.domain.errors import ShuttingDown
from mlxd_worker.chat.format import ChatFormat, ChatPrompt
from mlxd_worker.chat.trouble import Trouble
from mlxd_worker.killable.pool import Pool
from mlxd_worker.killable.questions import Closed, Died, Late, Stop
from mlxd_worker.rooms.askers import Askers
from mlxd_worker.tokenizing.room import TokenRoom

COMMAND: Final = (sys.executable, "-m", "mlxd_worker.chat.render_process")

_Rendered = tuple[str, str, ChatPrompt]
"""A text, what marks people's parts in it, and the prompt that it makes, without its ids."""


class RenderRoom:
    """One worker's renderings. One owner: the event loop."""

    def __init__(
        self,
        *,
        renders_max: int = config.CHAT_RENDERS_MAX,
        waiting_max: int = config.CHAT_RENDERS_WAITING_MAX,
        limit_s: float = config.CHAT_RENDER_S,
    ) -> None:
        """Start no process yet."""
        self._children = Pool(COMMAND)
        self._askers = Askers(
            "conversations to render",
            self._children,
            turns_max=renders_max,
            waiting_max=waiting_max,
        )
        self._limit_s = limit_s
        self._tokens = TokenRoom()

    async def render(
        self, wanted: ChatFormat, chat: Chat, tokens: TokenRoom | None = None
    ) -> ChatPrompt:
        """Return a conversation as the model reads it.

        tokens: where what is rendered becomes tokens; None: in a room of its own.

        Raises:
            InvalidRequest: the template refuses it, fails on it, or takes too long.
            InvalidModel: the template is none; names the file.
            QueueFull: too many wait.
            ShuttingDown: the room is closed.
        """
        render = partial(self._render, wanted, chat)
        text, nonce, prompt = await self._askers.do("chat", render)
        ids = await (tokens or self._tokens).encode_chat(
            wanted.tokenizer,
            text,
            nonce=nonce,
            encode=lambda: wanted.encode(text, nonce),
            steering=wanted.steering,
        )
        return replace(prompt, ids=ids)

    async def close(self) -> None:
        """End the children; render no more."""
        await self._askers.close()
        await self._tokens.close()

    def _render(self, wanted: ChatFormat, chat: Chat, stop: Stop) -> _Rendered:
        """Return a conversation's text, and its prompt but for the ids."""
        job = wanted.job(chat)
        question = {
            "template": job.template,
            "variables": job.variables,
            "now_s": job.now_s,
            "continues": job.continues,
            "sees": job.sees,
        }
        try:
            message = json.dumps(question).encode()
            answer = self._children.ask(message, limit_s=self._limit_s, stop=stop)
        except Late:
            problem = f"takes longer than {self._limit_s:g} s"
            raise Trouble("bound", problem).error(job.file, job.nonce) from None
        except Died:
            problem = "takes more memory than there is for it"
            raise Trouble("bound", problem).error(job.file, job.nonce) from None
        except Closed:
            raise ShuttingDown from None
        outcome: dict[str, Any] = json.loads(answer)
        if "text" not in outcome:
            raise Trouble(**outcome).error(job.file, job.nonce)
        text = wanted.show(chat, str(outcome["text"]))
        return text, job.nonce, wanted.prompt(text, job.nonce)
