"""The NVIDIA GPUs of this machine that the controller, and so its workers, may see.

Invariants:
- A GPU is known by the driver's id, which is the same however few of them a process sees, and named
  by its place in nvidia-smi: gpu0, gpu1, ...
- What the controller's own CUDA_VISIBLE_DEVICES hides is not there.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass

from mlxd_shared import config
from mlxd_shared.ops.logs import get_logger

NVIDIA_SMI_TIMEOUT_S = 10.0
VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
_FIELDS = "index,uuid,name,memory.total,memory.free"
_log = get_logger("device")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as nvidia-smi told at the start, before any worker of this controller ran."""

    index: int
    id: str
    product: str
    total_bytes: int
    free_bytes: int

    @property
    def name(self) -> str:
        """What it is called here."""
        return f"gpu{self.index}"


def nvidia_gpus() -> tuple[Gpu, ...]:
    """Return each GPU that nvidia-smi names; () without it. Blocks."""
    command = ("nvidia-smi", f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits")
    try:
        found = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=NVIDIA_SMI_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError) as error:
        _log.info("nvidia-smi gave nothing", reason=str(error))
        return ()
    gpus = (_gpu(line) for line in found.stdout.splitlines() if line.strip())
    return tuple(gpu for gpu in gpus if gpu is not None)


def _gpu(line: str) -> Gpu | None:
    """Return what a line says; None where it has no figures, as of memory shared with the host.

    Nor has a warning, which nvidia-smi writes between the lines that it was asked for.
    """
    parts = [part.strip() for part in line.split(",")]
    if len(parts) < _FIELDS.count(",") + 1 or not parts[0].isdecimal():
        _log.warning("nvidia-smi says what is no GPU", line=line.strip())
        return None
    index, uuid, *name, total, free = parts
    if not (total.isdecimal() and free.isdecimal()):
        _log.warning("a GPU without a memory of its own is left out", gpu=line.strip())
        return None
    sizes = (int(total) * config.MIB, int(free) * config.MIB)
    return Gpu(int(index), uuid, ", ".join(name), *sizes)


def visible(gpus: tuple[Gpu, ...], said: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs that a process sees whose CUDA_VISIBLE_DEVICES is `said`; None: not set.

    By their places or ids, which may be shortened; as CUDA has it, what stands behind a word that
    means none of them, or one again, is not seen.
    """
    if said is None:
        return gpus
    found: list[Gpu] = []
    for word in filter(None, (part.strip() for part in said.split(","))):
        meant = [gpu for gpu in gpus if _means(word, gpu)]
        if len(meant) != 1 or meant[0] in found:
            _log.warning("what is visible ends here", variable=VISIBLE_VARIABLE, word=word)
            break
        found += meant
    return tuple(found)


def _means(word: str, gpu: Gpu) -> bool:
    return int(word) == gpu.index if word.isdecimal() else gpu.id.startswith(word)
