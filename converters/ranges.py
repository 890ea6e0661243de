"""Ranges of files read and written whole, without leaving them in the page cache where the kernel can do that.

A conversion uses each byte once. Cached, it pushes out what the machine still needs, and a virtual machine must first
get the pages from its host.
"""

from __future__ import annotations

import errno
import os
import platform
import re
from collections.abc import Callable, Sequence
from typing import Any


def _uncached(system: str, release: str) -> int:
    """RWF_DONTCACHE, where it can be relied upon.

    Linux has it since 6.14, but until 6.16 a page written to again while it was on its way to the disk could be
    dropped with the later bytes (mm/filemap: "gate dropbehind invalidate on folio !dirty && !writeback").
    """
    version = re.match(r"(\d+)\.(\d+)", release)
    return 0x80 if system == "Linux" and version and tuple(map(int, version.groups())) >= (6, 16) else 0


UNCACHED = _uncached(platform.system(), platform.release())
"""Written pages go to the disk at once and leave the cache, pages read for it leave it too; what was cached before
stays (man preadv2). 2.5 GB with fsync in a virtual machine took 1.1 to 1.2 s, 2.4 to 6.3 s through the cache."""
WITHOUT = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}
"""What file systems say that do not have it."""
WRITE_BYTES = 4 << 20
"""Of one call."""
CACHED_WRITE_BYTES = 256 << 10
"""Of one call that goes through the cache. For larger ones ext4 takes larger pages, which a virtual machine may first
have to get back from its host: 0.6 GB/s were measured for 4 MiB, 4 GB/s for 256 KiB."""


def read_all(file: int, buffers: Sequence[Any], position: int) -> bool:
    """Fill buffers with what lies one behind the other from `position` on; False if the file ends before.

    Raises:
        OSError: the file cannot be read.
    """
    left = [memoryview(buffer).cast("B") for buffer in buffers]
    while left:
        done = _either(os.preadv, file, left, position, UNCACHED)
        if done == 0 and any(map(len, left)):
            return False
        position += done
        _drop(left, done)
    return True


def write_all(file: int, buffers: Sequence[Any], position: int, cached: bool = False) -> None:
    """Write buffers one behind the other from `position` on, however much a single call takes.

    Args:
        file: its descriptor.
        buffers: of bytes.
        position: in the file.
        cached: leave it in the page cache, as it is read again at once.

    Raises:
        OSError: disk full, no permission ...
    """
    left, flags = [memoryview(buffer).cast("B") for buffer in buffers], 0 if cached else UNCACHED
    while left:
        part = _first(left, WRITE_BYTES if flags else CACHED_WRITE_BYTES)
        done = _either(os.pwritev, file, part, position, flags)
        position += done
        _drop(left, done)


def _either(call: Callable[..., int], file: int, buffers: list[memoryview], position: int, flags: int) -> int:
    """`preadv` or `pwritev` with some flags, or without where the kernel or the file system does not know them."""
    if flags:
        try:
            return call(file, buffers, position, flags)
        except OSError as error:
            if error.errno not in WITHOUT:
                raise
    return call(file, buffers, position)


def _first(buffers: list[memoryview], room: int) -> list[memoryview]:
    """The beginning of some buffers, `room` bytes at most."""
    taken = []
    for buffer in buffers:
        taken.append(buffer[:room])
        room -= len(taken[-1])
        if room == 0:
            break
    return taken


def _drop(buffers: list[memoryview], done: int) -> None:
    """Take the first `done` bytes off some buffers, and those that are then empty."""
    while buffers and done >= len(buffers[0]):
        done -= len(buffers.pop(0))
    if done:
        buffers[0] = buffers[0][done:]
