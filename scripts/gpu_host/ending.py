"""How the commands that `gpu_host run` starts end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from typing import NoReturn

import click

from paged_trt.plugins.errors import PagedTrtError


def end(command: click.Command) -> NoReturn:
    """Run a command and end the process: an error of ours is one line and exit code 2."""
    try:
        command()
    except (PagedTrtError, OSError) as error:
        click.echo(f"gpu_host: error: {error}", err=True)
        sys.exit(2)
    sys.exit(0)


def kill_group(process: subprocess.Popen[str]) -> None:
    """End a process that leads a session, and all that it started."""
    # Also where the leader has ended: what it started may go on.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
