"""Decides when to ask for the next action chunk: wait, ask ahead, or let it continue the old one (real-time chunking).

The words of `chunks` in config/base.yaml are the classes of RULES. A simulated robot always waits: its time stands
still meanwhile, so that the delay is zero, where all three give the same actions.
"""

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from serl_client.controller import ActionSource, RemotePolicy
from serl_client.errors import ConfigError
from serl_client.network import Answer
from serl_client.spec import Array

RECENT = 40  # delays that count
SHARE = 0.95  # of them are no longer than the lead
# Seconds of one wait. A simulated robot's time stands still, and between two waits the actor reads other messages.
SIMULATED_DEADLINE = 0.5


class AsyncChunks(RemotePolicy):
    """Asks for the next chunk some steps before the border, its `lead`, and never waits while actions remain.

    The border is `n_action_steps` steps after the chunk began to act. The lead is the 95th percentile of the latest
    delays, in steps, and at most H - n_action_steps. It is 0 before the first delay was seen. A delay is the number of
    steps from a question to the first `act` that has its answer. A new chunk acts at once. `deadline` only counts where
    no action is left.
    """

    def __init__(self, source: ActionSource, *, deadline: float, n_action_steps: int | None = None) -> None:
        super().__init__(source, deadline=deadline, n_action_steps=n_action_steps)
        self._delays: deque[int] = deque(maxlen=RECENT)

    def act(
        self, observation: Mapping[str, Array], *, step: int, previous_action: Array | None, reset: bool
    ) -> Array | None:
        action = super().act(observation, step=step, previous_action=previous_action, reset=reset)
        if self.chunk_start and self._asked is None and self._is_due(step):  # answers take longer than a chunk acts
            self._ask(observation, step, previous_action)
        return action

    @property
    def lead(self) -> int:
        """Return how many steps before the border the next question comes."""
        if self._chunk is None or self._n_action_steps is None or not self._delays:
            return 0
        most = max(0, len(self._chunk.action) - self._n_action_steps)
        return min(most, sorted(self._delays)[math.ceil(SHARE * len(self._delays)) - 1])

    def _is_due(self, step: int) -> bool:
        if self._left(step) <= 0 or self._asked is not None:
            return True
        return self._n_action_steps is not None and step - self._begun >= self._n_action_steps - self.lead

    def _waits(self, step: int) -> bool:
        return self._left(step) <= 0

    def _take(self, answer: Answer, step: int) -> None:
        if self._left(answer.step) > 0:  # else the robot stood still, or the first answer was waited for
            self._delays.append(step - answer.step)
        super()._take(answer, step)


class RealTimeChunks(AsyncChunks):
    """AsyncChunks whose next chunk continues the one under way (real-time chunking, arXiv 2506.07339).

    A question carries what is left of the old chunk. The first `lead` actions of that are committed: they act whatever
    the answer says, so an answer that comes early acts after them. While the lead is 0 this is AsyncChunks.
    """

    def __init__(self, source: ActionSource, *, deadline: float, n_action_steps: int | None = None) -> None:
        super().__init__(source, deadline=deadline, n_action_steps=n_action_steps)
        self._committed: dict[int, int] = {}  # by the step of each question since the chunk began

    def _prefix(self, step: int) -> tuple[Array | None, int]:
        committed = max(0, min(self.lead, self._left(step)))
        self._committed[step] = committed
        if self._chunk is None or not committed:
            return None, 0
        return self._chunk.action[step - self._chunk.step :], committed

    def _first_step(self, answer: Answer) -> int:
        return answer.step + self._committed.get(answer.step, 0)

    def _change(self, answer: Answer, step: int) -> None:
        self._committed.clear()
        super()._change(answer, step)


RULES: dict[str, type[RemotePolicy]] = {"wait": RemotePolicy, "async": AsyncChunks, "rtc": RealTimeChunks}


def chunk_policy(
    source: ActionSource, *, chunks: str, deadline: float, n_action_steps: int | None, clock: str
) -> RemotePolicy:
    """Make the controller of a robot whose clock is `real` or `simulated`.

    chunks: a name in RULES. deadline: seconds. n_action_steps: as in config/base.yaml.
    """
    return RULES["wait" if clock == "simulated" else chunks](source, deadline=deadline, n_action_steps=n_action_steps)


def deadline_of(deadline_s: Any, fps: float, clock: str) -> float:
    """Return how long `act` may wait, seconds, for a robot with `fps` steps per second. `auto` is half a step.

    On a simulated clock any time fits. Raises ConfigError for what is no time, and for more than one real step.
    """
    step = 1 / fps
    if deadline_s == "auto":
        return step / 2 if clock == "real" else SIMULATED_DEADLINE
    if not isinstance(deadline_s, int | float) or isinstance(deadline_s, bool) or not 0 <= deadline_s < math.inf:
        raise ConfigError(f"deadline_s={deadline_s}: say auto, or seconds")
    if clock == "real" and deadline_s > step:
        raise ConfigError(
            f"deadline_s={deadline_s} is longer than one step of this robot ({step:.3g} s at {fps:g} Hz), so its "
            f"commands would come late: say deadline_s=auto, which is half a step, or at most {step:.3g}"
        )
    return float(deadline_s)
