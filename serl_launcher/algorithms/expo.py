"""EXPO (arXiv 2507.07986; on robots: EXPO-FT, 2605.25477): edit what an imitating policy proposes.

The base policy is trained by imitation alone (`update_clone`; leave it out of the plan, and it is frozen). Beside it an
edit policy e changes a chunk a of the data, or of the base, by at most `reach`, and is trained as in SAC:
    (1) L = alpha log e(d | s, a) - mean_e Q_e(s, a + d),
where alpha holds the entropy of d at a target. Of n samples of the base and an edit of each the one with the largest
value acts, and backs up, in (1) of chunk_actor_critic.py. So no gradient goes through the base's sampler. What acts may
have a moving average of the base's weights, as in the paper; what backs up has the newest.
"""

from collections.abc import Callable, Sequence
from typing import Any

from serl_client.spec import Spec
from torch import Tensor, nn

from serl_launcher.algorithms.base import descend, frozen_copy, soft_update
from serl_launcher.algorithms.chunk_actor_critic import NEXT, ActsByCritic, Parts, features_of, first_step
from serl_launcher.algorithms.sac import LogTemperature, hold_entropy
from serl_launcher.networks.seeded_noise import normal
from serl_launcher.networks.vision import ObservationEncoder
from serl_launcher.optim.optimizer import Optimizer
from serl_launcher.policies.chunk import Bounded
from serl_launcher.policies.editor import Edited, Editor
from serl_launcher.types import Batch, Metrics, Observation

EDIT = 8  # stream of a row's random numbers for its edit


class EXPO(ActsByCritic):
    """Imitate (`update_clone`), learn values (`update_critic`) and edit (`update_edit`).

    samples: n. reach: largest edit, of actions scaled to [-1, 1]. hidden: widths of the edit policy.
    ema_decay: of the average that acts, as in SFT; 0: the base itself acts.
    edit_optimizer: makes the edit policy's optimiser.
    initial_temperature, entropy_per_action: as in SAC, per number of an edit.
    The other arguments are those of Parts. Raises ConfigError for a head whose samples are all the same.
    """

    changeable = ("samples", "entropy_per_action")

    def __init__(
        self, spec: Spec, *, samples: int, reach: float, hidden: Sequence[int], ema_decay: float,
        edit_optimizer: Callable[[nn.Module], Optimizer], initial_temperature: float, entropy_per_action: float,
        encoder: Callable[[Spec], ObservationEncoder] | None, **parts: Any,
    ) -> None:  # fmt: skip
        made = Parts(spec, "expo", encoder=encoder, **parts)
        policy, critic = made.policy, made.critic
        features = features_of(spec, policy, encoder)
        editor = Editor(features, policy.scale, horizon=critic.horizon, reach=reach, hidden=hidden)
        averaged = frozen_copy(policy) if ema_decay else policy
        super().__init__(made, Edited(averaged, critic, editor, samples=samples))
        self.ema_decay = ema_decay
        if ema_decay:
            self.trained = policy
        self.edit_optimizer = edit_optimizer(self.acting.editor)
        self.log_temperature = LogTemperature(initial_temperature)
        self.temperature_optimizer = Optimizer(self.log_temperature, learning_rate=self.edit_optimizer.learning_rate)
        self.target_entropy = -entropy_per_action * critic.horizon * spec.action.shape[0]
        self.windows["update_edit"] = self.windows["update_critic"]

    @property
    def policy(self) -> Any:  # type: ignore[override]
        return getattr(self, "trained", self.acts.policy)

    def update_clone(self, batch: Batch) -> Metrics:
        """Take one step down the base's imitation loss, and move its average; critics and edit policy do not change."""
        metrics = super().update_clone(batch)
        if self.ema_decay:
            before = self.policy_optimizer.steps - 1
            soft_update(self.acts.policy, self.trained, 1 - min(self.ema_decay, (1 + before) / (10 + before)))
        return metrics

    def following_action(self, batch: Batch, following: Observation) -> Tensor:
        if not self.ema_decay:
            return super().following_action(batch, following)
        newest = Edited(self.trained, self.critic, self.acts.editor, samples=self.acts.samples)
        noise = normal(batch.seed, newest.noise_shape, NEXT)
        return newest.sample(following, task=batch.task, noise=noise.unsqueeze(0))[0]

    def update_edit(self, batch: Batch) -> Metrics:
        """Take one step of the edit policy down (1), and one of the temperature; nothing else changes."""
        metrics = descend(self.edit_optimizer, self.augment(batch), self.edit_loss, "edit_gradient")
        temperature = hold_entropy(self.temperature_optimizer, metrics["entropy"], self.target_entropy)
        return metrics | {"temperature": temperature}

    def edit_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Compute (1) for the executed chunks."""
        observation, scale = first_step(batch.observation), self.policy.scale
        executed = self.executed(batch)
        unit, density = self.edit_optimizer.forward(
            observation, scale.to_unit(executed).unsqueeze(0), normal(batch.seed, executed.shape[1:], EDIT).unsqueeze(0)
        )
        bounded: Any = Bounded.apply(unit[0], *scale.limits())
        value = self.value_by_action(observation, scale.from_unit(bounded))
        alpha = self.log_temperature().detach().exp()
        loss = (batch.weight * (alpha * density[0] - value)).mean()
        metrics = {"edit_loss": loss, "entropy": -density.mean(), "value_of_edit": value.mean()}
        metrics["edit"] = (unit[0] - scale.to_unit(executed)).abs().mean()
        return loss, {name: each.detach() for name, each in metrics.items()}
