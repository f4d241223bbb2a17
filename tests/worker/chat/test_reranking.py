"""The forms in which a reranker is asked about a document."""

from __future__ import annotations

import json

from mlxd_shared.domain.chats import ChatMessage
from mlxd_shared.domain.requests import Reranking
from mlxd_worker.chat.reranking import question_about

PAIRS = '{{ messages | selectattr("role", "eq", "query") | list }}{{ "document" }}'
CHATS = "{% for m in messages %}{{ m.content }}{% endfor %}"
FORM = "<Instruct>: {}\n<Query>: who?\n<Document>: a king"


def test_a_template_of_pairs_is_given_them() -> None:
    """With the instruction as the system's; without one it is the template's to say."""
    pair = (ChatMessage("query", "who?"), ChatMessage("document", "a king"))
    assert question_about("a king", Reranking("who?"), PAIRS).messages == pair
    chat = question_about("a king", Reranking("who?", "find names"), PAIRS)
    assert chat.messages == (ChatMessage("system", "find names"), *pair)


def test_any_other_is_asked_in_the_form_of_qwen3() -> None:
    """One that names neither role, or one of them: yes or no, without reasoning."""
    for template in (CHATS, f"{CHATS} query document", CHATS + "{{ 'document' }}"):
        chat = question_about("a king", Reranking("who?", "find names"), template)
        system, user = chat.messages
        assert (system.role, user.role) == ("system", "user")
        assert 'the answer can only be "yes" or "no".' in system.content
        assert user.content == FORM.format("find names")
        assert json.loads(chat.variables_json) == {"enable_thinking": False}
    chat = question_about("a king", Reranking("who?"), CHATS)
    default = "Given a web search query, retrieve relevant passages that answer the query"
    assert chat.messages[1].content == FORM.format(default)
