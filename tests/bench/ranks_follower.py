"""`python -m tests.bench.ranks_follower`: a follower whose weights are random."""

from mlxd_worker.distributed.__main__ import main
from mlxd_worker.machine.backend import prepare_backend

if __name__ == "__main__":
    prepare_backend()
    from tests.bench.ranks_weights import read_random

    read_random()
    main()
