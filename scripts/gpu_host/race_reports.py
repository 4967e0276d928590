"""Reads the reports of compute-sanitizer's racecheck: which accesses it saw against which."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

_FIRST: Final = re.compile(r"=+ (\w+): Race reported between (Read|Write) access at (.+)")
_OTHER: Final = re.compile(r"=+ +and (Read|Write) access at (.+) \[(\d+) hazards?\]")
_PLACE: Final = re.compile(r"(?:void )?(.*?)(?:\(\w+::\w*\))?\+(0x[0-9a-f]+)(?: in (\S+))?")
_CAST: Final = re.compile(r"\((?:int|bool|unsigned int)\)|\bpaged_trt::")


class _Access(NamedTuple):
    kernel: str
    place: str


def races(logs: Iterable[str]) -> list[dict[str, Any]]:
    """Every distinct pair of accesses of reports in analysis mode, with its hazards summed.

    Args:
        logs: texts of the tool; reports of other tools are passed over.

    Returns:
        A row for each access that others were seen against: `level` (error or warning), `kernel`,
        `access` (read or write and the offset in the kernel's code), `against` (hazards by access).
    """
    hazards: dict[tuple[str, _Access], Counter[str]] = {}
    for level, first, other, count in _pairs(logs):
        name = other.place if other.kernel == first.kernel else f"{other.kernel} {other.place}"
        hazards.setdefault((level, first), Counter())[name] += count
    return [
        {"level": level, "kernel": first.kernel, "access": first.place, "against": dict(counts)}
        for (level, first), counts in sorted(hazards.items())
    ]


def _pairs(logs: Iterable[str]) -> Iterator[tuple[str, _Access, _Access, int]]:
    for log in logs:
        found: tuple[str, _Access] | None = None
        for line in log.splitlines():
            if match := _FIRST.match(line):
                found = match[1].lower(), _access(match[2], match[3])
            elif found is not None and (match := _OTHER.match(line)):
                yield *found, _access(match[1], match[2]), int(match[3])


def _access(kind: str, place: str) -> _Access:
    match = _PLACE.fullmatch(place.strip())
    if match is None:
        return _Access(place.strip(), kind.lower())
    line = f" {match[3]}" if match[3] else ""
    return _Access(_CAST.sub("", match[1]), f"{kind.lower()} +{match[2]}{line}")
