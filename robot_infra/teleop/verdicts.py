"""Chooses who gives reward and success (`verdict_by`): a judge of the scene, or the operator."""

from collections.abc import Callable, Sequence

from serl_client.errors import ConfigError

from robot_infra.interfaces import Judge, Operator
from robot_infra.judges import Predicate, Unjudged
from robot_infra.teleop.keyboard import Keyboard


class ScriptedVerdicts(Keyboard):
    """Presses `success` as soon as the task is done, and `failure` after an episode whose time ran out.

    The first comes while the episode goes on and ends it. The second comes between two episodes. A terminal's keys
    count, too.
    holds: returns whether the task is done. steps: returns the steps since the robot was home.
    max_steps: of an episode.
    """

    def __init__(self, holds: Callable[[], bool], steps: Callable[[], int], max_steps: int) -> None:
        super().__init__()
        self.holds, self.steps, self._max_steps = holds, steps, max_steps
        self._watches, self._is_late, self._seen = True, False, 0

    def poll(self) -> list[str]:
        said, self._is_late = ["failure"] * self._is_late, False
        steps, before = self.steps(), self._seen
        self._watches, self._seen = self._watches or steps < before, steps  # fewer steps: another episode has begun
        if self._watches and steps and self.holds():
            said.append("success")
            self._watches = False
        elif self._watches and steps >= self._max_steps:
            self._watches, self._is_late = False, True
        return [*super().poll(), *said]


def choose_judge(
    verdict_by: str, holds: Callable[[], bool], steps: Callable[[], int], max_steps: int, hands: Operator | None,
    before: Sequence[Callable[[], bool]] = (),
) -> tuple[Judge, Operator | None]:  # fmt: skip
    """Return the judge and the operator of a simulated robot.

    verdict_by: `judge`: the scene gives reward and success; `operator`: the person at the keyboard does, or without one
        a script. holds, steps, max_steps: as in ScriptedVerdicts. before: as in Predicate. Raises ConfigError
        for another word.
    """
    if verdict_by == "judge":
        return Predicate(holds, before), hands
    if verdict_by != "operator":
        raise ConfigError(f"task.env.verdict_by={verdict_by} is unknown; use judge or operator")
    return Unjudged(), hands or ScriptedVerdicts(holds, steps, max_steps)
