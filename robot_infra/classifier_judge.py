"""Gives rewards by a learner that tells success (`task.judge`): threshold, rows in succession, stale answers."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from serl_client import clock
from serl_client import messages as m
from serl_client.connection import Connection
from serl_client.env import Env, Observation
from serl_client.errors import ConfigError, RetakeError
from serl_client.keys import Key
from serl_client.reach import Look, Unanswered, explained, why_silent
from serl_client.spec import Array, Spec

from robot_infra.env import RobotEnv
from robot_infra.interfaces import Judge, Verdict
from robot_infra.judges import TogglePenalty

log = logging.getLogger(__name__)

SCORE = "reached"  # the answer's extra [n]: the probability of each stage; the last one is success
CONNECT_S = 20.0  # for the first answer
PATIENCE_S = 5.0  # for an answer on the simulated clock, where no time passes meanwhile


class Verdicts:
    """Makes a verdict of the probabilities of n stages: one is reached once `rows` in succession were at least
    `threshold`. The last one is success: reward 1, and the end.

    Counting begins anew after a probability below the threshold, and when no answer came within `stale_s` seconds of
    its observation. stage_reward: for each stage before success, once in an episode; success brings the rewards of the
    stages that were passed over.
    """

    def __init__(self, *, threshold: float, rows: int, stale_s: float, stage_reward: float = 0.0) -> None:
        if not 0 < threshold < 1 or rows < 1 or stale_s <= 0 or stage_reward < 0:
            raise ConfigError(
                f"task.judge: threshold={threshold}, rows={rows}, stale_s={stale_s}, stage_reward={stage_reward}: say "
                "a threshold between 0 and 1, 1 or more rows, more than 0 seconds, and no reward below 0"
            )
        self.threshold, self.rows, self.stale_s, self.stage_reward = threshold, rows, stale_s, stage_reward
        self.reset()

    def reset(self) -> None:
        """Begin an episode."""
        self._counts, self._seen = np.zeros(1, int), -np.inf  # rows in succession that show each stage [n]
        self._rewarded = 0  # stages

    def hear(self, scores: Array, seen: float) -> None:
        """Take the probabilities [n] of an observation made at `seen`, seconds of time.monotonic()."""
        self._counts, self._seen = np.where(scores >= self.threshold, self._counts + 1, 0), seen

    def at(self, now: float) -> Verdict:
        """Return the verdict now: success is None where nothing was heard that is not stale."""
        if now - self._seen > self.stale_s:
            self._counts = np.zeros(1, int)
            return Verdict(0.0, False, None)
        reached = self._counts >= self.rows  # [n]
        stage, success = int(np.flatnonzero(reached).max(initial=-1)) + 1, bool(reached[-1])
        new = max(stage - success - self._rewarded, 0)
        self._rewarded += new
        return Verdict(float(success) + self.stage_reward * new, success, success, stage)


class ClassifierJudge(Judge):
    """Gives reward 1 and ends the episode as soon as a classifier (plan=reward_classifier), or a reward model
    (plan=judge), sees success; it may give some for the stages before it.

    link: to the inference process of its learner. verdicts: what its answers mean. waits: each verdict is on the
    observation at hand, as on the simulated clock, where waiting costs no time; else it is on the latest answer.
    task: returns what the robot is to do, in words.
    Raises ConfigError if that learner serves no classifier, or one that sees what this robot does not have.
    """

    def __init__(
        self, link: Connection, spec: Spec, verdicts: Verdicts, *, waits: bool, task: Callable[[], str]
    ) -> None:
        self._link, self._verdicts, self._waits, self._task = link, verdicts, waits, task
        theirs = _classifier_at(link, spec)
        self._dtypes = {name: feature.dtype for name, feature in theirs.observation.items()}
        self._shape = theirs.extras[SCORE].shape
        self._number, self._asked = 0, 0.0  # of the latest question, and when it was asked
        self._first = 1  # number of this episode's first question
        self._is_open = False  # an answer is due
        self._is_new = True  # nothing was heard of this episode
        self._said = ""  # the last complaint since an answer came
        self.unanswered = Unanswered()

    def reset(self) -> None:
        self._verdicts.reset()
        self._first, self._is_open, self._is_new = self._number + 1, False, True

    def __call__(self, observation: Observation) -> Verdict:
        self._hear()
        now = clock.monotonic()
        if not self._is_open or now - self._asked > self._verdicts.stale_s:
            self._ask(observation, now)
        while self._waits and self._is_open and clock.monotonic() < now + PATIENCE_S:
            self._link.wait(0.05)
            self._hear()
        return self._verdicts.at(now if self._waits else clock.monotonic())

    def why_silent(self) -> Look:
        """Look why no answer comes in time; takes seconds."""
        found = why_silent(self._link.address, has_key=self._link.key is not None, option="inference_port")
        late = f"an answer after more than task.judge.stale_s={self._verdicts.stale_s:g} s is too late"
        return replace(found, advice=f"{late}; {found.advice}")

    def close(self) -> None:
        self._link.close()

    def _ask(self, observation: Observation, now: float) -> None:
        self._number, self._asked, self._is_open = self._number + 1, now, True
        arrays = {name: np.array(observation[name], dtype) for name, dtype in self._dtypes.items()}
        if not self._link.send(m.InferenceRequest(self._number, 0, self._is_new, False, self._task(), arrays)):
            self._is_open = False

    def _hear(self) -> None:
        """Take the answers that have come. Where the learner is gone or refuses, there is no verdict."""
        self.unanswered.ask()
        try:
            while (message := self._link.receive()) is not None:
                if isinstance(message, m.InferenceResponse) and message.step == self._number >= self._first:
                    self._verdicts.hear(self._checked(message.arrays[SCORE]), self._asked)
                    self._is_open, self._is_new, self._said = False, False, ""
                    self.unanswered.end()
                elif isinstance(message, m.Failed):
                    self._complain(message.text)
                    self._is_open &= not self._waits  # in real time it asks again after stale_s
        except (RetakeError, KeyError, TypeError, ValueError) as error:
            self._complain(f"{type(error).__name__}: {error}")

    def _checked(self, scores: Array) -> Array:
        if scores.shape != self._shape:
            raise ValueError(f"probabilities {list(scores.shape)} where {list(self._shape)} were due")
        return scores

    def _complain(self, text: str) -> None:
        if text != self._said:
            self._said = text
            log.warning("the judge at %s says nothing of use: %s", self._link.address, text)


def _classifier_at(link: Connection, spec: Spec) -> Spec:
    """Return the Spec of the classifier: the observations that it asks for, and its answer."""
    place = f"task.judge.address={link.address.removeprefix('tcp://')}"
    try:
        theirs = Spec.from_dict(link.hello(CONNECT_S).spec or {})
    except RetakeError as error:
        why = explained(error, link.address, has_key=link.key is not None, option="inference_port")
        raise ConfigError(f"{place}: {why}") from None
    if SCORE not in theirs.extras:
        raise ConfigError(
            f"{place}: no judge answers there: give the inference_port of plan=reward_classifier or plan=judge"
        )
    for name, feature in theirs.observation.items():
        mine = spec.observation.get(name)
        if mine is None or mine.shape != feature.shape or not np.can_cast(mine.dtype, feature.dtype, "same_kind"):
            there = ", ".join(f"{own} {each.dtype} {list(each.shape)}" for own, each in spec.observation.items())
            raise ConfigError(
                f"{place}: the classifier sees {name} {feature.dtype} {list(feature.shape)}, and this robot {there}: "
                "train one for this robot (plan=reward_classifier)"
            )
    return theirs


def judge_by(options: Mapping[str, Any], env: Env, *, name: str) -> ClassifierJudge:
    """Put a ClassifierJudge in the place of the env's own, and return it. The rewards of success and end are its own.

    options: `task.judge` of a run: {address: host:port, key, threshold, rows, stale_s,
        stage_reward}. name: of the actor.
    Raises ConfigError as ClassifierJudge does, for a number out of range, and for an env that is no RobotEnv.
    """
    if not isinstance(env, RobotEnv):
        raise ConfigError(
            f"task.judge: the env of this task is a {type(env).__name__}, which judges itself: say "
            "task.judge.address=null"
        )
    numbers = {name: options[name] for name in ("threshold", "rows", "stale_s", "stage_reward")}
    key = Key.read(Path(options["key"])) if options["key"] else None
    greeting = m.Hello(m.PROTOCOL, "actor", f"{key.name}/judge" if key else f"judge of {name}", session="judge")
    link = Connection(f"tcp://{options['address']}", greeting, key)
    judge = ClassifierJudge(link, env.spec, Verdicts(**numbers), waits=env.clock != "real", task=lambda: env.task)
    if isinstance(env.judge, TogglePenalty):
        env.judge.judge = judge
    else:
        env.judge = judge
    return judge
