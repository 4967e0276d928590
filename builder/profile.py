"""Optimization profiles as data: from the tensor table and the parsed dims to bounds.

Pure. A fixed dim, and every dim of a pool is one, is taken from the parsed network: it is
never typed again, and `load_check` compares it with the spec afterwards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from paged_trt.plugins.engine_table import DYNAMIC, Dims
from paged_trt.plugins.errors import SpecMismatchError
from paged_trt.plugins.tensors import (
    NUM_SEQS,
    NUM_SEQS_PLUS_1,
    NUM_TOKENS,
    TABLE_WIDTH,
    Dim,
    EngineSpec,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Smallest, tuned-for and largest value."""

    min: int
    opt: int
    max: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One profile.

    Attributes:
        name: `context` or `generation`.
        shapes: (min, opt, max) dims of every input.
    """

    name: str
    shapes: Mapping[str, tuple[Dims, Dims, Dims]]


def make_profiles(spec: EngineSpec, parsed_dims: Mapping[str, Dims]) -> tuple[Profile, Profile]:
    """The context profile (prefill, mixed steps) and the generation profile (T = N).

    Args:
        spec: tensor table and limits.
        parsed_dims: dims of each network input, DYNAMIC where unknown.

    Raises:
        SpecMismatchError: an input of the table is not in the network, or its rank differs.
    """
    seqs = spec.pool.max_batch_size
    width = Bounds(min=1, opt=spec.pool.max_pages_per_seq, max=spec.pool.max_pages_per_seq)
    context = _symbols(
        Bounds(min=1, opt=spec.max_num_tokens, max=spec.max_token_rows),
        # One long prompt at a time is the common prefill step.
        Bounds(min=1, opt=1, max=seqs),
        width,
    )
    rows = Bounds(min=1, opt=seqs, max=seqs)
    generation = _symbols(rows, rows, width)
    return (
        _profile("context", spec, parsed_dims, context),
        _profile("generation", spec, parsed_dims, generation),
    )


def _symbols(tokens: Bounds, seqs: Bounds, width: Bounds) -> dict[str, Bounds]:
    return {
        NUM_TOKENS: tokens,
        NUM_SEQS: seqs,
        NUM_SEQS_PLUS_1: Bounds(min=seqs.min + 1, opt=seqs.opt + 1, max=seqs.max + 1),
        TABLE_WIDTH: width,
    }


def _profile(
    name: str,
    spec: EngineSpec,
    parsed_dims: Mapping[str, Dims],
    symbols: Mapping[str, Bounds],
) -> Profile:
    shapes = {}
    for tensor in spec.tensors():
        if not tensor.role.is_input:
            continue
        found = parsed_dims.get(tensor.name)
        if found is None or len(found) != len(tensor.dims):
            raise SpecMismatchError(
                f"{tensor.name}.dims", tensor.dims, found, where=f"profile {name}"
            )
        bounds = [
            _bounds(dim, parsed, symbols) for dim, parsed in zip(tensor.dims, found, strict=True)
        ]
        shapes[tensor.name] = (
            tuple(bound.min for bound in bounds),
            tuple(bound.opt for bound in bounds),
            tuple(bound.max for bound in bounds),
        )
    return Profile(name=name, shapes=shapes)


def _bounds(dim: Dim, parsed: int, symbols: Mapping[str, Bounds]) -> Bounds:
    if isinstance(dim, str) and parsed == DYNAMIC:
        return symbols[dim]
    return Bounds(min=parsed, opt=parsed, max=parsed)
