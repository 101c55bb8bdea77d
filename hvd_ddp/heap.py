"""Memory that tensors free stays with the process until its end."""

from __future__ import annotations

import ctypes
import gc

from hvd_ddp.job.launch import variables

TRIM_THRESHOLD, MMAP_MAX = -1, -4  # names of malloc.h
THE_USERS = ("GLIBC_TUNABLES", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")


def keep_freed_memory() -> None:
    """Have glibc's malloc reuse what is freed, where it would give large pieces back to the kernel.

    The kernel zeroes each page of what it hands out anew, in every step, which shows where activations are large. What
    it costs is the room between pieces of unlike sizes. What the environment says of this holds; other
    mallocs have other ways.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not variables(*THE_USERS):
        mallopt(MMAP_MAX, 0)
        mallopt(TRIM_THRESHOLD, -1)


def let_go() -> None:
    """Give what is freed back at the end: as it exits, torch reads 100 MB of its libraries into memory, on top."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
