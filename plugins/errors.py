"""Every exception that Paged TRT raises, with the exit code and the stable code of its class.

Exit codes of the command line: 0 ok, 1 a comparison failed, 2 usage, configuration or
rewrite, 3 build, kernel or out of pages, 4 manifest or mismatch. Stable codes are never given
to another kind of error; `error_catalog` has the page of each.
"""

from __future__ import annotations

from typing import ClassVar


class PagedTrtError(Exception):
    """Base of all errors raised by Paged TRT; every class below has a code of its own.

    Attributes:
        code: stable code, such as `PTRT-K001`; an instance may carry a narrower one than its
            class, where TensorRT's own message says more.
    """

    exit_code: ClassVar[int] = 3
    code: str = "PTRT-X000"


class ConfigError(PagedTrtError, ValueError):
    """A value that the user passed cannot work."""

    exit_code = 2
    code = "PTRT-C001"


class KvPoolError(ConfigError):
    """The geometry of the KV pool is invalid."""

    code = "PTRT-C002"


class UnsupportedError(ConfigError):
    """A valid request that this version, flavour or machine does not support."""

    code = "PTRT-U001"


class DeviceMissingError(UnsupportedError):
    """No CUDA device can be used: there is no driver, no GPU, or no device of that number."""

    code = "PTRT-U002"


class TensorRtMissingError(UnsupportedError):
    """No TensorRT is installed, or the one that is does not load."""

    code = "PTRT-U003"


class PackageMissingError(UnsupportedError):
    """A package that an optional extra brings is not installed."""

    code = "PTRT-U004"


class PlanVersionError(UnsupportedError):
    """A plan was written by another version or flavour of TensorRT than the one installed."""

    code = "PTRT-T002"


class ComputeCapabilityError(UnsupportedError):
    """A plan, or the TensorRT that is installed, does not run on the compute capability here."""

    code = "PTRT-T005"


class OnnxRewriteError(PagedTrtError):
    """An ONNX model cannot be turned into a paged model.

    Args:
        node: name of the node that is in the way, or of the model where no node is.
        reason: why it did not match.
        remedy: what to export or pass instead.
    """

    exit_code = 2
    code = "PTRT-R001"

    def __init__(self, node: str, reason: str, remedy: str) -> None:
        self.node = node
        self.reason = reason
        self.remedy = remedy
        super().__init__(f"`{node}`: {reason}; {remedy}")


class SequenceError(PagedTrtError, ValueError):
    """A sequence or prompt cannot be served: too long, empty, unknown or already released."""

    exit_code = 2
    code = "PTRT-S001"


class QueueFullError(SequenceError):
    """As many sequences wait as may wait; nothing was changed, and a later try may succeed."""

    code = "PTRT-S002"


class BuildError(PagedTrtError, RuntimeError):
    """TensorRT built no engine.

    The message ends with the last lines of TensorRT's log. An exception that a plugin
    callback raised is `__cause__`.
    """

    code = "PTRT-B001"


class BuildCancelledError(BuildError):
    """The user stopped a build."""

    exit_code = 130
    code = "PTRT-B002"


class ManifestError(PagedTrtError):
    """A manifest or a file that it describes is missing, truncated or not what it claims."""

    exit_code = 4
    code = "PTRT-M001"


class SpecMismatchError(PagedTrtError):
    """Two stages disagree about one value.

    Args:
        field: what the two disagree about, such as `num_pages`.
        left: the value that was expected.
        right: the value that was found.
        where: which hop noticed it.
        remedy: what to do about it.
    """

    exit_code = 4
    code = "PTRT-M002"

    def __init__(
        self,
        field: str,
        left: object,
        right: object,
        *,
        where: str,
        remedy: str = "rebuild the engine with `paged-trt build`",
    ) -> None:
        self.field = field
        self.left = left
        self.right = right
        self.where = where
        super().__init__(f"{where}: `{field}` must be {left}, found {right}; {remedy}")


class KernelError(PagedTrtError, RuntimeError):
    """A CUDA kernel is missing, did not compile or did not launch."""

    code = "PTRT-K001"


class KernelCompileError(KernelError):
    """NVRTC refused a kernel; the message carries its log."""

    code = "PTRT-K002"


class KernelLaunchError(KernelError):
    """A kernel could not be launched."""

    code = "PTRT-K003"


class ExecutionError(PagedTrtError, RuntimeError):
    """A model failed while it ran a step, or its logits are no numbers."""

    code = "PTRT-E001"


class PagesExhausted(PagedTrtError):  # noqa: N818 - the contract's name
    """The KV pool has too few free pages; nothing was changed.

    Args:
        wanted: pages that were asked for.
        free: pages that were free.
    """

    code = "PTRT-P001"

    def __init__(self, wanted: int, free: int) -> None:
        self.wanted = wanted
        self.free = free
        super().__init__(
            f"{wanted} pages are wanted and {free} are free; release a sequence, "
            "or build the engine with more pages (`--retained-pages` or `--kv-pool-pages`)"
        )
