"""Which other libraries take part in a run."""

from __future__ import annotations

from pathlib import Path

from paged_trt.plugins.errors import UnsupportedError
from paged_trt.scripts.kernel_bench.cells import Family
from paged_trt.scripts.kernel_bench.cudnn import cudnn_peers
from paged_trt.scripts.kernel_bench.flash_attention import flash_attention_peers
from paged_trt.scripts.kernel_bench.flashinfer import flashinfer_peers
from paged_trt.scripts.kernel_bench.peers import Peer, optional, prepare_environment

WANTED = "flashinfer, flash_attn_interface (FlashAttention-3) and cudnn"


def require_torch() -> None:
    """Refuse a run with other libraries where they cannot work.

    Raises:
        UnsupportedError: torch cannot be imported, or has no device.
    """
    torch = optional("torch")
    if torch is None:
        raise UnsupportedError(
            "`--peers` needs torch, which cannot be imported; install it with the libraries to "
            "compare with, or leave `--peers` out"
        )
    if not torch.cuda.is_available():
        raise UnsupportedError(
            f"torch {torch.__version__} sees no CUDA device; install torch for CUDA, or leave "
            "`--peers` out"
        )


def find_peers(stream: int, folder: Path) -> list[Peer]:
    """Every library that can be imported.

    Args:
        stream: handle of the stream that is timed.
        folder: where they may write.

    Raises:
        UnsupportedError: there is none.
    """
    prepare_environment(folder)
    found = [*flashinfer_peers(), *flash_attention_peers(), *cudnn_peers(stream)]
    if not found:
        raise UnsupportedError(
            f"none of {WANTED} can be imported; put them on PYTHONPATH, or leave `--peers` out"
        )
    return found


def versions_of(peers: list[Peer], family: Family) -> dict[str, str]:
    """Version of each library that takes part in a family, by the name that its times have."""
    return {peer.name: peer.version for peer in peers if family in peer.families}
