"""A follower that gets the signals of a stop before it has done anything.

`python -m tests.worker.distributed.hit_early --fd FD ...`, as a leader starts followers.
"""

from __future__ import annotations

import os
import signal

if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(os.getpid(), number)

    from mlxd_worker.distributed.__main__ import main

    main()
