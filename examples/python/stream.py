"""Stream a completion from mlxd.

    python examples/python/stream.py [ADDRESS] [MODEL] [PROMPT]

The text goes to stdout as it comes, what it cost to stderr.
"""

from __future__ import annotations

import asyncio
import sys

from mlxd import Client, Delta, MlxdError, SamplingOptions


async def stream(address: str, model: str, prompt: str) -> None:
    """Print the continuation of `prompt`. Raises MlxdError, with the server's own words."""
    options = SamplingOptions(temperature=0.7, seed=42)
    async with (
        Client(address) as client,
        # Leaving this block, for whatever reason, cancels what is left of the stream.
        client.generate(prompt, model=model, sampling=options, max_tokens=48) as events,
    ):
        async for event in events:
            if isinstance(event, Delta):
                print(event.text, end="", flush=True)
            else:
                print()
                print(f"{event.reason.value}: {event.usage}", file=sys.stderr)


def main() -> int:
    """Read the arguments, stream, and return the exit code."""
    arguments = dict(enumerate(sys.argv[1:]))
    address = arguments.get(0, "127.0.0.1:8555")
    model, prompt = arguments.get(1, ""), arguments.get(2, "Once upon a time")
    try:
        asyncio.run(stream(address, model, prompt))
    except MlxdError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
