"""Learns a reward classifier from judged episodes: success, the last of n ordered stages, from one observation.

An observation shows success if its episode succeeded and ends within `positive` steps; up to `unsure` steps before
these, nobody knows. All others show none: what came before, and failed episodes to their last row. It shows stage k < n
if its row's column `stage` says k or more, or if it shows success. So stages are ordered, and each has a probability of
its own that it or a later one is there. The loss of a row is the mean over the stages of
    (1) L = w (1 - p)^focus (-log p), with p the probability of the row's own label,
the focal loss of Lin et al. 2017 (arXiv 1708.02002), so that rows that look alike count more than easy ones. w makes
both labels weigh half of a batch. That leaves p too high, because success is rare. So `update_calibration`, on episodes
from which `update` learned nothing, fits two numbers a and b of each stage such that
    (2) P(stage) = sigmoid(a z + b)
is calibrated (Platt 1999), z being the network's logit.

Nobody acts with it. A robot's judge (robot_infra/judges.py) asks the learner's inference process as an actor does; the
answer's extra `reached` is (2) of all stages, and its action is the middle of the bounds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from serl_client.errors import ConfigError
from serl_client.spec import Spec
from torch import Tensor, nn

from serl_launcher.algorithms.base import Algorithm, descend
from serl_launcher.algorithms.chunk_actor_critic import first_step
from serl_launcher.networks.augment import Augment, augmentation
from serl_launcher.networks.mlp import ActionScale, mlp
from serl_launcher.networks.vision import ObservationEncoder
from serl_launcher.optim.optimizer import Optimizer
from serl_launcher.policies.base import Acting
from serl_launcher.types import Batch, Carry, Decision, Metrics, Observation, Prefix, Window

SUCCESS, REMAINING = "episode.success", "episode.remaining"
SURE = 1e-6  # least 1 - p in (1): at 0 an exponent below 1 has no finite gradient
STAGE, REACHED = "stage", "reached"  # the column of the rows, and that of the answer


class Platt(nn.Module):
    """(2): logits [B, n] -> logits [B, n] of calibrated probabilities."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        self.scale, self.bias = nn.Parameter(torch.ones(stages)), nn.Parameter(torch.zeros(stages))

    def forward(self, logit: Tensor) -> Tensor:
        return self.scale * logit + self.bias


class Logit(nn.Module):
    """Observations {name: [B, ...]} -> logits z [B, n]."""

    def __init__(self, encoder: ObservationEncoder, hidden: Sequence[int], stages: int) -> None:
        super().__init__()
        self.encoder, self.head = encoder, mlp(encoder.size, hidden, stages, layer_norm=True)

    def forward(self, observation: Observation) -> Tensor:
        return self.head(self.encoder(observation))


class Classifier(Acting):
    """Tells P(stage) of observations {name: [B, ...]} -> [B, n]."""

    horizon = 1

    def __init__(self, logit: Logit, stages: int, scale: ActionScale) -> None:
        super().__init__()
        self.logit, self.platt, self.scale = logit, Platt(stages), scale

    @property
    def noise_shape(self) -> tuple[int, ...]:
        return (1,)  # which it does not use

    def forward(self, observation: Observation) -> Tensor:
        return self.platt(self.logit(observation)).sigmoid()


