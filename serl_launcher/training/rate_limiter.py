"""Keeps a phase's updates and env steps at the ratio of its pace (UTD)."""

import logging
import math

from serl_launcher.training.plan import Pace

log = logging.getLogger(__name__)

UNPACED = (  # why steps may come that are due more updates than are made; empty: every actor waits for its limit
    "the learner is too slow for a real robot. Lower updates_per_step, or use a faster GPU",
    "there was no data for them",
)

NEARLY = 1e-9  # of a token, or of a step: what a fractional pace may lose by rounding


class RateLimiter:
    """A token bucket between env steps and updates: a step adds `updates_per_step` tokens, an update takes one.

    Either side may run `tolerance` updates ahead, and always by one step or one update, so that the two never wait for
    each other. Where somebody does not wait (`unpaced`, of UNPACED) and the learner falls behind by more, the excess
    steps add no tokens: this caps the catching up after a slow stretch. `uncounted_steps`, the number of such steps,
    is the only state. `dropped` are the updates that they would have added.
    """

    def __init__(self, pace: Pace | None, uncounted_steps: float) -> None:
        self.pace, self.uncounted_steps, self.dropped = pace, uncounted_steps, 0.0
        self.unpaced, self._owed, self._report_at = UNPACED[0], 0.0, 1.0

    def resume(self, before: Pace | None, env_steps: int, updates: int) -> None:
        """Go on where a run was stopped: all updates that its steps were due, by the pace `before`, are made up for.
        Later steps add tokens by the pace of now."""
        if self.pace is None:
            return
        if before != self.pace:
            tokens = before.updates_per_step * (env_steps - self.uncounted_steps) if before else updates
            self.uncounted_steps = env_steps - tokens / self.pace.updates_per_step
        self._owed = max(0.0, self.pace.updates_per_step * (env_steps - self.uncounted_steps) - updates)

    def may_update(self, env_steps: int, updates: int) -> bool:
        """Return whether there is a token for one more update."""
        if self.pace is None:
            return True
        slack = NEARLY * (1 + self.pace.updates_per_step)  # more than step_limit's, so that one of the two may go on
        return self._credit(self.pace, env_steps, updates) >= 1 - self.pace.tolerance - slack

    def step_limit(self, env_steps: int, updates: int) -> int | None:
        """Return the env step up to which a simulated actor may go before the next update; None: no limit."""
        if self.pace is None:
            return None
        room = self.pace.tolerance + 1 - self._credit(self.pace, env_steps, updates)
        return env_steps + max(0, math.ceil(room / self.pace.updates_per_step - NEARLY))

    def _credit(self, pace: Pace, env_steps: int, updates: int) -> float:
        credit = pace.updates_per_step * (env_steps - self.uncounted_steps) - updates
        excess = credit - (pace.tolerance + 1 + pace.updates_per_step + self._owed)
        if excess > 1e-6 and self.unpaced:
            self.uncounted_steps += excess / pace.updates_per_step
            self.dropped += excess
            credit -= excess
            if self.dropped >= self._report_at:
                log.warning("%.0f updates dropped so far: %s", self.dropped, self.unpaced)
                self._report_at = 2 * self.dropped
        self._owed = max(0.0, min(self._owed, credit))
        return credit
