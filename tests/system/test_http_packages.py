"""Packages of other people over a real gateway, controller and worker: tools, and leaving.

LangChain, LiteLLM, LlamaIndex and OpenAI's package for Node are programs of their own (tests/sdks),
whose proxies lead nowhere: whatever they would fetch from elsewhere fails.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import anthropic
import ollama
import openai
import pytest

from mlxd import Client
from tests.sdks import ANSWER_TOKENS, QUESTION, RESULT, SCHEMA, TOOL
from tests.support.chat_template import TEMPLATE, write_template
from tests.support.gateways import Web, serve_web
from tests.support.served import Served

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "shared" / "mlxd_shared" / "demo_model"
NODE = ROOT / "tests" / "sdks" / "node"
FRAMEWORKS = ("langchain_chat", "litellm_chat", "llama_index_chat")
NOWHERE = "http://127.0.0.1:9"
NO_NETWORK = {
    "http_proxy": NOWHERE, "https_proxy": NOWHERE, "all_proxy": NOWHERE, "no_proxy": "127.0.0.1",
}  # fmt: skip
LIMIT_S = 600
ENDLESS = 900
"""Tokens that nobody waits for."""
CALL_TOKENS = 400
"""Enough for a call of a model that likes blanks."""
ASK: Any = {"role": "user", "content": QUESTION}


@pytest.fixture(name="models", scope="module")
def write_models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Options for the built-in model, as it is and with a template of one that calls at once."""
    folder = tmp_path_factory.mktemp("models") / "chatty"
    shutil.copytree(DEMO, folder)
    write_template(folder, TEMPLATE.replace("<think> and ", ""))
    return ("--model", f"demo={DEMO}", "--model", f"chatty={folder}")


async def run_program(*command: str, cwd: Path) -> Any:
    """Run a program to its end; return the JSON that it printed."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=cwd,
        env=dict(os.environ) | NO_NETWORK,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), LIMIT_S)
    assert process.returncode == 0, err.decode()
    return json.loads(out)


async def wait_until_idle(web: Web) -> None:
    """Return once no worker has a stream; no request is sent."""
    assert isinstance(web.served, Served)
    async with Client(web.served.address) as client, client.watch_status(interval_s=0.1) as watch:
        async for status in watch:
            if not any(worker.streams_running for worker in status.workers):
                return


@pytest.mark.asyncio
@pytest.mark.timeout(LIMIT_S)
async def test_frameworks_chat_with_a_tool(models: tuple[str, ...]) -> None:
    """Each has a call that matches the tool's schema, and an answer to its result."""
    async with serve_web(*models) as web:
        for framework in FRAMEWORKS:
            command = (sys.executable, "-m", f"tests.sdks.{framework}", web.url)
            chat = await run_program(*command, cwd=ROOT)
            assert (framework, chat["name"], set(chat["arguments"])) == (
                framework, "weather", {"city"},
            )  # fmt: skip
            assert chat["answer"]


@pytest.mark.asyncio
@pytest.mark.timeout(LIMIT_S)
async def test_openai_for_node(models: tuple[str, ...], tmp_path: Path) -> None:
    """Models, chats with a tool, streams, formats, responses, vectors, errors, and leaving."""
    for tool in ("node", "npm"):
        if shutil.which(tool) is None:
            pytest.skip(f"no {tool} on PATH (make tools installs it)")
    folder = shutil.copytree(NODE, tmp_path / "node", ignore=shutil.ignore_patterns("node_modules"))
    await asyncio.to_thread(
        subprocess.run,
        ["npm", "ci", "--no-audit", "--no-fund"],
        cwd=folder, check=True, stdin=subprocess.DEVNULL, capture_output=True,
    )  # fmt: skip
    async with serve_web(*models) as web:
        seen = await run_program("node", "chat.mjs", web.url, cwd=folder)
        await wait_until_idle(web)
    assert seen["models"] == ["chatty", "demo"]
    assert (seen["call"]["name"], set(seen["call"]["arguments"])) == ("weather", {"city"})
    assert seen["answer"]
    assert seen["usage"] == 8
    assert seen["same"]
    assert set(seen["held"]) == {"city"}
    assert seen["grown"]
    assert seen["vectors"] == [256, 256]
    assert seen["errors"] == [
        ["NotFoundError", 404, "model"],
        ["BadRequestError", 400, "temperature"],
    ]
    assert seen["aborted"]


