"""Where streams wait for their conversations to be rendered, off the event loop.

Invariants:
- At most CHAT_RENDERS_MAX conversations are rendered at once, whoever has left meanwhile, and at
  most CHAT_RENDERS_WAITING_MAX more wait.
- A rendering is over after CHAT_RENDER_S: its child is killed then, and replaced when needed.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, Final

from mlxd_shared import config
from mlxd_shared.chats import Chat
from mlxd_shared.errors import QueueFull
from mlxd_worker.chat.format import ChatFormat, ChatPrompt
from mlxd_worker.chat.trouble import Trouble
from mlxd_worker.killable.pool import Died, Late, Pool
from mlxd_worker.tokenizing.room import TokenRoom

COMMAND: Final = (sys.executable, "-m", "mlxd_worker.chat.render_process")


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
        self._turns = asyncio.Semaphore(renders_max)
        self._room = renders_max + waiting_max
        self._waiting_max = waiting_max
        self._limit_s = limit_s
        self._tokens = TokenRoom()

    async def rendered(
        self, wanted: ChatFormat, chat: Chat, tokens: TokenRoom | None = None
    ) -> ChatPrompt:
        """Return a conversation as the model reads it.

        tokens: where what is rendered becomes tokens; None: in a room of its own.

        Raises:
            InvalidRequest: the template refuses it, fails on it, or takes too long.
            InvalidModel: the template is none; names the file.
            QueueFull: too many wait.
        """
        if self._room == 0:
            raise QueueFull("conversations to render", self._waiting_max)
        self._room -= 1
        try:
            await self._turns.acquire()
        except BaseException:
            self._room += 1
            raise
        # It keeps its turn to its end, whoever has left: a thread cannot be stopped.
        task = asyncio.create_task(asyncio.to_thread(self._render, wanted, chat))
        task.add_done_callback(self._over)
        text, nonce = await asyncio.shield(task)
        wanted.check_length(text, nonce)
        ids = await (tokens or self._tokens).encoded_chat(
            wanted.tokenizer,
            text,
            nonce=nonce,
            encode=lambda: wanted.encode(text, nonce),
            steering=wanted.steering,
        )
        return wanted.prompt(text, nonce, tuple(ids))

    def close(self) -> None:
        """End the children; nothing is rendered any more."""
        self._children.close()
        self._tokens.forget()

    def _over(self, task: asyncio.Task[tuple[str, str]]) -> None:
        self._turns.release()
        self._room += 1
        if not task.cancelled():
            task.exception()  # whoever waits has it; where nobody does, nobody is to be warned

    def _render(self, wanted: ChatFormat, chat: Chat) -> tuple[str, str]:
        """Return the text, and what marks people's parts in it."""
        job = wanted.job(chat)
        asked = {
            "template": job.template,
            "variables": job.variables,
            "now_s": job.now_s,
            "continues": job.continues,
        }
        try:
            answer = self._children.ask(json.dumps(asked).encode(), limit_s=self._limit_s)
        except Late:
            problem = f"takes longer than {self._limit_s:g} s"
            raise Trouble("bound", problem).error(job.file, job.nonce) from None
        except Died:
            problem = "takes more memory than there is for it"
            raise Trouble("bound", problem).error(job.file, job.nonce) from None
        outcome: dict[str, Any] = json.loads(answer)
        if "text" not in outcome:
            raise Trouble(**outcome).error(job.file, job.nonce)
        return str(outcome["text"]), job.nonce
