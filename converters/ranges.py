"""Ranges of files read and written whole, without leaving them in the page cache where the kernel can do that.

A conversion uses each byte once. Cached, it pushes out what the machine still needs, and a virtual machine must first
get the pages from its host.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from typing import Any

UNCACHED = 0x80 if sys.platform == "linux" else 0
"""RWF_DONTCACHE: written pages go to the disk at once and leave the cache, pages read for it leave it too; what was
cached before stays. Linux 6.14 on ext4, XFS and Btrfs (man preadv2). 2.5 GB with fsync in a virtual machine took
1.1 to 1.2 s, 2.4 to 6.3 s through the cache."""
WITHOUT = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}
"""What other kernels and file systems say to it."""
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
        try:
            done = os.preadv(file, left, position, UNCACHED)
        except OSError as error:
            if error.errno not in WITHOUT:
                raise
            done = os.preadv(file, left, position)
        if done == 0 and any(map(len, left)):
            return False
        position += done
        _drop(left, done)
    return True


def write_all(file: int, buffers: Sequence[Any], position: int) -> None:
    """Write buffers one behind the other from `position` on, however much a single call takes.

    Raises:
        OSError: disk full, no permission ...
    """
    left = [memoryview(buffer).cast("B") for buffer in buffers]
    while left:
        try:
            done = os.pwritev(file, _first(left, WRITE_BYTES), position, UNCACHED)
        except OSError as error:
            if error.errno not in WITHOUT:
                raise
            done = os.pwritev(file, _first(left, CACHED_WRITE_BYTES), position)
        position += done
        _drop(left, done)


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
