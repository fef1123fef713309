"""Gets the robot's actions: `n_action_steps` of each chunk of a policy, or random exploration (Brownian)."""

import logging
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import xxhash

import serl_client.clock as clock
from serl_client.network import Answer
from serl_client.reach import Unanswered
from serl_client.spec import Array, Spec

log = logging.getLogger(__name__)

REPEAT = 1.0  # seconds until a question counts as lost and is asked again


class Controller(Protocol):
    """Gives the action of each step; `version`, `chunk_start`, `chunk_delay` and `extras` describe the last one."""

    carry_resets: int  # how often a policy that remembers earlier steps has begun anew in mid-episode

    version: int  # of the weights that acted
    chunk_start: bool  # a new chunk began with this action
    chunk_delay: int  # how many actions of that chunk were skipped because it came late
    extras: Mapping[str, Array]

    def begin(self, episode: str, directive: Mapping[str, Any], task: str) -> None:
        """Begin an episode of this task (in words) under this directive; forget earlier questions."""

    def act(
        self, observation: Mapping[str, Array], *, step: int, previous_action: Array | None, reset: bool
    ) -> Array | None:
        """Return the action [A] for step `step`, or None if there is none yet.

        previous_action: what the robot really did in the step before, [A].
        reset: the policy must not use earlier steps as history (the first step, the end of a takeover). It stays set
            until an action was given.
        """
        ...


class ActionSource(Protocol):
    """Answers the questions of a RemotePolicy: a TrainerClient, or a policy in this process."""

    def ask(
        self, observation: Mapping[str, Array], *, step: int, seed: int, previous_action: Array | None, reset: bool,
        explore: bool, task: str, prefix: Array | None = None, committed: int = 0,
    ) -> None:  # fmt: skip
        """Ask for the actions from step `step` on; return at once. prefix, committed: as in InferenceRequest."""

    def wait_answer(self, step: int, timeout: float) -> Answer | None:
        """Return the answer for step `step` or a later one, or None after `timeout` seconds."""
        ...

    def forget(self) -> None:
        """Drop the answers to all earlier questions."""


class RemotePolicy:
    """Asks for chunks of actions [H, A] and gives them out step by step. At a border it waits for the next chunk.

    deadline: how long `act` waits for a chunk that this step needs, seconds.
    n_action_steps: how many actions of a chunk are used before the next one is asked for; None: all H of them.

    The old chunk goes on until the next one is here. The first actions of a late chunk are skipped. If the directive
    names the weights that must act, answers of other weights are dropped. This is `chunks: wait`; chunks.py has the
    rules that do not wait.
    """

    def __init__(self, source: ActionSource, *, deadline: float, n_action_steps: int | None = None) -> None:
        self.version = self.carry_resets = 0
        self.chunk_start, self.chunk_delay = False, 0
        self.extras: Mapping[str, Array] = {}
        self._source, self._deadline, self._n_action_steps = source, deadline, n_action_steps
        self._episode, self._directive, self._task = "", {}, ""
        self._chunk: Answer | None = None
        self._begun = 0  # step at which the chunk began to act
        self._next: Answer | None = None  # taken, and does not act yet
        self._asked: int | None = None  # step of the oldest question that may still be answered
        self._asked_at = 0.0
        self.unanswered = Unanswered()
        self._reset = False
        self._has_acted = False  # in this episode
        self._row = -1

    def begin(self, episode: str, directive: Mapping[str, Any], task: str) -> None:
        self._episode, self._directive, self._task = episode, directive, task
        self._has_acted = False
        self._drop()

    def act(
        self, observation: Mapping[str, Array], *, step: int, previous_action: Array | None, reset: bool
    ) -> Array | None:
        if reset and (not self._reset or step > self._row + 1):
            self._drop()
        self._row, self.chunk_start, self.chunk_delay = step, False, 0
        deadline = clock.monotonic() + self._deadline
        while self._next is None and self._is_due(step):
            if self._asked is None or clock.monotonic() > self._asked_at + REPEAT:
                self._ask(observation, step, previous_action)
            patience = deadline - clock.monotonic() if self._waits(step) else 0.0
            answer = self._source.wait_answer(self._asked or 0, patience)
            if answer is None:
                break
            self._take(answer, step)
        if self._next is not None and step >= self._first_step(self._next):
            self._change(self._next, step)
        if self._chunk is None or self._left(step) <= 0:
            return None
        return self._chunk.action[step - self._chunk.step].copy()

    def _drop(self) -> None:
        self._source.forget()
        self._chunk, self._next, self._asked, self._reset = None, None, None, True

    def _left(self, step: int) -> int:
        """Return how many actions of the chunk are left at this step."""
        return len(self._chunk.action) - (step - self._chunk.step) if self._chunk else 0

    def _is_due(self, step: int) -> bool:
        """Return whether the next chunk is to be asked for, or was."""
        used = step - self._chunk.step if self._chunk else 0
        return self._left(step) <= 0 or (self._n_action_steps is not None and used >= self._n_action_steps)

    def _waits(self, step: int) -> bool:
        """Return whether `act` waits for the answer at this step."""
        return self._left(step) <= 0 or self._asked == step

    def _ask(self, observation: Mapping[str, Array], step: int, previous_action: Array | None) -> None:
        prefix, committed = self._prefix(step)
        self._source.ask(
            observation, step=step, seed=decision_seed(self._episode, step), previous_action=previous_action,
            reset=self._reset, explore=self._directive["explore"], task=self._task, prefix=prefix, committed=committed,
        )  # fmt: skip
        self._asked = step if self._asked is None else self._asked
        self._asked_at = clock.monotonic()
        self.unanswered.ask()

    def _take(self, answer: Answer, step: int) -> None:
        """Keep an answer, unless it is too late or other weights must act. In that case the question is repeated."""
        self.unanswered.end()
        if answer.reset and self._has_acted:
            self.carry_resets += 1
            if not self._reset:
                log.warning("%s, row %d: what the policy remembered is lost; it begins anew", self._episode, step)
        if self._directive["weights"] not in (None, answer.version):
            return
        self._asked = None
        if step - answer.step < len(answer.action):
            self._next = answer

    def _prefix(self, step: int) -> tuple[Array | None, int]:
        """Return what the question of this step says of the chunk under way: prefix and committed."""
        return None, 0

    def _first_step(self, answer: Answer) -> int:
        """Return the first step at which this chunk may act."""
        return answer.step

    def _change(self, answer: Answer, step: int) -> None:
        """Let a chunk act from this step on."""
        self._chunk, self._begun, self._next, self._reset = answer, step, None, False
        self._has_acted = True
        self.chunk_start, self.chunk_delay = True, step - answer.step
        self.version, self.extras = answer.version, answer.extras


