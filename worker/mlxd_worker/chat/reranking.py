"""How a reranker is asked about a document: a conversation in the form that its template is for.

Sources
- templates with messages of the roles `query` and `document`: sentence-transformers 5, and so the
  files of Qwen3-Reranker of today;
- the question for all others: the card of Qwen3-Reranker, whose first files have the template of
  Qwen3's chats.

Invariants:
- Query, document and instruction are contents of messages: what they spell never steers.
"""

from __future__ import annotations

import json
import re
from typing import Final

from mlxd_shared.domain.chats import Chat, ChatMessage
from mlxd_shared.domain.requests import Reranking

INSTRUCTION: Final = "Given a web search query, retrieve relevant passages that answer the query"
_SYSTEM: Final = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
_ROLE: Final = r"""["']{}["']"""
_WITHOUT_REASONING: Final = json.dumps({"enable_thinking": False})


def question_about(document: str, reranking: Reranking, template: str) -> Chat:
    """Return the conversation whose answer says whether `document` fits the query.

    template: the model's chat template, by whose text the form is chosen.
    """
    instruction = reranking.instruction
    if _knows_pairs(template):
        system = (ChatMessage("system", instruction),) if instruction else ()
        pair = (ChatMessage("query", reranking.query), ChatMessage("document", document))
        return Chat((*system, *pair))
    question = (
        f"<Instruct>: {instruction or INSTRUCTION}\n"
        f"<Query>: {reranking.query}\n<Document>: {document}"
    )
    messages = (ChatMessage("system", _SYSTEM), ChatMessage("user", question))
    return Chat(messages, variables_json=_WITHOUT_REASONING)


def _knows_pairs(template: str) -> bool:
    """Return whether a template names both roles of a pair."""
    return all(re.search(_ROLE.format(role), template) for role in ("query", "document"))
