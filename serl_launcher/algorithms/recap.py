"""RECAP (Physical Intelligence 2025, arXiv 2511.14759): imitation conditioned on the advantage; constants are RLinf's.

Every row is imitated, failures too, but the policy is told which rows were good, and acts as if all were. With the
reward -1 for each step and `failure` at the end of a failed episode, divided by |worst|, the lowest such return so far
(at first that of an episode that fails at once),
    (1) R_t = (-remaining_t + failure [episode failed]) / |worst|, in [-1, 0],
    (2) V(s_t) is a distribution over R_t, and its mean the value,
    (3) A_t = -n / |worst| + V(s_{t+n}) - V(s_t) over n = 10 steps; R_t - V(s_t) where the episode ends before.
A row is positive if its advantage is above that of the others but a `share` of them, or if a person drove it. Positive
rows are imitated with the condition, but a part of them, `dropped`, and all others without it. What acts has the
condition, and may go beyond it: classifier-free guidance, (2) of policies/guidance.py. Before there are advantages, as
in a phase that clones, every row is positive: whoever recorded it, the condition is trained.

The condition is added to the task's words where a policy reads words (PI0, lerobot's SmolVLA, pi0 and pi0.5), and an
input of other policies. `update_value` learns (2), `update_advantage` computes (3) into a derived column, and
`update_policy` imitates.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from serl_client.errors import ConfigError
from serl_client.spec import Feature, Spec
from torch import Tensor, nn

from serl_launcher.algorithms.base import Algorithm, descend
from serl_launcher.algorithms.chunk_actor_critic import features_of, first_step
from serl_launcher.networks.augment import Augment, augmentation
from serl_launcher.networks.critics import Critic
from serl_launcher.networks.seeded_noise import uniform
from serl_launcher.networks.vision import ObservationEncoder
from serl_launcher.optim.optimizer import Optimizer
from serl_launcher.policies.base import Policy, ScaledPolicy
from serl_launcher.policies.chunk import NO_TASK, HeadPolicy
from serl_launcher.policies.guidance import DROPPED, Guidance, pick_words
from serl_launcher.policies.wrapped import Wrapped
from serl_launcher.types import Batch, Metrics, Observation, Window

POSITIVE = "Advantage: positive"
ADVANTAGE, DERIVED = "advantage", "derived.advantage"
SUCCESS, REMAINING = "episode.success", "episode.remaining"
MOVES = 0.02  # share by which the threshold moves towards a batch's; more in the first updates


class Conditioned(Wrapped):
    """Samples of `policy` with the condition. task_weight: of classifier-free guidance; 1: the condition alone."""

    policy: ScaledPolicy  # type: ignore[assignment]

    def __init__(self, policy: ScaledPolicy, task_weight: float) -> None:
        super().__init__(policy)
        self.tasks, self.task_weight = (), task_weight

    def choose(self, observation: Observation, task: Sequence[str], noise: Tensor) -> Tensor:
        task = task or [NO_TASK] * len(noise)
        if not isinstance(self.policy, HeadPolicy):
            return self.policy.sample(observation, task=self.words(task), noise=noise.unsqueeze(0))[0]
        guidance = Guidance(lambda chunk: chunk, noise.new_ones(()), 0.0, self.task_weight)
        return self.policy.led(observation, noise, guidance, task=self.words(task), without=self.without(task))

    def words(self, task: Sequence[str]) -> list[str]:
        """Return these tasks with the condition."""
        return [POSITIVE if self.policy.tasks else f"{each}. {POSITIVE}" for each in task]

    def without(self, task: Sequence[str]) -> list[str]:
        return [NO_TASK if self.policy.tasks else each for each in task]


class RECAP(Algorithm):
    """Learn values, mark what was better than expected, imitate everything and act as what was.

    policy: makes the policy from the Spec: one that reads words, or one with a head whose `tasks` are empty.
    critic: makes the value from the Spec; its range holds [-1, 0]. encoder: of the value; None: the policy's features,
        which it does not train. optimizer, value_optimizer: make the optimisers.
    steps: n of (3). failure: reward of a failed episode's last step.
    share: of the rows that are positive. dropped: of these, without the condition.
    task_weight: see Conditioned; 1 for a policy without a head. augment: as in SAC.
    Raises ConfigError for numbers out of range, and for a policy that knows tasks of its own.
    """

    changeable, means = ("dropped", "task_weight"), ("threshold",)
    lowest = ("worst",)
    threshold: Tensor  # [], advantage above which a row is positive
    seen: Tensor  # [], batches from which it comes
    worst: Tensor  # [], lowest return of the rows so far, before it is divided

    def __init__(
        self, spec: Spec, *, policy: Callable[..., Policy], critic: Callable[..., Critic],
        encoder: Callable[[Spec], ObservationEncoder] | None, optimizer: Callable[[nn.Module], Optimizer],
        value_optimizer: Callable[[nn.Module], Optimizer], steps: int, failure: float, share: float, dropped: float,
        task_weight: float, augment: Callable[[], Augment] | None,
    ) -> None:  # fmt: skip
        super().__init__()
        if steps < 1 or failure > 0 or not 0 < share < 1 or not 0 <= dropped < 1:
            raise ConfigError(
                f"algo: steps={steps}, failure={failure}, share={share}, dropped={dropped}: say 1 or more steps, a "
                "failure not above 0, and shares between 0 and 1"
            )
        made = _told(policy)(spec)
        if not (isinstance(made, HeadPolicy) or (isinstance(made, ScaledPolicy) and made.reads_words)):
            raise ConfigError(
                "algo=recap needs a policy with a head, or one that reads words: say policy=flow, policy=pi0, or "
                f"policy=lerobot with a SmolVLA, not {type(made).__name__}"
            )
        if task_weight != 1 and not isinstance(made, HeadPolicy):
            raise ConfigError(f"algo.task_weight={task_weight} needs a policy with a head: say 1, or policy=pi0")
        self.conditioned = Conditioned(made, task_weight)
        features = features_of(spec, made, encoder)
        self.critic = critic(spec, encoder=features, horizon=0, scale=made.scale)
        self.policy_optimizer, self.value_optimizer = optimizer(made), value_optimizer(self.critic)
        self.steps, self.failure, self.share, self.dropped = steps, failure, share, dropped
        self.augment = augmentation(augment, {*made.inputs, *features.inputs})
        self.register_buffer("threshold", torch.zeros(()))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("worst", torch.tensor(min(failure, -1.0)))
        self.derived = {ADVANTAGE: Feature(())}
        now, whole = dict.fromkeys(features.inputs, (0,)), tuple(range(steps))
        row = {**now, "action": (0,), SUCCESS: (0,), REMAINING: (0,)}
        ahead = {**now, "action": whole, SUCCESS: (0,), REMAINING: (0,), "next_observation": (steps,)}
        self.windows = {
            "update_value": Window(row), "update_advantage": Window(ahead), "update_clone": Window(made.offsets),
            "update_policy": Window({**made.offsets, DERIVED: (0,)}),
        }  # fmt: skip

    @property
    def policy(self) -> ScaledPolicy:
        return self.conditioned.policy

    @property
    def acting(self) -> Conditioned:
        return self.conditioned

    # -- updates
    def update_value(self, batch: Batch) -> Metrics:
        """Take one step of the value towards the returns (1)."""
        self._look(batch)
        return descend(self.value_optimizer, self.augment(batch), self.value_loss, "value_gradient")

    @torch.no_grad()
    def update_advantage(self, batch: Batch) -> tuple[Metrics, dict[str, Tensor]]:
        """Compute (3) for each row's first step, and move the threshold; nothing is trained."""
        assert batch.next_observation is not None  # the window asks for it
        self._look(batch)
        batch = self.augment(batch)
        value, following = self.values(batch.observation), self.values(batch.next_observation or {})
        ends = batch.extras[REMAINING][:, 0] < self.steps
        ahead = torch.where(ends, self.returns(batch), batch.length / self.worst + following)
        advantage = ahead - value
        moves = torch.where(self.seen > 0, (9 / (10 + self.seen)).clamp(min=MOVES), 1.0)
        self.threshold.lerp_(advantage.quantile(1 - self.share), moves)
        self.seen += 1
        metrics = {"advantage": advantage.mean(), "threshold": self.threshold.clone(), "value": value.mean()}
        return metrics, {ADVANTAGE: advantage}

    def update_clone(self, batch: Batch) -> Metrics:
        """Take one step down the imitation loss, before there are advantages: every row is positive."""
        return self._imitate(batch, torch.ones_like(batch.intervened[:, 0]))

    def update_policy(self, batch: Batch) -> Metrics:
        """Take one step down the imitation loss of all rows, with the condition where they were good."""
        return self._imitate(batch, (batch.extras[DERIVED][:, 0] > self.threshold) | batch.intervened[:, 0])

    def _look(self, batch: Batch) -> None:
        """Scale values by the worst return of these rows, too, and what is compared with them."""
        worst = self.worst.clamp(max=self._raw_returns(batch).min())
        self.threshold.mul_(self.worst / worst)
        self.worst.copy_(worst)

    def _imitate(self, batch: Batch, is_positive: Tensor) -> Metrics:
        told = is_positive & (uniform(batch.seed, (), DROPPED) >= self.dropped)
        words, without = self.conditioned.words(batch.task), self.conditioned.without(batch.task)
        batch = replace(self.augment(batch), task=pick_words(told, words, without))
        metrics = descend(self.policy_optimizer, batch, self.imitation_loss)
        return metrics | {"positive": is_positive.float().mean()}

    # -- losses and values
    def imitation_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        loss, _ = self.policy_optimizer.forward(batch)  # [B]
        loss = (batch.weight * loss).mean()
        return loss, {"loss": loss.detach()}

    def value_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Compute the loss of (2) against (1)."""
        prediction = self.value_optimizer.forward(first_step(batch.observation), batch.action)
        target = self.returns(batch)
        loss = (batch.weight * self.critic.loss(prediction, target)).mean()
        error = (self.critic.values.mean(prediction.detach()).mean(0) - target).abs().mean()
        return loss, {"value_loss": loss.detach(), "value_distance": error}

    def returns(self, batch: Batch) -> Tensor:
        """Compute (1) for each row's first step [B]."""
        return (self._raw_returns(batch) / -self.worst).clamp(min=-1)

    def _raw_returns(self, batch: Batch) -> Tensor:
        """Compute returns in steps [B]."""
        return self.failure * ~batch.extras[SUCCESS][:, 0] - batch.extras[REMAINING][:, 0]

    def values(self, observation: Observation) -> Tensor:
        """Return V of the first observations [B]."""
        return self.critic.state_value(first_step(observation)).mean(0)


def _told(policy: Callable[..., Policy]) -> Callable[..., Policy]:
    """Give the condition as an input to a policy that reads no words. Raises ConfigError if it has such inputs."""
    own = getattr(policy, "keywords", {})
    if own.get("tasks"):
        raise ConfigError("algo=recap makes the condition an input of its own: say policy.tasks=[]")
    return partial(policy, tasks=[POSITIVE]) if "tasks" in own else policy
