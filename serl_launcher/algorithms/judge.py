"""Makes a judge of a pretrained reward model: a probability of success, from a number that somebody else's model says.

A reward model says z of the images of an episode up to now. Of judged episodes it is learned what z means here:
    (1) P(success) = sigmoid(a z + b),
with a and b of most likelihood under targets (n+ + 1) / (n+ + 2) and 1 / (n- + 2) of n+ rows that show success and n-
others (Platt 1999, whose targets keep a finite where z separates the rows). So a model that knows nothing of this task
says the share of such rows, which no threshold of a judge takes for success; a is not below 0, so that less never
becomes more.

Which rows show success is as in reward_classifier.py, and a robot's judge asks it in the same way.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from serl_client.errors import ConfigError
from serl_client.spec import Spec
from torch import Tensor

from serl_launcher.algorithms.base import Algorithm, uncounted
from serl_launcher.algorithms.reward_classifier import REACHED, REMAINING, SUCCESS
from serl_launcher.networks.mlp import ActionScale
from serl_launcher.policies.base import Acting
from serl_launcher.policies.reward_model import RewardModel
from serl_launcher.types import Batch, Carry, Decision, Metrics, Observation, Prefix, Window

INDEX = "episode.index"
NEWTON = 50  # steps; it takes about ten
RIDGE = 1e-6  # of the Hessian: where all z are equal, it has no inverse


class Calibrated(Acting):
    """What acts: a reward model, and (1). Only a and b are published; each process builds its own model."""

    horizon = 1
    slope: Tensor
    offset: Tensor

    def __init__(self, model: RewardModel, scale: ActionScale) -> None:
        super().__init__()
        self.model, self.scale = model, scale
        self.register_buffer("slope", torch.zeros(()))  # a; until it is calibrated, it says 0 of everything
        self.register_buffer("offset", torch.tensor(-30.0))  # b

    @property
    def noise_shape(self) -> tuple[int, ...]:
        return (1,)  # which it does not use

    def forward(self, scores: Tensor) -> Tensor:
        return torch.sigmoid(self.slope * scores + self.offset)


class Judge(Algorithm):
    """Calibrate a reward model on judged episodes, and answer a robot's judge.

    model: makes the RewardModel of a Spec. positive, unsure: steps, as in RewardClassifier.
    kept: how many frames of an episode under way are remembered, evenly spread; every: steps between those of a stored
    row. A model of K frames is shown K of these, evenly spread over the episode up to now, as it was trained.
    Raises ConfigError for numbers out of range.
    """

    stages = 1
    means = ("calibrated.slope", "calibrated.offset")  # each rank asks of its own rows

    def __init__(
        self, spec: Spec, *, model: Callable[[Spec], RewardModel], positive: int, unsure: int, kept: int, every: int
    ) -> None:
        super().__init__()
        if positive < 1 or unsure < 0 or kept < 2 or every < 1:
            raise ConfigError(
                f"algo: positive={positive}, unsure={unsure}, kept={kept}, every={every}: say 1 or more positive "
                "steps, none or more unsure ones, 2 or more frames, and 1 or more steps between them"
            )
        made = model(spec)
        self.calibrated = Calibrated(made, ActionScale(spec.action, "bounds"))
        self.model, self.inputs = made, tuple(made.inputs)
        self.positive, self.unsure, self.kept, self.every = positive, unsure, kept, every
        past = range(1 - every * (kept - 1), 2, every) if made.frames > 1 else (1,)  # up to the one behind the row
        seen, row = dict.fromkeys(self.inputs, tuple(past)), ("action", SUCCESS, REMAINING, INDEX)
        self.windows = {"update_calibration": Window({**seen, **dict.fromkeys(row, (0,))})}
        self._scores: dict[int, tuple[float, bool]] = {}  # {step: z, and whether it shows success}

    @property
    def acting(self) -> Calibrated:
        return self.calibrated

    @torch.no_grad()
    def act(
        self, observation: Observation, previous_action: Tensor, carry: Carry, *, task: Sequence[str], noise: Tensor,
        explore: bool, prefix: Prefix | None = None,
    ) -> tuple[Decision, Carry]:  # fmt: skip
        """Return (1) as the extra `reached` [B, 1]. The carry holds the frames of each episode."""
        images = {name: observation[name].unsqueeze(1) for name in self.inputs}
        if self.model.frames > 1:
            images, carry = self._remembered(images, carry)
        scores = self.model.score(images, task).to(previous_action.device)
        middle = self.acting.scale.from_unit(torch.zeros_like(previous_action)).to(previous_action.dtype)
        return Decision(middle.unsqueeze(1), {REACHED: self.acting(scores).unsqueeze(1)}), carry

    def _remembered(self, now: Mapping[str, Tensor], carry: Carry) -> tuple[dict[str, Tensor], Carry]:
        """Return the K frames [B, K, ...] that the model is shown, and the frames to remember.

        Each question's frame is remembered, until there are too many; then every other one, and so on: the first frame
        of the episode always stays, and the others are evenly spread.
        """
        if carry is None:
            first = next(iter(now.values()))
            frames = {name: image.expand(-1, self.kept, *image.shape[2:]).clone() for name, image in now.items()}
            counts = torch.zeros(len(first), 3, dtype=torch.int64)  # frames that are kept, questions, questions a frame
            counts[:, 2] = 1
            carry = {"frames": frames, "counts": counts}
        frames, counts = carry["frames"], carry["counts"].clone()
        frames = {name: kept.clone() for name, kept in frames.items()}
        shown = {name: [] for name in now}
        for row, (there, asked, spread) in enumerate(counts.tolist()):
            if asked % spread == 0:
                if there == self.kept:
                    there, spread = (there + 1) // 2, 2 * spread
                    for kept in frames.values():
                        kept[row, :there] = kept[row, ::2].clone()
                if asked % spread == 0:
                    for name, kept in frames.items():
                        kept[row, there] = now[name][row, 0]
                    there += 1
            counts[row] = torch.tensor([there, asked + 1, spread])
            chosen = spread_over(there, self.model.frames)
            for name, kept in frames.items():
                shown[name].append(torch.cat([kept[row, chosen[:-1]], now[name][row]]))
        images = {name: torch.stack(each) for name, each in shown.items()}
        return images, {"frames": frames, "counts": counts}

    @uncounted
    def update_calibration(self, batch: Batch) -> Metrics:
        """Ask the model of rows that it has not been asked of, and fit (1) to all that are known."""
        steps = batch.step_id.tolist()
        shows, is_known = self.labels(batch)
        new = torch.tensor([step not in self._scores for step in steps]) & is_known
        if new.any():
            rows = batch.rows(new.nonzero().flatten())
            scores = self.model.score(self._stored(rows.observation, rows.extras[INDEX]), rows.task)
            fresh = zip(rows.step_id.tolist(), scores.tolist(), strict=True)
            self._scores |= {step: (score, False) for step, score in fresh}
        for step, success in zip(steps, shows.tolist(), strict=True):
            if step in self._scores:  # a verdict may come late
                self._scores[step] = self._scores[step][0], success
        return self._fit()

    def _stored(self, seen: Mapping[str, Tensor], index: Tensor) -> dict[str, Tensor]:
        """Choose K of the frames [B, M, ...] behind steps `index` [B, 1]; those before the episode repeat its first."""
        if self.model.frames == 1:
            return {name: image[:, -1:] for name, image in seen.items()}
        chosen = []
        for after in (index[:, 0] + 1).tolist():  # frames before the newest one
            own = min(self.kept, -(-after // self.every) + 1)
            chosen.append([self.kept - own + at for at in spread_over(own, self.model.frames)])
        rows = torch.arange(len(chosen))[:, None]
        return {name: image[rows, torch.tensor(chosen)] for name, image in seen.items()}

    def labels(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return whether each row shows success [B], and whether that is known [B]."""
        success, left = (batch.extras[name][:, 0].cpu() for name in (SUCCESS, REMAINING))
        shows = success & (left < self.positive)
        return shows, ~success | shows | (left >= self.positive + self.unsure)

    def _fit(self) -> Metrics:
        """Fit a and b to all scores by Newton's method."""
        known = torch.tensor([*self._scores.values()], dtype=torch.float64).reshape(-1, 2)
        z, shows = known[:, 0], known[:, 1] > 0
        positive, negative = int(shows.sum()), int((~shows).sum())
        if positive and negative:
            target = torch.where(shows, (positive + 1) / (positive + 2), 1 / (negative + 2))
            slope, offset = platt(z, target)
            self.acting.slope.fill_(slope)
            self.acting.offset.fill_(offset)
        says = self.acting(z.to(self.acting.slope)).cpu() > 0.5
        return {
            "scored": torch.tensor(float(len(z))), "slope": self.acting.slope.detach().cpu().clone(),
            "recall": (says & shows).sum() / max(positive, 1), "false_alarms": (says & ~shows).sum() / max(negative, 1),
        }  # fmt: skip

    @torch.no_grad()
    def episode_scores(self, seen: Mapping[str, Any], task: str) -> Tensor:
        """Return (1) of each observation of an episode, [T, 1], given its images {name: uint8 [T, H, W, 3]}."""
        count = len(next(iter(seen.values())))
        found = []
        for row in range(count):
            chosen = spread_over(row + 1, self.model.frames)
            images = {name: torch.stack([torch.as_tensor(seen[name][at]) for at in chosen]) for name in self.inputs}
            found.append(self.model.score({name: image.unsqueeze(0) for name, image in images.items()}, (task,)))
        return self.acting(torch.cat(found).to(self.acting.slope)).unsqueeze(1)

    def get_extra_state(self) -> dict[str, Any]:
        scores, shows = zip(*self._scores.values(), strict=True) if self._scores else ((), ())
        known = {
            "steps": torch.tensor([*self._scores], dtype=torch.int64),
            "scores": torch.tensor(scores, dtype=torch.float64), "shows": torch.tensor(shows, dtype=torch.bool),
        }  # fmt: skip
        return {**super().get_extra_state(), "known": known}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        super().set_extra_state(state)
        steps, scores, shows = (state["known"][name].tolist() for name in ("steps", "scores", "shows"))
        self._scores = dict(zip(steps, zip(scores, shows, strict=True), strict=True))


