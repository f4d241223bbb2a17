"""What a rendering met, and what a client is told of it."""

from __future__ import annotations

from dataclasses import dataclass

from mlxd_models.files.chat_template import FIELD, TEMPLATE_FILE, TOOL_FILE
from mlxd_shared.config import CHAT_PROBLEM_CHARS_MAX
from mlxd_shared.domain.errors import InvalidModel, InvalidRequest, MlxdError


@dataclass(frozen=True, slots=True)
class Trouble:
    """What a rendering met."""

    kind: str
    """syntax, refused, continue, bound or fails."""
    problem: str
    line: int | None = None
    """Of the template, where it is one of its lines."""
    field: str = ""
    """Within the chat (`messages[2].content`), where it is that which the template cannot take."""

    def error(self, file: str, nonce: str) -> MlxdError:
        """Return what a client is told, without the marks that `nonce` left.

        file: where the model has its template.
        """
        problem = self.problem.replace(nonce, "")[:CHAT_PROBLEM_CHARS_MAX]
        match self.kind:
            case "syntax":
                field = "" if file in {TEMPLATE_FILE, TOOL_FILE} else FIELD
                return InvalidModel(f"line {self.line}: {problem}", file, field)
            case "refused":
                reason = f"the model's template refuses: {problem}"
                return InvalidRequest.of("chat.messages", reason)
            case "continue":
                return InvalidRequest.of("chat.continue_final_message", problem)
            case "bound":
                return InvalidRequest.of("chat", f"its rendering: {problem}")
            case _:
                place = file if self.line is None else f"{file}, line {self.line}"
                reason = f"the model's template cannot render it ({place}): {problem}"
                return InvalidRequest.of(f"chat.{self.field}" if self.field else "chat", reason)
