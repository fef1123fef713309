"""Keeps the last observations of an episode for a policy with `history`: several past images or states."""

from collections import deque

import numpy as np

from serl_client.env import Observation

MAX_HISTORY = 16  # observations of one decision


class Frames:
    """Holds the newest observations of one episode, without a gap between them, as a training window sees them.

    most: how many. The arrays stay the environment's: it must not write into them again.
    """

    def __init__(self, first: Observation, most: int) -> None:
        self._kept = deque([first], most)

    def add(self, observation: Observation, *, gap: bool) -> None:
        """Add the observation after a step. gap: time passed just before that step: what came earlier is dropped."""
        if gap:
            self._kept = deque([self._kept[-1]], self._kept.maxlen)
        self._kept.append(observation)

    def newest(self, count: int) -> Observation:
        """Return the newest `count` observations, {name: [count, ...]}, the newest last; of one alone {name: [...]}.

        At the beginning the first one is repeated.
        """
        if count == 1:
            return self._kept[-1]
        kept = list(self._kept)[-count:]
        frames = [kept[0]] * (count - len(kept)) + kept
        return {name: np.stack([frame[name] for frame in frames]) for name in frames[0]}
