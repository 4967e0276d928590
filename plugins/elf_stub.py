"""A shared library without code that gives a loaded library a second name.

The RTX wheels ship `libtensorrt_rtx.so.1`, and their ONNX parser opens `libtensorrt_rtx.so`
at the first plugin node: the miss is thrown through a noexcept function and ends the
process. A library whose SONAME is the missing name and which NEEDs the real one answers that
call, and unlike a link beside the wheel's files it works in a read-only environment and after
TensorRT was imported.
"""

from __future__ import annotations

import ctypes
import platform
import struct
import tempfile
from pathlib import Path
from typing import Final

_MACHINES: Final = {"x86_64": 62, "aarch64": 183}
"""ELF e_machine of each `platform.machine()` that NVIDIA builds wheels for."""
_HEADER_BYTES: Final = 64
_SEGMENT_BYTES: Final = 56
_SYMBOL_BYTES: Final = 24
_SEGMENTS: Final = 3
_LOAD, _DYNAMIC, _GNU_STACK = 1, 2, 0x6474E551
_READ_WRITE: Final = 6
_NULL, _NEEDED, _HASH, _STRTAB, _SYMTAB, _STRSZ, _SYMENT, _SONAME = 0, 1, 4, 5, 6, 10, 11, 14


def stub_library(soname: str, needed: str, *, machine: int) -> bytes:
    """Bytes of a 64-bit little-endian ELF library with no symbol of its own.

    Args:
        soname: the name that the library answers to.
        needed: the library that its users find their symbols in.
        machine: ELF e_machine.
    """
    names = b"\0" + soname.encode() + b"\0" + needed.encode() + b"\0"
    soname_offset, needed_offset = 1, 2 + len(soname)
    # One bucket, one chain entry, both empty: the table must exist, nothing is looked up in it.
    hash_table = struct.pack("<IIII", 1, 1, 0, 0)
    hash_at = _HEADER_BYTES + _SEGMENT_BYTES * _SEGMENTS
    symbols_at = _aligned(hash_at + len(hash_table))
    names_at = symbols_at + _SYMBOL_BYTES
    dynamic_at = _aligned(names_at + len(names))
    dynamic = b"".join(
        struct.pack("<QQ", tag, value)
        for tag, value in (
            (_NEEDED, needed_offset),
            (_SONAME, soname_offset),
            (_HASH, hash_at),
            (_STRTAB, names_at),
            (_SYMTAB, symbols_at),
            (_STRSZ, len(names)),
            (_SYMENT, _SYMBOL_BYTES),
            (_NULL, 0),
        )
    )
    size = dynamic_at + len(dynamic)
    image = bytearray(size)
    parts = {
        0: _header(machine),
        _HEADER_BYTES: _segment(_LOAD, 0, size, 4096)
        + _segment(_DYNAMIC, dynamic_at, len(dynamic), 8)
        + _segment(_GNU_STACK, 0, 0, 16),
        hash_at: hash_table,
        names_at: names,
        dynamic_at: dynamic,
    }
    for offset, part in parts.items():
        image[offset : offset + len(part)] = part
    return bytes(image)


def load_stub(soname: str, needed: str) -> None:
    """Load a stub for `needed`, which must be loaded already; nothing stays on the disk.

    A machine type that is not known here is left alone.

    Raises:
        OSError: the dynamic loader refused it.
    """
    machine = _MACHINES.get(platform.machine())
    if machine is None:
        return
    with tempfile.TemporaryDirectory(prefix="paged-trt-") as directory:
        path = Path(directory, soname)
        path.write_bytes(stub_library(soname, needed, machine=machine))
        # The handle is never closed, so the name stays taken after the file is gone.
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def _aligned(offset: int) -> int:
    return -(-offset // 8) * 8


def _header(machine: int) -> bytes:
    identity = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    shared_object, version = 3, 1
    fields = (shared_object, machine, version, 0, _HEADER_BYTES, 0, 0)
    sizes = (_HEADER_BYTES, _SEGMENT_BYTES, _SEGMENTS, 64, 0, 0)
    return identity + struct.pack("<HHIQQQI", *fields) + struct.pack("<HHHHHH", *sizes)


def _segment(kind: int, offset: int, size: int, alignment: int) -> bytes:
    return struct.pack(
        "<IIQQQQQQ", kind, _READ_WRITE, offset, offset, offset, size, size, alignment
    )
