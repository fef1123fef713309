"""Runs several simulated environments in parallel (`envs`), each in a process of its own, as one command."""

import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import wait

from serl_client.signals import interrupted_by_signals

log = logging.getLogger(__name__)

END = signal.SIGUSR2  # interrupts an environment's process
Share = Callable[[], tuple[int, int]]


def run_several(count: int, target: Callable[[int, Share], object]) -> int:
    """Run target(place, share) for the places 0 to count - 1, each in a process of its own; return 0 if one of them
    ended well, else 1.

    Once one fails, the others go on, and do its share of the work. If this process is interrupted or killed, they are
    interrupted once, so that each may still deliver its records, whatever signals a system sends to all. They have no
    terminal.

    target: a function that can be imported by its name, or a partial of one. share: returns (place, of) among those
        that have not ended.
    """
    context = multiprocessing.get_context("spawn")
    ended = context.RawArray("b", count)
    processes = [context.Process(target=_run, args=(target, place, ended)) for place in range(count)]
    with interrupted_by_signals():
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # they inherit it: Ctrl-C is for this process alone
        try:
            for process in processes:
                process.start()
            signal.signal(signal.SIGINT, before)
            while alive := [process.sentinel for process, over in zip(processes, ended, strict=True) if not over]:
                wait(alive)
                for place, process in enumerate(processes):
                    if process.exitcode is not None and not ended[place]:
                        ended[place] = 1
                        if process.exitcode:
                            left = count - sum(ended)
                            log.error("environment %d ended with status %d; %d go on", place, process.exitcode, left)
        finally:
            signal.signal(signal.SIGINT, before)
            for process in processes:
                if process.is_alive() and process.pid is not None:
                    os.kill(process.pid, END)
            for process in processes:
                if process.pid is not None:
                    process.join()
    return int(all(process.exitcode for process in processes))


def _run(target: Callable[[int, Share], object], place: int, ended: Sequence[int]) -> None:
    for number in (signal.SIGTERM, signal.SIGHUP):  # the parent gets them, too
        signal.signal(number, signal.SIG_IGN)
    signal.signal(END, signal.default_int_handler)
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    target(place, partial(_share, place, ended))


def _share(place: int, ended: Sequence[int]) -> tuple[int, int]:
    """Return (place, of) among the environments that are left."""
    return place - sum(ended[:place]), len(ended) - sum(ended)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), END)
