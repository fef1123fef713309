"""Chooses the next steps for an update with `order: once`, which sees each usable step once (an epoch)."""

from collections.abc import Mapping

import numpy as np

from serl_launcher.replay.buffer import ReplayBuffer
from serl_launcher.replay.choice import Numbers
from serl_launcher.replay.views import EpisodeInfo, View
from serl_launcher.types import Window

Seen = tuple[int, int]  # (an episode's number, how many of its steps were seen); all episodes before it were, too


def next_steps(
    buffer: ReplayBuffer, held: Mapping[int, EpisodeInfo], view: View, window: Window, seen: Seen, count: int
) -> tuple[Numbers, Seen]:
    """Return the next steps [n <= count] of a view in one source at which windows may start, and what is seen then.

    Episodes come in the order of their numbers, up to the first one that is open. What is not usable when its turn
    comes is passed over: it does not come back after a late verdict.
    """
    found: list[Numbers] = [np.empty(0, np.int64)]
    last, done = seen
    for number in sorted(each for each in held if each >= last):
        episode = held[number]
        if not count or not episode.closed:
            break
        begin, last, done = done if number == last else 0, number, episode.steps
        if not view.holds(episode):
            continue
        numbers = buffer.steps_of(number, episode.first, episode.steps, buffer.head)[begin:]
        usable = buffer.usable(numbers[buffer.may_start(numbers, view.start_steps, window.starts)], window)[:count]
        count -= len(usable)
        found.append(usable)
        if not count:
            done = begin + int(np.searchsorted(numbers, usable[-1])) + 1
    return np.concatenate(found), (last, done)
