"""Keeps libraries from giving threads of this process real-time priority."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

VERSION = 0x20080522  # of the structures of capset(2); two words follow for each of three sets, the lower word first
NICE = 1 << 23  # CAP_SYS_NICE, see capabilities(7)


@contextmanager
def ordinary_priority() -> Iterator[None]:
    """Within the block neither this thread nor one that it starts can raise its priority, also if root runs them.

    The encoder SVT-AV1 otherwise gives its threads, and the thread that calls it, the highest real-time priority
    wherever it runs as root. They then stop inference and training, and the calling thread keeps that priority.
    """
    system = ctypes.CDLL(None)
    thread, sets = (ctypes.c_uint32 * 2)(VERSION, 0), (ctypes.c_uint32 * 6)()
    held = system.capget(thread, sets) == 0 and sets[0] & NICE  # the first set: what is in effect
    if held:
        sets[0] &= ~NICE
        system.capset(thread, sets)
    try:
        yield
    finally:
        if held:
            sets[0] |= NICE
            system.capset(thread, sets)