@pytest.mark.asyncio
async def test_tools_over_two_turns(models: tuple[str, ...]) -> None:
    """OpenAI's package and Anthropic's: what they were given goes back as it came."""
    async with (
        serve_web(*models) as web,
        openai.AsyncOpenAI(base_url=f"{web.url}/v1", api_key="none", max_retries=0) as oai,
        anthropic.AsyncAnthropic(base_url=web.url, api_key="none", max_retries=0) as ant,
    ):
        tools: Any = [TOOL]
        async with oai.chat.completions.stream(
            model="chatty", messages=[ASK], tools=tools, tool_choice="required",
            parallel_tool_calls=False, temperature=0,
        ) as stream:  # fmt: skip
            message: Any = (await stream.get_final_completion()).choices[0].message
        (call,) = message.tool_calls
        assert set(json.loads(call.function.arguments)) == {"city"}
        result: Any = {"role": "tool", "tool_call_id": call.id, "content": RESULT}
        answer = await oai.chat.completions.create(
            model="chatty", messages=[ASK, message, result], max_tokens=ANSWER_TOKENS, temperature=0
        )
        assert answer.choices[0].message.content

        own: Any = [{"name": "weather", "input_schema": SCHEMA, "strict": True}]
        common: dict[str, Any] = {"model": "chatty", "extra_body": {"temperature": 0}}
        chosen: Any = {"type": "any", "disable_parallel_tool_use": True}
        async with ant.messages.stream(
            messages=[ASK], max_tokens=CALL_TOKENS, tools=own, tool_choice=chosen, **common
        ) as blocks:
            first = await blocks.get_final_message()
        used = first.content[-1]
        assert isinstance(used, anthropic.types.ToolUseBlock)
        assert (first.stop_reason, set(used.input)) == ("tool_use", {"city"})
        result_block: Any = {"type": "tool_result", "tool_use_id": used.id, "content": RESULT}
        answered: Any = {"role": "assistant", "content": first.content}
        turns: list[Any] = [ASK, answered, {"role": "user", "content": [result_block]}]
        second = await ant.messages.create(messages=turns, max_tokens=ANSWER_TOKENS, **common)
        assert isinstance(second.content[0], anthropic.types.TextBlock)
        held = await ant.messages.create(
            messages=[ASK], max_tokens=CALL_TOKENS, **common,
            output_config={"format": {"type": "json_schema", "schema": SCHEMA}},
        )  # fmt: skip
        assert isinstance(held.content[0], anthropic.types.TextBlock)
        assert set(json.loads(held.content[0].text)) == {"city"}


@pytest.mark.asyncio
async def test_whoever_leaves_frees_a_row(models: tuple[str, ...]) -> None:
    """In the middle of a stream, by each package's own way to leave."""
    async with (
        serve_web(*models) as web,
        openai.AsyncOpenAI(base_url=f"{web.url}/v1", api_key="none", max_retries=0) as oai,
        anthropic.AsyncAnthropic(base_url=web.url, api_key="none", max_retries=0) as ant,
    ):
        async with await oai.chat.completions.create(
            model="chatty", messages=[ASK], max_tokens=ENDLESS, stream=True
        ) as chunks:
            await anext(aiter(chunks))
        await wait_until_idle(web)
        async with ant.messages.stream(
            model="chatty", messages=[ASK], max_tokens=ENDLESS
        ) as stream:
            await anext(aiter(stream.text_stream))
        await wait_until_idle(web)
        own = ollama.AsyncClient(host=web.url)
        pieces: Any = await own.chat("chatty", [ASK], stream=True, options={"num_predict": ENDLESS})
        await anext(pieces)
        await pieces.aclose()
        await wait_until_idle(web)
        await own._client.aclose()
