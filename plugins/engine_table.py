"""A network or an engine as data: what TensorRT reports of its tensors."""

from __future__ import annotations

import dataclasses
from typing import Final

from paged_trt.plugins.dtypes import DType

Dims = tuple[int, ...]
DYNAMIC: Final = -1
"""A dim that the profiles bound."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineTensor:
    """One tensor as TensorRT reports it.

    Attributes:
        name: tensor name.
        is_input: whether the engine reads it.
        dtype: element type.
        dims: dims, DYNAMIC where a profile bounds them.
        profiles: (min, opt, max) dims per profile; empty for an output.
        alias_of: input whose memory it uses; None where that is not reported.
    """

    name: str
    is_input: bool
    dtype: DType
    dims: Dims
    profiles: tuple[tuple[Dims, Dims, Dims], ...] = ()
    alias_of: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineTable:
    """A network or an engine.

    Attributes:
        source: what the table describes, for messages: `network` or `engine`.
        name: name that the network was given.
        tensors: inputs and outputs.
    """

    source: str
    name: str
    tensors: tuple[EngineTensor, ...]
