"""The extension of `polygraphy run`: `--paged-trt`, `--paged-ref` and their options.

An entry point of the group `polygraphy.run.plugins`. Polygraphy calls it at the start of every
`polygraphy run`, so that nothing heavy is imported here: the script that it makes imports the
runners where one of them was chosen.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from polygraphy.logger import G_LOGGER
from polygraphy.tools.args import ModelArgs
from polygraphy.tools.args import util as args_util
from polygraphy.tools.args.base import BaseArgs, BaseRunnerArgs
from polygraphy.tools.script import make_invocable

_MANIFEST = "manifest.json"
_RUNNERS = "paged_trt.runtime.polygraphy_paged"


def argument_groups() -> list[Any]:
    """What Polygraphy adds to `polygraphy run`."""
    return [PagedEngineArgs(), PagedRefRunnerArgs(), PagedTrtRunnerArgs()]


class PagedEngineArgs(BaseArgs):  # type: ignore[misc] # Polygraphy has no types
    """Paged Engine: engine directories of `paged-trt build`.

    Depends on:

        - ModelArgs
    """

    def add_parser_args_impl(self) -> None:
        """Options of both runners."""
        self.group.add_argument(
            "--paged-engine",
            metavar="ENGINE_DIR",
            help="Engine directory for --paged-trt and --paged-ref. Defaults to the folder of the "
            "model file.",
            default=None,
        )
        self.group.add_argument(
            "--paged-device",
            metavar="NUMBER",
            type=int,
            help="CUDA device for --paged-trt. Defaults to 0.",
            default=None,
        )
        self.group.add_argument(
            "--paged-logits-only",
            action="store_true",
            help="Leave out the keys and values of the sequences, `key.<layer>` and "
            "`value.<layer>`, which are many numbers for a large model.",
            default=None,
        )

    def parse_impl(self, args: Any) -> None:
        """Keep what was given."""
        self._engine = args_util.get(args, "paged_engine")
        self._device = args_util.get(args, "paged_device")
        self._logits_only = args_util.get(args, "paged_logits_only")

    def add_runner(self, script: Any, *, executor: str, prefix: str) -> None:
        """Add a runner with this executor to the script."""
        model = self.arg_groups[ModelArgs].path
        folder = Path(self._engine) if self._engine else Path(model).parent
        if (Path(model) / _MANIFEST).is_file():
            G_LOGGER.critical(
                f"{model} is an engine directory, and Polygraphy wants a file of it: pass "
                f"{Path(model) / 'model.onnx'} for `--paged-ref`, or "
                f"{Path(model) / 'model.plan'} for `--paged-trt`"
            )
        if not (folder / _MANIFEST).is_file():
            G_LOGGER.critical(
                f"{folder} is no engine directory: it has no {_MANIFEST}. Pass "
                "`--paged-engine ENGINE_DIR`, or make one with `paged-trt build`"
            )
        script.add_import(imports=["LoadPagedEngine", "PagedRunner"], frm=_RUNNERS)
        loader = script.add_loader(
            make_invocable(
                "LoadPagedEngine", str(folder), executor=executor, device=self._device or 0
            ),
            "load_paged_engine",
        )
        with_kv = not self._logits_only
        script.add_runner(make_invocable("PagedRunner", loader, with_kv=with_kv, prefix=prefix))


class PagedRefRunnerArgs(BaseRunnerArgs):  # type: ignore[misc] # Polygraphy has no types
    """Paged Reference Inference: running an engine's rewritten model on a CPU.

    Depends on:

        - PagedEngineArgs
    """

    def get_name_opt_impl(self) -> tuple[str, str]:
        """Name for people and option."""
        return "Paged TRT's reference executor", "paged-ref"

    def add_to_script_impl(self, script: Any) -> None:
        """Add the runner."""
        self.arg_groups[PagedEngineArgs].add_runner(
            script, executor="reference", prefix="paged-ref"
        )


class PagedTrtRunnerArgs(BaseRunnerArgs):  # type: ignore[misc] # Polygraphy has no types
    """Paged TensorRT Inference: running an engine's plan on a GPU.

    Depends on:

        - PagedEngineArgs
    """

    def get_name_opt_impl(self) -> tuple[str, str]:
        """Name for people and option."""
        return "Paged TRT's TensorRT executor", "paged-trt"

    def add_to_script_impl(self, script: Any) -> None:
        """Add the runner."""
        self.arg_groups[PagedEngineArgs].add_runner(script, executor="tensorrt", prefix="paged-trt")
