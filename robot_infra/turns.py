"""Holds the tasks of an environment that has several, and which of them the episode under way does."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from serl_client.env import Observation
from serl_client.spec import Feature

TASK = "observation.task"  # one-hot [K], where there are several tasks: which one this episode does


@dataclass
class Turns:
    """Says which of its tasks an environment does: the one of this episode, or, between two, of the next one.

    texts: the K tasks, in words. now: the number of one.
    """

    texts: tuple[str, ...]
    now: int = 0

    @property
    def text(self) -> str:
        return self.texts[self.now]

    @property
    def features(self) -> Mapping[str, Feature]:
        """What an observation says of the task: nothing where there is one."""
        return {TASK: Feature((len(self.texts),))} if len(self.texts) > 1 else {}

    @property
    def observed(self) -> Observation:
        return {name: np.eye(len(self.texts), dtype=np.float32)[self.now] for name in self.features}
