"""A worker, real but for its messages, each of which has one token: so a test counts tokens.

With CHUNK_VARIABLE its prompts are evaluated in chunks of so many tokens. In chunks of one a prompt
goes through the very passes that its tokens went through when they were generated.
"""

from __future__ import annotations

import os
import sys

from mlxd_shared import config
from mlxd_shared.ops import logs
from mlxd_worker.__main__ import run
from mlxd_worker.process.options import parse_options

CHUNK_VARIABLE = "TEST_CHUNK_TOKENS"


def main() -> None:
    """Run it with the worker's own command line."""
    config.EVENTS_PER_MESSAGE_MAX = 1
    if CHUNK_VARIABLE in os.environ:  # read as the engine is imported, which is later
        config.PREFILL_CHUNK_TOKENS = int(os.environ[CHUNK_VARIABLE])
    options = parse_options()
    logs.configure(level=options.log_level, fmt=options.log_format)
    sys.exit(run(options))


if __name__ == "__main__":
    main()