class RewardClassifier(Algorithm):
    """Learn to tell the stages of a task, or success alone.

    stages: n; the last one is success.
    inputs: names of the observations that it sees; None: all.
    encoder: makes the encoder from a Spec of these. hidden: widths of the layers behind it.
    optimizer, calibration_optimizer: make the optimisers of network and calibration.
    positive, unsure: steps. focus: of (1). augment: as in SFT.
    Raises ConfigError for an observation that the robot lacks, for numbers out of range, and where nobody told stages.
    """

    changeable = ("focus",)

    def __init__(
        self, spec: Spec, *, stages: int, inputs: Sequence[str] | None, encoder: Callable[[Spec], ObservationEncoder],
        hidden: Sequence[int], optimizer: Callable[[nn.Module], Optimizer],
        calibration_optimizer: Callable[[nn.Module], Optimizer], positive: int, unsure: int, focus: float,
        augment: Callable[[], Augment] | None,
    ) -> None:  # fmt: skip
        super().__init__()
        if stages < 1 or positive < 1 or unsure < 0 or focus < 0:
            raise ConfigError(
                f"algo: stages={stages}, positive={positive}, unsure={unsure}, focus={focus}: say 1 or more stages, "
                "1 or more positive steps, and nothing below 0"
            )
        if stages > 1 and STAGE not in spec.extras:
            raise ConfigError(
                f"algo.stages={stages}: these rows have no column `{STAGE}`: record with task.stages={stages}"
            )
        if unknown := {*(inputs or ())} - spec.observation.keys():
            raise ConfigError(
                f"algo.inputs: this robot has no {min(unknown)}; name some of {', '.join(spec.observation)}"
            )
        names = spec.observation if inputs is None else inputs
        seen = replace(spec, observation={name: spec.observation[name] for name in names})
        self.classifier = Classifier(Logit(encoder(seen), hidden, stages), stages, ActionScale(spec.action, "bounds"))
        self.optimizer = optimizer(self.classifier.logit)
        self.calibration_optimizer = calibration_optimizer(self.classifier.platt)
        self.stages, self.positive, self.unsure, self.focus = stages, positive, unsure, focus
        read = self.classifier.logit.encoder.inputs
        self.augment = augmentation(augment, read)
        columns = (*read, "action", SUCCESS, REMAINING, *[STAGE] * (stages > 1))
        window = Window({**dict.fromkeys(columns, (0,)), "next_observation": (1,)})
        self.windows = {"update": window, "update_calibration": window}

    @property
    def acting(self) -> Classifier:
        return self.classifier

    @property
    def inputs(self) -> Sequence[str]:
        return self.classifier.logit.encoder.inputs

    @torch.no_grad()
    def episode_scores(self, seen: Mapping[str, Any], task: str) -> Tensor:
        """Return P(stage) of each observation of an episode, [T, n], given those of `inputs`, {name: [T, ...]}."""
        return self.classifier({name: torch.from_numpy(np.asarray(seen[name])) for name in self.inputs})

    @torch.no_grad()
    def act(
        self, observation: Observation, previous_action: Tensor, carry: Carry, *, task: Sequence[str], noise: Tensor,
        explore: bool, prefix: Prefix | None = None,
    ) -> tuple[Decision, Carry]:  # fmt: skip
        """Return P(stage) as the extra `reached` [B, n]."""
        middle = self.classifier.scale.from_unit(torch.zeros_like(previous_action)).to(previous_action.dtype)
        return Decision(middle.unsqueeze(1), {REACHED: self.classifier(observation).float()}), carry

    def update(self, batch: Batch) -> Metrics:
        """Take one step down (1)."""
        return descend(self.optimizer, self.augment(batch), self.loss)

    def update_calibration(self, batch: Batch) -> Metrics:
        """Take one step of a and b down the cross entropy of (2)."""
        metrics = descend(self.calibration_optimizer, batch, self.calibration_loss)
        return {name: value for name, value in metrics.items() if name != "gradient"}

    def loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Compute (1)."""
        logit, label = self.optimizer.forward(next_observation(batch)), self.labels(batch)
        weight = balanced(label, batch.weight.unsqueeze(1) * self.is_known(batch)) / self.stages
        cross_entropy = F.binary_cross_entropy_with_logits(logit, label, reduction="none")
        missed = (-torch.expm1(-cross_entropy)).clamp(min=SURE)  # 1 - p
        loss = (weight * missed**self.focus * cross_entropy).sum()
        return loss, {"loss": loss.detach()}

    def calibration_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Compute the cross entropy of (2), and how the classifier does at P(success) = 0.5.

        recall: share of the rows that show success in which it says so. false_alarms: of the other rows.
        """
        with torch.no_grad():
            logit = self.classifier.logit(next_observation(batch))
        calibrated, label = self.calibration_optimizer.forward(logit), self.labels(batch)
        weight = batch.weight.unsqueeze(1) * self.is_known(batch)
        cross_entropy = F.binary_cross_entropy_with_logits(calibrated, label, reduction="none")
        loss = ((weight * cross_entropy).sum(0) / weight.sum(0).clamp(min=1)).sum()
        counts = weight[:, -1] > 0
        says, shows = (calibrated[:, -1] > 0) & counts, (label[:, -1] > 0) & counts
        others = counts & ~shows
        return loss, {
            "calibration_loss": loss.detach(),
            "recall": (says & shows).sum() / shows.sum().clamp(min=1),
            "false_alarms": (says & others).sum() / others.sum().clamp(min=1),
        }

    def labels(self, batch: Batch) -> Tensor:
        """Return 1 for each stage [B, n] that the next observation shows, 0 for the others."""
        success = batch.extras[SUCCESS] & (batch.extras[REMAINING] < self.positive)  # [B, 1]
        if self.stages == 1:
            return success.float()
        before = batch.extras[STAGE] >= torch.arange(1, self.stages, device=success.device)  # [B, n - 1]
        return torch.cat([before | success, success], 1).float()

    def is_known(self, batch: Batch) -> Tensor:
        """Return whether the label of each stage [B, n] is known; those before success always are."""
        left = batch.extras[REMAINING]
        success = ~batch.extras[SUCCESS] | (left < self.positive) | (left >= self.positive + self.unsure)  # [B, 1]
        return torch.cat([torch.ones_like(success).expand(-1, self.stages - 1), success], 1)


def next_observation(batch: Batch) -> Mapping[str, Any]:
    """Return the observation after each row, {name: [B, ...]}."""
    assert batch.next_observation is not None  # the window asks for it
    return first_step(batch.next_observation)


def balanced(label: Tensor, weight: Tensor) -> Tensor:
    """Scale weights [B, n] so that rows of either label [B, n] sum to a half each, or to 1 if there is one label alone,
    in each column."""
    parts = [weight * (label == each) for each in (0, 1)]
    sums = [part.sum(0) for part in parts]
    there = torch.stack(sums).gt(0).sum(0).clamp(min=1)
    return sum((part / total.clamp(min=1e-6) for part, total in zip(parts, sums, strict=True)), weight * 0) / there
