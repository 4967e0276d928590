"""Values with one row per token, as shapes: what is known of them and how shapes combine."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

Dims = tuple[int | None, ...]


STEP_TOKENS: Final = 1009
"""Tokens of the step whose shapes are followed: a prime that is no other dimension."""


@dataclass(frozen=True, slots=True)
class Rows:
    """A value with one row per token.

    Attributes:
        dims: its shape with STEP_TOKENS tokens; None where a dimension is not known.
        axis: the axis of the tokens, from 0; a token may own several of its entries.
    """

    dims: Dims
    axis: int

    @property
    def from_end(self) -> int:
        """The axis of the tokens, counted from the end: -1 is the last."""
        return self.axis - len(self.dims)


class Count(enum.Enum):
    """A value that tells how many tokens or positions there are: a shape, not data."""

    COUNT = "count"


State = Rows | Count | None
"""What is known of a value; None where it is the same for all tokens of all steps."""


class MixesError(Exception):
    """A node does not keep tokens apart; the message says how."""


def require_apart(rows: Rows, axes: Sequence[int]) -> set[int]:
    """Axes from 0, none of which may be that of the tokens."""
    found = {axis % len(rows.dims) if rows.dims else axis for axis in axes}
    if rows.axis in found:
        raise MixesError("works along the tokens of a step")
    return found


def resized(rows: Rows, axis: int, size: int | None) -> Rows:
    """Rows whose `axis` has another size."""
    dims = list(rows.dims)
    dims[axis] = size
    return replace(rows, dims=tuple(dims))


def rebuilt(dims: Sequence[tuple[int | None, bool]]) -> Rows:
    """Rows of dims that are marked where they hold the tokens."""
    axis = next(index for index, (_, is_tokens) in enumerate(dims) if is_tokens)
    return Rows(tuple(size for size, _ in dims), axis)


def marked_dims(rows: Rows) -> list[tuple[int | None, bool]]:
    """Sizes, marked where they hold the tokens."""
    return [(size, axis == rows.axis) for axis, size in enumerate(rows.dims)]


def joined(left: Rows, right: Rows) -> Rows:
    """Two values that have the same rows, broadcast."""
    require_same_rows(left, right)
    return broadcast(left, right.dims)


def require_same_rows(left: Rows, right: Rows, *, is_apart: bool = True) -> None:
    """Refuse values whose tokens are not on one axis."""
    same_rows = left.dims[left.axis] == right.dims[right.axis]
    if left.from_end != right.from_end or not same_rows or not is_apart:
        raise MixesError("combines each token with every other token")


def broadcast(rows: Rows, dims: Dims) -> Rows:
    """Rows broadcast with a value that is the same for all tokens."""
    if len(dims) >= -rows.from_end and dims[rows.from_end] not in {1, rows.dims[rows.axis], None}:
        raise MixesError("combines the tokens with a constant along their axis")
    width = max(len(rows.dims), len(dims))
    mine = (1,) * (width - len(rows.dims)) + rows.dims
    theirs = (1,) * (width - len(dims)) + dims
    sizes = [
        None if left is None or right is None else max(left, right)
        for left, right in zip(mine, theirs, strict=True)
    ]
    sizes[rows.from_end] = rows.dims[rows.axis]
    return Rows(tuple(sizes), width + rows.from_end)


def known_size(size: int | None) -> int:
    """A size that has to be known."""
    if size is None:
        raise MixesError("has an input whose shape is not known")
    return size
