"""Brings the scene back without a person (`reset`): by waypoints, by two tasks that undo each other, or by a policy."""

from serl_client.env import KEPT, OTHER_TASK, POLICY, WAYPOINTS, Env
from serl_client.errors import ConfigError

from robot_infra.env import RobotEnv
from robot_infra.guard.robot import GuardedRobot
from robot_infra.spaces import SpacedRobot


class KeptScene:
    """Lets each episode of an env begin where the one before has left the scene; a Resets.

    Only the first way home, and each after `set_up`, begins in a new scene: a person's, or in a simulation its own.
    After a success the env's other task has its turn, which begins where this one has ended. One that fails is tried
    again. A scene that is set up anew is a start of the first task.

    patience: so many episodes without a success, one after another, are a reason to set it up, too; None: none are.
    """

    returns, tries = False, "episodes"

    def __init__(self, env: RobotEnv, patience: int | None) -> None:
        self._env, self._patience, self._failures = env, patience, 0
        self._before = 0, 0  # turn and failures, before the latest episode ended
        self._is_known = env.clock != "real" or len(env.turns.texts) < 2  # which task's start the scene is

    @property
    def trouble(self) -> str:
        if not self._is_known:
            return "nobody has said since this start which task the scene is set up for"
        if self._patience is not None and self._failures >= self._patience:
            return f"{self._failures} {self.tries} one after another had no success"
        return self._env.trouble

    def ended(self, success: bool | None) -> None:
        self._before, self._env.keeps_scene = (self._env.turns.now, self._failures), True
        self.corrected(success)

    def corrected(self, success: bool | None) -> None:
        if self._env.keeps_scene:
            turns, (now, failures) = self._env.turns, self._before
            turns.now = (now + bool(success)) % len(turns.texts)
            self._failures = 0 if success else failures + 1

    def set_up(self) -> None:
        self._env.turns.now, self._env.keeps_scene, self._failures, self._is_known = 0, False, 0, True


class ReturnedScene(KeptScene):
    """Has the policy bring the scene back after each episode of the first task: it does the second one until that
    succeeds. patience: of those ways back."""

    tries = "ways back"

    @property
    def returns(self) -> bool:
        return self._env.turns.now > 0

    def ended(self, success: bool | None) -> None:
        is_back, self._env.keeps_scene = self.returns, True
        self._failures += is_back and not success
        if is_back and success:
            self._failures = 0
        self._env.turns.now = int(not (is_back and success))

    def corrected(self, success: bool | None) -> None:
        """Whatever a person says of an episode, the scene has to be brought back after it."""


def resets_of(env: Env, reset: str, patience: int | None) -> KeptScene | None:
    """Return what brings the scene of this env back, as `reset` of a run says; None: the simulation, or a person.

    patience: as in KeptScene. Raises ConfigError for an env that cannot do it, and for one of two tasks with another
    word.
    """
    turns = env.turns.texts if isinstance(env, RobotEnv) else ()
    if (reset in (OTHER_TASK, POLICY)) != (len(turns) > 1):
        raise ConfigError(
            f"reset={reset}: this env has {len(turns) or 'no'} tasks of its own. Say reset={OTHER_TASK} or "
            f"{POLICY} where it has two, each the other's start, and nowhere else (docs/guides/robots.md)"
        )
    if reset not in KEPT:
        return None
    if reset == POLICY and patience is None:
        raise ConfigError(f"reset={POLICY}: say after how many ways back without success to ask: reset_patience=3")
    if patience is not None and patience < 1:
        raise ConfigError(f"reset_patience={patience}: say 1 or more episodes, or null")
    robot = env.robot if isinstance(env, RobotEnv) else None
    arm = robot.robot if isinstance(robot, SpacedRobot) else robot
    if not isinstance(env, RobotEnv) or not isinstance(arm, GuardedRobot):
        raise ConfigError(f"reset={reset}: this task has no arm that a guard could drive home")
    if reset == WAYPOINTS and not arm.waypoints:
        raise ConfigError(f"reset={reset}: say through which poses, by task.env.waypoints (docs/guides/robots.md)")
    return ReturnedScene(env, patience) if reset == POLICY else KeptScene(env, patience)
