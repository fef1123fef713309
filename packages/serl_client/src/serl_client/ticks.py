"""Tells when steps were commanded and measured, and counts those that came late."""

import serl_client.clock as clock
from serl_client.env import Env
from serl_client.status import ActorStatus


class Ticks:
    """Measures the steps of a control loop: `rate` and `late` of an actor's status."""

    def __init__(self, env: Env, status: ActorStatus) -> None:
        self._env, self._status, self._is_real = env, status, env.clock == "real"
        self._sent: float | None = None  # when the command before was sent, if nothing waited since
        self._simulated = clock.monotonic()  # seconds, the clock of a simulated robot

    def begin(self) -> None:
        """Forget the command before: an episode begins, or something has waited."""
        self._sent = None

    def count(self, sent: float) -> None:
        """Count a step whose command was sent then."""
        status = self._status
        if self._sent is not None:
            period = max(sent - self._sent, 1e-6)
            mean = 1 / status.rate if status.rate else period
            status.rate = 1 / (mean + 0.05 * (period - mean))
            status.late += self._is_real and not 0.5 <= period * self._env.spec.fps <= 1.5
        self._sent = sent

    def observed(self) -> float:
        """Return when the state that has just come was measured, in seconds of the robot's clock.

        A simulated step counts 1/fps, however fast it is computed, so that a recording plays at the robot's pace.
        """
        self._simulated += 1 / self._env.spec.fps
        return self._env.observed if self._is_real else self._simulated
