"""The page's pure modules, called in a real browser: rates and quantiles, events, turns, pieces."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.async_api import Browser

from tests.fakes.mlxd_server import Answers, serving
from tests.fakes.replies import status
from tests.support.browser import NEEDS_CHROMIUM, open_page
from tests.support.gateways import gateway_over

pytestmark = [NEEDS_CHROMIUM, pytest.mark.asyncio(loop_scope="module")]
STATUSES = """
(start, now, generated, counts) => ({
  start, now, workers: [{ running: 2, waiting: 1 }, { running: 1, waiting: 0 }],
  counts: { a: { generated, prompt: 10, cached: 4, first: { bounds: [0.1, 1], counts } } },
})
"""
PROGRAM = f"""
async () => {{
  const {{ History, quantile }} = await import("/page/lib/history.js");
  const {{ parseEvent }} = await import("/page/lib/events.js");
  const {{ bytes, duration, figure }} = await import("/page/lib/format.js");
  const {{ piecesOf, messagesOf, turn, toolsOf }} = await import("/page/lib/chat.js");
  const at = {STATUSES};
  const history = new History();
  history.add(at(1, 100, 5, [0, 0, 0]));
  history.add(at(1, 102, 25, [1, 1, 0]));
  history.add(at(1, 120, 25, [1, 1, 0]));
  history.add(at(2, 200, 1000, [9, 0, 0]));
  history.add(at(2, 201, 1007, [9, 0, 0]));
  const said = turn("assistant", "b");
  said.calls = [{{ id: "1", name: "f", args: "{{}}", result: "r" }}];
  const {{ afterLook }} = await import("/page/lib/loads.js");
  const own = {{
    ended: {{ model: "a", error: "", busy: false, looks: 2 }},
    begun: {{ model: "b", error: "", busy: true, looks: 0 }},
    failed: {{ model: null, error: "c", busy: false, looks: 0 }},
  }};
  const [once, twice] = [afterLook(own), afterLook(afterLook(own))];
  return {{
    looks: [once, twice].map((each) => [each.ended.model, each.begun.model, each.failed.error]),
    isSettled: afterLook(twice) === twice,
    rates: history.columns("generated")[1],
    running: history.columns("running")[1],
    medians: history.columns("median")[1],
    quantiles: [
      quantile([1, 2], [0, 0, 0], 0.5), quantile([1, 2], [4, 0, 0], 0.5),
      quantile([1, 2], [1, 1, 2], 0.95), quantile([], [], 0.5),
    ],
    events: [
      parseEvent("event: a\\ndata: {{\\"b\\": 1}}"), parseEvent(": waiting 3 %"),
      parseEvent("data: [DONE]"), parseEvent(""),
    ],
    words: [
      bytes(0), bytes(1536), bytes(-1048576), duration(0.25), duration(75), duration(7260),
      duration(null), figure(0), figure(12.3), figure(1234.5),
    ],
    pieces: piecesOf("a\\n```js\\nb\\n```\\nc\\n```\\nd").map((each) => [each.code, each.text]),
    messages: messagesOf([turn("user", "a"), said, turn("assistant")], "s").map((m) => m.role),
    tools: toolsOf('[{{"name": "f"}}, {{"type": "function", "function": {{"name": "g"}}}}]')
      .map((tool) => tool.function.name),
  }};
}}
"""


async def test_the_pure_modules(chromium: Browser) -> None:
    """Each function gives what its documentation says, at its edges too."""
    async with (
        serving(Answers(statuses=[status()])) as fake,
        gateway_over(fake.address) as web,
        open_page(chromium, web.url) as page,
    ):
        got: Any = await page.evaluate(PROGRAM)
    # A rate is a mean of ten seconds, and none spans two starts of a server.
    assert got["rates"] == [None, 10, 0, None, 7]
    assert got["running"] == [3, 3, 3, 3, 3]
    assert got["medians"] == [None, pytest.approx(0.1), pytest.approx(0.1), None, None]
    assert got["quantiles"] == [None, 0.5, 2, None]
    assert got["events"] == [
        {"name": "a", "data": {"b": 1}}, {"name": "comment", "data": "waiting 3 %"},
        {"name": "end", "data": None}, None,
    ]  # fmt: skip
    assert got["words"] == [
        "0 B", "1.5 KiB", "\N{MINUS SIGN}1.0 MiB", "250 ms", "1 min", "2 h 1 min",
        "\N{EN DASH}", "0", "12", "1,235",
    ]  # fmt: skip
    assert got["pieces"] == [[False, "a"], [True, "b"], [False, "c"], [True, "d"]]
    assert got["messages"] == ["system", "user", "assistant", "tool"]
    assert got["tools"] == ["f", "g"]
    # A look that was under way when a load ended may be from before it, so it is not shown.
    assert got["looks"] == [["a", "b", "c"], [None, "b", "c"]]
    assert got["isSettled"]
