"""`paged-trt bench`: one module per benchmark, each with a click command named `command`."""

from __future__ import annotations

import importlib
import pkgutil

import click

from paged_trt.scripts.command_group import HintingGroup


class BenchGroup(HintingGroup):
    """Finds the benchmarks of this folder: a new file is a new subcommand."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of the benchmarks, sorted."""
        return sorted(module.name for module in pkgutil.iter_modules(__path__))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of `paged_trt.scripts.bench.<name>`."""
        if cmd_name not in self.list_commands(ctx):
            return None
        module = importlib.import_module(f"{__name__}.{cmd_name}")
        found = module.command
        return found if isinstance(found, click.Command) else None


@click.group(cls=BenchGroup)
def command() -> None:
    """Measure; results go to JSON files that name commit, machine and method.

    \b
    Example:
      paged-trt bench e2e model.onnx engine --prompt "Hello" -o results.json
    """
