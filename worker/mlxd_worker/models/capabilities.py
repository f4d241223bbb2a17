"""What a loaded model can do on the device that computes it, stated once.

Invariants:
- A model makes its capabilities when it is built; they never change afterwards.
- Nothing here depends on rows or caches: whoever chooses how steps are run looks at both.
- What a model does not state is what holds of any written here: it embeds and compiles, no more.
"""

from dataclasses import dataclass, field

from mlxd_worker.kernels.device import runs_cpu


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What the engine may do with a model; `engine.stepping` chooses by it, once a load."""

    embeds: bool = True
    """Whether `forward`'s rows are hidden ones, from which texts' vectors are made."""
    compiles: bool = True
    """Whether a decode step may be traced as one function."""
    stays_lazy: bool = False
    """Whether a decode step's `forward` evaluates nothing, so that it may be called early."""
    joins_passes: bool = False
    """Whether it is `JoiningPasses`, reading the weights once for all batches of a joined pass."""
    reads_chunks: bool = False
    """Whether a pass may be several rows' chunks (`Batch.counts`), over sliceable caches."""
    decodes_in_place: bool = False
    """Whether a decode step by slots writes standard caches in place (`attend_joined`)."""
    overlaps_steps: bool = False
    """Whether every decode step writes its caches in place, even while another is under way."""
    prompts_in_place: bool = False
    """Whether short prompts are written in place as well (`tokens.is_read_in_place`)."""
    on_cpu: bool = field(default_factory=runs_cpu)
    """Whether a CPU computes it."""
