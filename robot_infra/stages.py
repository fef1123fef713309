"""Adds the stages of a task: the column `stage` of each row, which a person tells at the keys 0 to 9, or a judge."""

from collections.abc import Mapping
from dataclasses import replace

from serl_client.env import Env, Observation
from serl_client.errors import ConfigError
from serl_client.spec import Feature

from robot_infra.env import RobotEnv
from robot_infra.interfaces import STAGE, Judge, Operator, Verdict
from robot_infra.judges import Wrapped
from robot_infra.teleop.keyboard import STAGED

MOST = 9  # as many as there are keys


class StageKeys:
    """Reads the operator's keys, and keeps those for stages to itself: the learner need not hear of them.

    stages: of the task. The last one is success, so its key says success. Keys above it say nothing.
    told: the stage that they told last in this episode; None: none yet.
    """

    def __init__(self, operator: Operator, stages: int) -> None:
        self._operator, self._stages = operator, stages
        self.told: int | None = None

    @property
    def has_terminal(self) -> bool:
        return self._operator.has_terminal

    @property
    def demonstrates(self) -> bool:
        return self._operator.demonstrates

    def poll(self) -> list[str]:
        """Return the other events since the last poll, oldest first."""
        events: list[str] = []
        for event in self._operator.poll():
            if not event.startswith(STAGED):
                events.append(event)
            elif (stage := int(event.removeprefix(STAGED))) < self._stages:
                self.told = stage
            elif stage == self._stages > 1:
                events.append("success")
        return events

    def forget(self, *, hands_back: bool = True) -> None:
        self._operator.forget(hands_back=hands_back)

    def legend(self, keys: Mapping[str, str]) -> dict[str, str]:
        """Return what the keys do, for the console: `keys`, and those of stages."""
        own = {"stages": f"1 to {self._stages - 1} reached   {self._stages} success   0 none"}
        return {**keys, **(own if self._stages > 1 and keys else {})}

    def close(self) -> None:
        self._operator.close()


class Staged(Wrapped):
    """Adds the stage to another judge's verdicts: what the person told last in this episode, else what it tells.

    stages: of the task. The judge's success is the last one, and nothing else that it tells is.
    """

    def __init__(self, judge: Judge, keys: StageKeys, stages: int) -> None:
        super().__init__(judge)
        self._keys, self._stages = keys, stages

    def __call__(self, observation: Observation) -> Verdict:
        verdict, told = self.judge(observation), self._keys.told
        seen = self._stages if verdict.success else min(verdict.stage or 0, self._stages - 1)
        return replace(verdict, stage=seen if told is None else told)

    def reset(self) -> None:
        self._keys.told = None
        super().reset()


def stages_of(env: Env, operator: Operator, stages: int) -> StageKeys:
    """Give the rows of an env the column `stage`, if its task has more stages than success; return the operator.

    stages: `task.stages` of a run. Raises ConfigError for a number out of range, and for an env that is no RobotEnv.
    """
    if stages not in range(1, MOST + 1):
        raise ConfigError(f"task.stages={stages}: say 1 (success alone) to {MOST}")
    keys = StageKeys(operator, stages)
    if stages > 1:
        if not isinstance(env, RobotEnv):
            raise ConfigError(
                f"task.stages: the env of this task is a {type(env).__name__}, whose rows have none: say 1"
            )
        env.spec = replace(env.spec, extras={**env.spec.extras, STAGE: Feature((), "int32")})
        env.judge = Staged(env.judge, keys, stages)
    return keys
