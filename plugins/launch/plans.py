"""How the attention of one step is executed."""

from __future__ import annotations

import dataclasses
import enum
from typing import Final, TypeAlias

from paged_trt.plugins.errors import ConfigError, KvPoolError
from paged_trt.plugins.kv import INT32_MAX, TOKENS_PER_PAGE, pages_per_slot

AUTO: Final = "auto"
"""Text of `--attention-plan` that leaves the choice to the planner."""
CLUSTER_BLOCKS: Final = (2, 4, 8)
"""Sizes of a thread block cluster: larger ones are not portable."""
MOST_COUNTER_BLOCKS: Final = 64
"""One block merges what all others leave: beyond, a merge kernel of its own is faster."""
_USAGE: Final = (
    "`auto`, `direct`, `cluster:BLOCKS`, `counter:BLOCKS`, `balanced`, `gather` or "
    "`split:TOKENS[:THRESHOLD]`, such as `split:512`"
)


class PlanSource(enum.Enum):
    """Who chose a plan; an earlier member wins over a later one."""

    EXPLICIT = "explicit"
    TUNED = "tuned"
    HEURISTIC = "heuristic"


@dataclasses.dataclass(frozen=True, slots=True)
class Direct:
    """One thread block reads all keys of a (sequence, key head)."""

    def __str__(self) -> str:
        return "direct"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SplitKv:
    """Partitions of the keys are attended in parallel and merged.

    Attributes:
        partition_tokens: keys of one partition, a multiple of TOKENS_PER_PAGE, so that a page
            is never shared by two partitions.
        threshold_tokens: a sequence with no more keys than this stays in one partition.

    Raises:
        ConfigError: `partition_tokens` is no multiple of a page, or the threshold is no int32.
    """

    partition_tokens: int
    threshold_tokens: int

    def __post_init__(self) -> None:
        try:
            pages_per_slot(self.partition_tokens)
        except KvPoolError:
            raise ConfigError(
                f"partition_tokens must be a positive multiple of {TOKENS_PER_PAGE}, "
                f"got {self.partition_tokens}"
            ) from None
        # The kernels and the plan's serialized fields hold int32.
        if not 0 <= self.threshold_tokens <= INT32_MAX:
            raise ConfigError(
                f"threshold_tokens must be from 0 to {INT32_MAX}, got {self.threshold_tokens}"
            )

    def __str__(self) -> str:
        return f"split:{self.partition_tokens}:{self.threshold_tokens}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The blocks of a cluster share the keys of a (sequence, key head) and merge on chip; sm_90.

    Attributes:
        blocks: of a cluster, one of CLUSTER_BLOCKS.

    Raises:
        ConfigError: `blocks` is no size of a cluster.
    """

    blocks: int

    def __post_init__(self) -> None:
        if self.blocks not in CLUSTER_BLOCKS:
            raise ConfigError(f"a cluster has 2, 4 or 8 blocks, got {self.blocks}")

    def __str__(self) -> str:
        return f"cluster:{self.blocks}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Counter:
    """Blocks share the keys of a (sequence, key head) evenly; the last to finish merges.

    Attributes:
        blocks: of each (sequence, key head), from 2 to MOST_COUNTER_BLOCKS.

    Raises:
        ConfigError: `blocks` is out of range.
    """

    blocks: int

    def __post_init__(self) -> None:
        if not 2 <= self.blocks <= MOST_COUNTER_BLOCKS:
            raise ConfigError(
                f"a counter has from 2 to {MOST_COUNTER_BLOCKS} blocks, got {self.blocks}"
            )

    def __str__(self) -> str:
        return f"counter:{self.blocks}"


@dataclasses.dataclass(frozen=True, slots=True)
class Balanced:
    """The blocks that fit on the device share all keys of the batch, by a schedule made there."""

    def __str__(self) -> str:
        return "balanced"


@dataclasses.dataclass(frozen=True, slots=True)
class Gather:
    """Prefill steps gather the pages of an 8-bit pool for Hopper's kernel where they can.

    It says nothing about decoding.
    """

    def __str__(self) -> str:
        return "gather"


AttentionPlan: TypeAlias = Direct | Cluster | Counter | Balanced | SplitKv | Gather


_SHARED: Final[dict[str, type[Cluster] | type[Counter]]] = {
    "cluster": Cluster,
    "counter": Counter,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPlan:
    """How a step with more than one token per sequence is attended.

    Attributes:
        kernel: `portable` or `hopper`.
        reason: why that one.
        blocks: thread blocks of the launch; 0 where the kernel's tile decides.
        partitions: blocks that share the keys of one query tile; 1: none is split.
        takes_tiles: blocks take the next tile from a counter in the workspace, instead of having
            them dealt out in advance.
        gathers: the pages of an 8-bit pool are gathered into the workspace first.
    """

    kernel: str
    reason: str
    blocks: int = 0
    partitions: int = 1
    takes_tiles: bool = False
    gathers: bool = False

    def __str__(self) -> str:
        source = " from gathered pages" if self.gathers else ""
        split = f", keys split in {self.partitions}" if self.partitions > 1 else ""
        return f"{self.kernel}{source}{split} ({self.reason})"


def parse_attention_plan(text: str) -> AttentionPlan | None:
    """Plan of an `--attention-plan` text; None for `auto`.

    A split without a threshold splits every sequence that is longer than one partition.

    Raises:
        ConfigError: the text names no plan.
    """
    if text == AUTO:
        return None
    if text == "direct":
        return Direct()
    if text == "balanced":
        return Balanced()
    if text == "gather":
        return Gather()
    kind, *numbers = text.split(":")
    if kind in _SHARED and len(numbers) == 1 and _is_number(numbers[0]):
        return _SHARED[kind](blocks=int(numbers[0]))
    if kind != "split" or not 1 <= len(numbers) <= 2 or not all(map(_is_number, numbers)):
        raise ConfigError(f"`{text}` is no attention plan; use {_USAGE}")
    partition, threshold = int(numbers[0]), int(numbers[-1])
    return SplitKv(partition_tokens=partition, threshold_tokens=threshold)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()
