"""The `paged-trt` command: one file per subcommand, errors to exit codes."""

from __future__ import annotations

import importlib
import io
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

import click
from rich.console import Console
from rich.logging import RichHandler

from paged_trt.plugins.error_catalog import (
    INPUT_OUTPUT_CODE,
    INTERRUPTED_CODE,
    MEMORY_CODE,
    USAGE_CODE,
)
from paged_trt.plugins.errors import BuildCancelledError, ConfigError, PagedTrtError
from paged_trt.plugins.version import version
from paged_trt.scripts.command_group import HintingGroup
from paged_trt.scripts.error_output import Output, fail, show_usage, system_error_text

COMMANDS = (
    "explain",
    "calibrate",
    "build",
    "inspect",
    "run",
    "serve",
    "compare",
    "tune",
    "polygraphy",
    "bench",
    "doctor",
)
EXIT_USAGE = 2
EXIT_INPUT_OUTPUT = 3
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
"""As a shell reports SIGPIPE: click's own 1 would say that a comparison failed."""
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


class LazyGroup(HintingGroup):
    """Imports a subcommand's module only when it is named: `--help` stays fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of the subcommands, in the order of a user's work."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command object `command` of `paged_trt.scripts.<name>`."""
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"paged_trt.scripts.{cmd_name}")
        command = module.command
        assert isinstance(command, click.Command)  # noqa: S101 - ours, not the user's
        return command


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version(), prog_name="paged-trt")
def cli() -> None:
    """Paged attention inside a TensorRT engine: explain, build, inspect, run, serve and compare.

    Where something does not run, `paged-trt doctor` says what this machine lacks.

    \b
    Example:
      paged-trt build model.onnx -o engine --max-batch-size 4 \\
          --max-input-len 512 --max-kv-cache-capacity 1024
      paged-trt run engine --prompt "The capital of France is"
    """


def configure_logging(level: str) -> None:
    """Send the log to standard error, so that standard output stays data."""
    handler = RichHandler(
        console=Console(stderr=True), show_time=False, show_path=False, markup=False
    )
    logging.basicConfig(level=level, handlers=[handler], format="%(message)s", force=True)


def _log_level() -> str:
    level = os.environ.get("PAGED_TRT_LOG", "WARNING")
    if level.upper() not in LOG_LEVELS:
        raise ConfigError(f"PAGED_TRT_LOG must be one of {', '.join(LOG_LEVELS)}, got `{level}`")
    return level.upper()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line: see `run_command`."""
    return run_command(cli, arguments, name="paged-trt")


def run_command(
    command: click.Command, arguments: Sequence[str] | None = None, *, name: str | None = None
) -> int:
    """Run a command, with every error as one line, its code and an exit code.

    Args:
        command: what to run.
        arguments: words after the program's name; those of the process when None.
        name: the program's name in its help; `python -m MODULE` when None.

    Returns:
        Exit code: 0 ok, 1 a comparison failed, 2 usage, configuration or rewrite, 3 build,
        kernel or out of pages, 4 manifest or mismatch, 130 interrupted, 141 nobody reads the
        output any more.
    """
    _prepare_process()
    output = Output()
    try:
        configure_logging(_log_level())
        result = command.main(arguments, prog_name=name, standalone_mode=False, obj=output)
        return result if isinstance(result, int) else 0
    except (click.Abort, KeyboardInterrupt):
        return fail("interrupted", EXIT_INTERRUPTED, INTERRUPTED_CODE, output)
    except SystemExit:
        # Only click raises it here, for a pipe that was closed; its output is silenced by now.
        return EXIT_BROKEN_PIPE
    except click.ClickException as error:
        show_usage(error, sys.argv[1:] if arguments is None else arguments, output)
        return fail(error.format_message(), EXIT_USAGE, USAGE_CODE, output)
    except BuildCancelledError as error:
        code = fail(str(error), error.exit_code, error.code, output)
        # TensorRT-RTX corrupts its heap when a build is cancelled: no destructor may run.
        sys.stderr.flush()
        os._exit(code)
    except PagedTrtError as error:
        return fail(str(error), error.exit_code, error.code, output, cause=error.__cause__)
    except OSError as error:
        return fail(system_error_text(error), EXIT_INPUT_OUTPUT, INPUT_OUTPUT_CODE, output)
    except MemoryError:
        message = "out of host memory; use a smaller model or pool"
        return fail(message, EXIT_INPUT_OUTPUT, MEMORY_CODE, output)


def _prepare_process() -> None:
    """Let no character that a terminal cannot show, and no polite signal, end in a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            # A handler that is set already, such as nohup's, stays.
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Stop as Ctrl-C does: a build that is told to end leaves nothing half-written either."""
    # A shell's background job ignores SIGINT; SIGTERM must end it all the same.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        raise KeyboardInterrupt
    signal.raise_signal(signal.SIGINT)


def end(code: int) -> NoReturn:
    """End the process with `code`.

    Where KeyboardInterrupt once passed through code that an extension module runs, as some do
    while they are imported, Python ends `python -m` by SIGINT at exit, although it was handled.
    """
    if code == EXIT_INTERRUPTED:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    end(main())
