"""What this process holds of the host's memory, for tests of growth over many calls."""

from __future__ import annotations

import ctypes
import gc
import platform
from pathlib import Path

import pytest

_GLIBC = tuple(map(int, (platform.libc_ver()[1] or "0.0").split(".")[:2]))
NEEDS_GLIBC = pytest.mark.skipif(_GLIBC < (2, 33), reason="needs mallinfo2 of glibc 2.33 or later")


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


def heap() -> float:
    """MiB that malloc has given out and not got back.

    The resident size tells less: what malloc keeps of memory that was freed differs by tens of MiB
    from one run of the same program to the next.
    """
    gc.collect()
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Mallinfo2
    info = mallinfo2()
    return (info.uordblks + info.hblkhd) / 2**20


def resident() -> float:
    """MiB of memory behind the addresses of this process, whatever they came from."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 2**10