def spread_over(count: int, shown: int) -> list[int]:
    """Return `shown` of the numbers 0 to count - 1, evenly spread with both ends; one: the last."""
    return [count - 1] if shown == 1 else torch.linspace(0, count - 1, shown).round().long().tolist()


def platt(z: Tensor, target: Tensor) -> tuple[float, float]:
    """Return a and b of most likelihood for log odds a z + b and targets in (0, 1), all [n] float64; a is at least 0.

    Newton's method, with the step halved while the loss does not fall.
    """
    center, width = z.mean(), z.std(correction=0).clamp(min=1e-9)
    rows = torch.stack([(z - center) / width, torch.ones_like(z)], 1)  # [n, 2]
    found = torch.stack([torch.zeros(()), torch.logit(target.mean())]).double()

    def loss(at: Tensor) -> Tensor:
        return torch.nn.functional.binary_cross_entropy_with_logits(rows @ at, target, reduction="sum")

    for _ in range(NEWTON):
        said = torch.sigmoid(rows @ found)
        gradient = rows.T @ (said - target)
        hessian = rows.T @ (rows * (said * (1 - said))[:, None]) + RIDGE * torch.eye(2).double()
        step, size = torch.linalg.solve(hessian, gradient), 1.0
        while size > 1e-4 and loss(found - size * step) > loss(found):
            size /= 2
        found = found - size * step
        if (size * step).abs().max() < 1e-9:
            break
    if found[0] < 0:
        return 0.0, float(torch.logit(target.mean()))
    slope = found[0] / width
    return float(slope), float(found[1] - slope * center)