class RandomPolicy:
    """Draws actions uniformly between the bounds; the same `seed` and episode give the same actions."""

    def __init__(self, spec: Spec, seed: int) -> None:
        self.version = self.carry_resets = 0
        self.chunk_start, self.chunk_delay = True, 0
        self.extras: Mapping[str, Array] = {}
        assert spec.action.low is not None
        assert spec.action.high is not None
        self._low, self._high, self._dtype, self._seed = spec.action.low, spec.action.high, spec.action.dtype, seed
        self._generator = np.random.default_rng(seed)

    def begin(self, episode: str, directive: Mapping[str, Any], task: str) -> None:
        self._generator = np.random.default_rng((self._seed, decision_seed(episode, 0)))

    def act(
        self, observation: Mapping[str, Array], *, step: int, previous_action: Array | None, reset: bool
    ) -> Array | None:
        return self._generator.uniform(self._low, self._high).astype(self._dtype)  # [A]


class BrownianPolicy(RandomPolicy):
    """Lets the action drift between the bounds by a Brownian motion, so that a robot with inertia gets somewhere.

    It begins at a uniform action. Its variance grows by 1 per second, in units of half the range between the bounds.
    Where the Spec says a neutral action, it drifts within [-1, 1], of which 0 is that action and the ends are the
    bounds. So an entry whose neutral value is its low bound is at rest half of the time.
    """

    def __init__(self, spec: Spec, seed: int) -> None:
        super().__init__(spec, seed)
        self._rest = spec.action.neutral
        if self._rest is not None:
            self._sides = self._rest - self._low, self._high - self._rest  # of the bounds
            self._low, self._high = -np.ones(spec.action.shape), np.ones(spec.action.shape)
        self._step = (self._high - self._low) / 2 / np.sqrt(spec.fps)
        self._action: Array | None = None

    def begin(self, episode: str, directive: Mapping[str, Any], task: str) -> None:
        super().begin(episode, directive, task)
        self._action = None

    def act(
        self, observation: Mapping[str, Array], *, step: int, previous_action: Array | None, reset: bool
    ) -> Array | None:
        if self._action is None:
            moved = self._generator.uniform(self._low, self._high)
        else:
            moved = self._action + self._step * self._generator.standard_normal(self._step.shape)
        self._action = action = np.clip(moved, self._low, self._high)
        if self._rest is not None:
            action = self._rest + action * np.where(action < 0, *self._sides)
        return action.astype(self._dtype)  # [A]


def by_chance(spec: Spec, seed: int) -> dict[str, Controller]:
    """Return the controllers that ask nobody, by their name in a directive."""
    return {"random": RandomPolicy(spec, seed), "brownian": BrownianPolicy(spec, seed)}


def asked(
    spec: Spec, observation: Mapping[str, Array], previous_action: Array | None, prefix: Array | None
) -> dict[str, Array]:
    """Return the arrays of an InferenceRequest to a policy of this Spec, which lacks images that the run leaves out."""
    more = {"previous_action": previous_action, "prefix": prefix}
    seen = {name: observation[name] for name in spec.observation if name in observation}
    return {**seen, **{name: array for name, array in more.items() if array is not None}}


def decision_seed(episode: str, step: int) -> int:
    """Return the seed of a decision's noise, 63 bits, the same on every host."""
    return xxhash.xxh3_64_intdigest(f"{episode}/{step}".encode()) >> 1
