"""What a run was asked for, how much of everything it does, and what a step is."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from paged_trt.scripts.gpu_host.host_results import results_path

HERE: Final = "paged_trt.scripts.gpu_host"
SMOLLM2: Final = "smollm2"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One command.

    Attributes:
        name: of the step in its phase.
        words: program and arguments.
        limit_s: seconds after which it is interrupted, then killed.
        makes: what it makes; where that is there already, the step is not run.
        needs: what an earlier step makes; where that is missing, the step is not run.
    """

    name: str
    words: tuple[str, ...]
    limit_s: float
    makes: Path | None = None
    needs: Path | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Limits of the engines that are built, and what runs on them."""

    batch: int
    input_len: int
    capacity: int
    new_tokens: int
    serving_batch: int
    serving_input_len: int
    serving_capacity: int
    host_steps: int
    rates: tuple[int, ...]
    requests: int
    shared_prefix: int
    cells: tuple[str, ...]


ON_A_GPU: Final = Sizes(
    batch=8,
    input_len=512,
    capacity=1024,
    new_tokens=64,
    serving_batch=64,
    serving_input_len=2048,
    serving_capacity=3072,
    host_steps=200,
    # 10 s and 29 s, beside some 75 s of `warm_up`; a rate of 2 would take 113 s more.
    rates=(32, 8),
    requests=200,
    shared_prefix=256,
    cells=("1x512", "8x512"),
)
ON_A_CPU: Final = Sizes(
    batch=2,
    input_len=128,
    capacity=256,
    new_tokens=3,
    serving_batch=4,
    serving_input_len=128,
    serving_capacity=1024,
    host_steps=3,
    rates=(20,),
    requests=2,
    shared_prefix=16,
    cells=("1x32",),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a run was asked for.

    Attributes:
        output: folder of the results.
        workspace: folder of models and engines; what is there is used again.
        model: an ONNX model, `smollm2`, or None for a random toy.
        golden: what `gpu_host golden` wrote; None leaves the phase `polygraphy` without a step.
        device: number of the CUDA device.
        parallel: processes of pytest.
        tree: commit for the results; None asks git.
        dry_run: there is no GPU.
    """

    output: Path
    workspace: Path
    model: str | None
    golden: Path | None
    device: int
    parallel: int
    tree: str | None
    dry_run: bool

    @property
    def sizes(self) -> Sizes:
        """What runs, and how much of it."""
        return ON_A_CPU if self.dry_run else ON_A_GPU

    @property
    def executor(self) -> tuple[str, ...]:
        """Options that choose what runs an engine."""
        return (
            ("--executor", "reference")
            if self.dry_run
            else ("--executor", "tensorrt", "--device", str(self.device))
        )

    @property
    def label(self) -> str:
        """The model in the name of a results file."""
        return SMOLLM2 if self.model == SMOLLM2 else "toy" if self.model is None else "model"

    @property
    def model_file(self) -> Path:
        """The ONNX model."""
        if self.model is None or self.model == SMOLLM2:
            return self.workspace / self.label / "model.onnx"
        return Path(self.model)

    def engine(self, name: str) -> Path:
        """An engine directory of this model."""
        return self.workspace / f"{self.label}-{name}{'-dry' if self.dry_run else ''}"

    def results(self, kind: str, label: str = "") -> str:
        """A results file."""
        name = "-".join(filter(None, (self.label, label)))
        return str(results_path(self.output, kind, device=self.device, label=name))

    def ours(self, module: str, *words: str, last: Sequence[str] = ()) -> tuple[str, ...]:
        """A command of this package that writes into the output folder; `last` is for pytest."""
        common = ("-o", str(self.output), "--device", str(self.device))
        tree = ("--commit", self.tree) if self.tree else ()
        end = ("--", *last) if last else ()
        return (sys.executable, "-m", f"{HERE}.{module}", *words, *common, *tree, *end)
