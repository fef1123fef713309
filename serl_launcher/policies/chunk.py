"""Builds policies over action chunks (diffusion, flow, ...): encoder, history, network and head.

A policy with `max_delay` > 0 also learns to continue a chunk: in each row of a batch the first d = 0..max_delay steps
are the old chunk's. The network sees them as they are, whatever the head asks at the others, and they have no loss.
So every head learns it; prefix.py says how samples continue a chunk.
"""

import logging
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from serl_client.errors import ConfigError
from serl_client.spec import IMAGES, Spec
from torch import Tensor
from torch.nn import functional

from serl_launcher.networks.chunks import ChunkNetwork, ChunkSizes
from serl_launcher.networks.mlp import ActionScale
from serl_launcher.networks.seeded_noise import normal, uniform
from serl_launcher.networks.vision import ObservationEncoder
from serl_launcher.policies.base import ScaledPolicy
from serl_launcher.policies.guidance import Guidance, contrasted
from serl_launcher.policies.heads.base import Head, Predict, Target
from serl_launcher.policies.heads.flow import Flow
from serl_launcher.policies.heads.gaussian import Gaussian
from serl_launcher.policies.prefix import ACTION, Rows, named
from serl_launcher.policies.relative import COLUMN, Around, RelativeScale
from serl_launcher.types import Batch, Measured, Metrics, Observation, Prefix, Window

log = logging.getLogger(__name__)

NO_TASK = ""  # what a policy may learn to do without a condition
KNOWN = "task.known"  # added to an observation by `prepared`
DELAY = 2  # stream of a row's random numbers for its delay; the other streams are the heads'


class HeadPolicy(ScaledPolicy):
    """What all policies with a head share. A subclass adds the network.

    head: makes the head, from `horizon` and `width`. horizon: H, actions of a chunk.
    imitation_target: column that a chunk imitates: `action`, or an observation with the positions that the robot
        reached after each step (as in Hi-ORS). Such positions include every human correction, by whatever device. The
        action must be positions too, with names among the observation's names.
    width: D, numbers per action in the network: the Spec's A, then zeros without a loss.
    scale: how actions are scaled, see ActionScale. Samples stay within the Spec's bounds with every scale.
    relative: entries of the action, by name, that the network sees relative to the present state; `all`; empty: none.
        `scale` is then of what the network sees, and also, by statistics of their own, of actions outside of it.
    max_delay: rows of the old chunk that the policy learns to continue, at most; below H. 0: it learns none, and a
        head that can guides its samples.

    Raises ConfigError if the action's names are not among those of `imitation_target`, for another `max_delay`, and for
    a scale beyond [-1, 1] with a head that keeps within; and as RelativeScale does.
    """

    graph = "chunks"
    feature_size: int

    def __init__(
        self, spec: Spec, *, head: Callable[..., Head], horizon: int, imitation_target: str, width: int,
        scale: str = "bounds", max_delay: int = 0, relative: Sequence[str] = (),
    ) -> None:  # fmt: skip
        super().__init__()
        if not 0 <= max_delay < horizon:
            raise ConfigError(f"policy.max_delay={max_delay}: say 0, or fewer rows than policy.horizon={horizon}")
        self.head = head(horizon=horizon, width=width)
        if self.head.keeps_unit and scale in ("std", "quantile"):
            raise ConfigError(
                f"{type(self.head).__name__} keeps actions within [-1, 1], and policy.scale={scale} goes beyond: say "
                "policy.scale=range"
            )
        guidance = "guided" if self.head.guides else None
        self.max_delay, self.continues = max_delay, "trained" if max_delay else guidance
        self.mode_at_zero = self.head.mode_at_zero
        self.horizon, self.imitation_target, self.width = horizon, imitation_target, width
        self.size = spec.action.shape[0]  # A
        self.entries = None if imitation_target == "action" else _entries(spec, imitation_target)
        self.scale = ActionScale(spec.action, scale, imitation_target, self.entries)
        self.relative = RelativeScale(spec, relative, scale) if relative else None

    def prepared(self, observation: Observation, task: Sequence[str]) -> Observation:
        """Add to the observation what `condition` needs of the task, so that the rest works on tensors alone."""
        return observation

    @abstractmethod
    def condition(self, prepared: Observation) -> Any:
        """Compute what the network depends on besides chunk and time, once for all passes of a sample."""

    @abstractmethod
    def repeated(self, condition: Any, n: int) -> Any:
        """Repeat the condition of B rows for n samples each -> [n B], in the order rows 0..B-1, n times."""

    @abstractmethod
    def features(self, observation: Observation) -> Tensor:
        """Encode the observation {name: [B, ...]} for a critic -> [B, feature_size]."""

    @abstractmethod
    def predict(self, chunk: Tensor, time: Tensor, condition: Any, old: Tensor | None) -> Tensor:
        """Ask the network: chunk [B, H, D], time [B, times] -> [B, H, head.outputs].

        old: bool [B, H], which steps of the chunk are the old one's; None: none. The time is that of the others.
        """

    @property
    def noise_shape(self) -> tuple[int, ...]:
        return self.head.noise_shape

    @property
    def is_deterministic(self) -> bool:
        return self.head.is_deterministic

    @property
    def offsets(self) -> dict[str, tuple[int, ...]]:
        offsets = super().offsets
        if self.entries is not None:
            offsets[self.imitation_target] = (*offsets.get(self.imitation_target, ()), *range(1, self.horizon + 1))
        return offsets

    @property
    def measured(self) -> Measured:
        if self.relative is None:
            return {}
        seen = {name: offsets for name, offsets in self.offsets.items() if not name.startswith(IMAGES)}
        return {COLUMN: (Window(seen), self._moves)}

    def _moves(self, batch: Batch) -> Tensor:
        """Return what is imitated, relative to the present state, at the valid steps [n, A].

        What is further away than the robot's bounds are is left out, unless there is nothing else.
        """
        assert self.relative is not None  # else nobody asks
        batch, scale = batch.to(self.scale.center.device), self.relative.scale
        moves = (self._imitated(batch) - self.relative.present(self._observed(batch)))[batch.valid]
        is_near = ((scale.low <= moves) & (moves <= scale.high)).all(-1)
        return moves[is_near] if is_near.any() else moves

    def forward(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Compute the head's mean loss over the valid steps [B].

        Steps after the episode's end become the zero of the scale: the batch has zeros there in the robot's units,
        which may lie far outside the action's bounds.
        """
        observation = self._observed(batch)
        action = self._scale_at(observation).to_unit(self._imitated(batch)) * batch.valid.unsqueeze(-1)  # [B, H, A]
        chunk = functional.pad(action, (0, self.width - self.size))  # [B, H, D]
        first, counted, old = torch.zeros_like(batch.length), batch.valid, None  # [B], [B, H]
        if self.max_delay:
            first = self._delay(batch)
            old = torch.arange(self.horizon, device=first.device) < first.unsqueeze(1)
            counted = counted & ~old
        condition = self.condition(self.prepared(observation, batch.task))
        target = Target(chunk, batch.seed, first, batch.length, self.size)
        errors = self.head.errors(self._predict(condition, chunk, old), target)
        error = errors[..., : self.size].mean(-1) * counted  # [B, H]
        return error.sum(-1) / (batch.length - first), {}

    def _delay(self, batch: Batch) -> Tensor:
        """Draw how many rows of each window are the old chunk's [B]; at least one valid row is new."""
        drawn = (uniform(batch.seed, (), DELAY) * (self.max_delay + 1)).long()
        return torch.minimum(drawn, batch.length - 1)

    def _predict(self, condition: Any, unit: Tensor | None = None, old: Tensor | None = None) -> Predict:
        """Return `predict` for this condition, where the steps that are `old` [B, H] stay those of `unit`."""

        def predict(chunk: Tensor, time: Tensor) -> Tensor:
            if old is not None and unit is not None:
                chunk = torch.where(old.unsqueeze(-1), unit, chunk)
            return self.predict(chunk, time, condition, old).float()

        return predict

    def sample(
        self, observation: Observation, *, task: Sequence[str] = (), n: int = 1, noise: Tensor | None = None,
        prefix: Prefix | None = None,
    ) -> Tensor:  # fmt: skip
        """Sample n chunks per observation -> [n, B, H, A], see Policy.sample.

        noise: [n, B, *noise_shape]; [n, B, 1, H, D], the initial noise alone, selects a flow's deterministic sampler.
        """
        count, device = len(next(iter(observation.values()))), self.scale.center.device
        noise = torch.randn(n, count, *self.noise_shape, device=device) if noise is None else noise
        prepared = self.prepared(observation, task)
        if self.max_delay or prefix is not None:
            prepared = {**prepared, **named(prefix, count, self.horizon, self.size, device)}
        if prefix is None or self.max_delay:
            return self.chunks(prepared, noise)
        return self.guided(prepared, noise)

    def chunks(self, prepared: Observation, noise: Tensor) -> Tensor:
        """Do what `sample` does after `prepared`: tensors alone, so that it can be one CUDA graph."""
        condition, scale = self.repeated(self.condition(prepared), len(noise)), self._scale_at(prepared, len(noise))
        if not self.max_delay:
            chunk = self.head.sample(self._predict(condition), noise.flatten(0, 1))
            return self._action(chunk, scale).unflatten(0, noise.shape[:2])  # [n, B, H, A]
        rows = self._rows(prepared, len(noise))
        predict = self._predict(condition, rows.unit, rows.first(self.max_delay))
        chunk = self.head.sample(predict, noise.flatten(0, 1))
        return rows.kept(self._action(chunk, scale)).unflatten(0, noise.shape[:2])

    def led(
        self, observation: Observation, noise: Tensor, guidance: Guidance, *, task: Sequence[str],
        without: Sequence[str],
    ) -> Tensor:  # fmt: skip
        """Do what `sample` does for one chunk each, led by a critic, or by its task: see guidance.py.

        noise: [B, *noise_shape]. without: what B tasks are compared with. Returns [B, H, A]; with a weight of 0 and a
        task_weight of 1 it is `sample`, bit by bit.
        """
        predict, scale = self._predict(self.condition(self.prepared(observation, task))), self._scale_at(observation)
        if guidance.task_weight != 1:
            null = self._predict(self.condition(self.prepared(observation, without)))
            predict = contrasted(predict, null, guidance.task_weight)
        if not guidance.weight:
            return self._action(self.head.sample(predict, noise), scale)
        head: Any = self.head  # `steers`
        return self._action(head.steered(predict, noise, guidance.slope(scale)), scale)

    def guided(self, prepared: Observation, noise: Tensor) -> Tensor:
        """Do what `chunks` does, guided by the old chunk: (1) of prefix.py. It is not recorded as a CUDA graph."""
        condition = self.repeated(self.condition(prepared), len(noise))
        rows, head = self._rows(prepared, len(noise)), self._flow()
        weights = functional.pad(rows.weights().unsqueeze(-1).expand_as(rows.action), (0, self.width - self.size))
        chunk = head.guided(self._predict(condition), noise.flatten(0, 1), rows.unit, weights)
        return rows.kept(self._action(chunk, self._scale_at(prepared, len(noise)))).unflatten(0, noise.shape[:2])

    def _rows(self, prepared: Observation, n: int) -> Rows:
        return Rows.of(prepared, self._scale_at(prepared).to_unit(prepared[ACTION]), n, self.width)

    def rsample(
        self, observation: Observation, *, seed: Tensor, stream: int = 0, task: Sequence[str] = ()
    ) -> tuple[Tensor, Tensor]:
        """Sample one chunk per observation, with a gradient through all steps -> action [B, H, A], log_prob [B].

        seed, stream: see `normal`.
        log_prob is the log density of a flow's last step, given the steps before and without clipping. Minus its mean
        is a lower bound of the entropy, and falls with the noise level. Without a noise level it is zero.
        Raises ConfigError for another head than a flow.
        """
        head, scale = self._flow(), self._scale_at(observation)
        condition = self.condition(self.prepared(observation, task))
        chunk, density = head.rsample(self._predict(condition), normal(seed, self.noise_shape, stream))
        bounded: Any = Bounded.apply(chunk[..., : self.size], *scale.limits())
        return scale.from_unit(bounded), density[..., : self.size].sum((-2, -1))

    def log_prob(self, observation: Observation, action: Tensor, task: Sequence[str] = ()) -> Tensor:
        """Return the log density [B] of action [B, H, A], in the robot's units; it is over scaled actions.

        Raises ConfigError for a head without a density.
        """
        if not isinstance(self.head, Gaussian):
            raise ConfigError(f"only head=gaussian has a density, not {type(self.head).__name__}")
        predict = self._predict(self.condition(self.prepared(observation, task)))
        unit = self._scale_at(observation).to_unit(action)
        chunk = functional.pad(unit, (0, self.width - self.size))
        return self.head.log_prob(predict, chunk)[..., : self.size].sum((-2, -1))

    def _flow(self) -> Flow:
        if not isinstance(self.head, Flow):
            raise ConfigError(f"only head=flow has a gradient through its sampler, not {type(self.head).__name__}")
        return self.head

    def _scale_at(self, observation: Observation, n: int = 1) -> ActionScale | Around:
        """Return the scale of the network's chunks, n for each of B observations."""
        return self.scale if self.relative is None else self.relative.at(observation, n)

    def _action(self, chunk: Tensor, scale: ActionScale | Around) -> Tensor:
        return scale.from_unit(chunk[..., : self.size].clamp(*scale.limits()))

    def _observed(self, batch: Batch) -> dict[str, Tensor]:
        steps = slice(self.history) if self.history > 1 else 0
        return {name: batch.observation[name][:, steps] for name in self.inputs if name in batch.observation}

    def _imitated(self, batch: Batch) -> Tensor:
        if self.entries is None:
            return batch.action
        return batch.observation[self.imitation_target][:, -self.horizon :, self.entries]


class ChunkPolicy(HeadPolicy):
    """A policy of an encoder of observations, a network over chunks and a head.

    encoder: makes the encoder from the Spec. network: makes the network, see ChunkNetwork.
    history: To, observations that it sees, the newest last. Before an episode's first one, that one is repeated.
    tasks: tasks in words, each of which becomes one input of the network, 1 where it is the row's task. A row of
        another task trains with zeros there; a robot that asks for another task is refused. Empty: no such inputs.
    The other arguments are those of HeadPolicy, with D = A.
    Raises ConfigError for a network whose derivative the head needs and does not get, and for tasks named twice.
    """

    def __init__(
        self, spec: Spec, *, encoder: Callable[[Spec], ObservationEncoder], network: Callable[..., ChunkNetwork],
        head: Callable[..., Head], horizon: int, imitation_target: str, scale: str = "bounds", max_delay: int = 0,
        history: int = 1, tasks: Sequence[str] = (), relative: Sequence[str] = (),
    ) -> None:  # fmt: skip
        if len(set(tasks)) < len(tasks):
            raise ConfigError(f"policy.tasks={list(tasks)}: name each task once")
        width = spec.action.shape[0]
        super().__init__(
            spec, head=head, horizon=horizon, imitation_target=imitation_target, width=width, scale=scale,
            max_delay=max_delay, relative=relative,
        )  # fmt: skip
        self.encoder = encoder(spec)
        self.inputs, self.feature_size = self.encoder.inputs, self.encoder.size
        self.history, self.tasks, self._is_stranger_told = history, tuple(tasks), False
        self.network = network(ChunkSizes(
            horizon=horizon, inputs=width + bool(max_delay), outputs=self.head.outputs, times=self.head.times,
            condition=self.encoder.size + len(self.tasks), history=history,
        ))  # fmt: skip
        if self.head.needs_forward_derivative and not self.network.has_forward_derivative:
            raise ConfigError(
                f"{type(self.head).__name__} needs the network's forward-mode derivative, which "
                f"{type(self.network).__name__} does not have: say network=mlp"
            )

    def prepared(self, observation: Observation, task: Sequence[str]) -> Observation:
        if not self.tasks:
            return observation
        if (strangers := set(task) - {*self.tasks, NO_TASK}) and self.training and not self._is_stranger_told:
            self._is_stranger_told = True
            log.warning("rows of the task %r train without a task: policy.tasks lacks it", min(strangers))
        task = task or [NO_TASK] * len(next(iter(observation.values())))
        one_hot = torch.tensor([[float(word == each) for each in self.tasks] for word in task])  # [B, tasks]
        return {**observation, KNOWN: one_hot.to(self.scale.center.device, non_blocking=True)}

    def condition(self, prepared: Observation) -> Tensor:
        each = prepared if self.history == 1 else {name: prepared[name].flatten(0, 1) for name in self.inputs}
        frames = self.encoder(each).unflatten(0, (-1, self.history))  # [B, To, C]
        if not self.tasks:
            return frames
        return torch.cat([frames, prepared[KNOWN].unsqueeze(1).expand(-1, frames.shape[1], -1)], -1)

    def repeated(self, condition: Tensor, n: int) -> Tensor:
        return condition.repeat(n, 1, 1)

    def features(self, observation: Observation) -> Tensor:
        return self.encoder(observation)

    def predict(self, chunk: Tensor, time: Tensor, condition: Tensor, old: Tensor | None) -> Tensor:
        if self.max_delay:
            flag = chunk.new_zeros(chunk.shape[:2]) if old is None else old.to(chunk.dtype)
            chunk = torch.cat([chunk, flag.unsqueeze(-1)], -1)
        return self.network(chunk, time, condition)


class Bounded(torch.autograd.Function):
    """Clip to [low, high]. A number outside keeps its gradient if a descent step leads back inside. Without that it
    would stay outside for ever."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, low: Tensor, high: Tensor) -> Tensor:
        ctx.save_for_backward(inputs, low, high)
        return inputs.clamp(low, high)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (inputs, low, high), (gradient,) = ctx.saved_tensors, gradients
        leads_away = ((inputs > high) & (gradient < 0)) | ((inputs < low) & (gradient > 0))
        return gradient.masked_fill(leads_away, 0.0), None, None


def _entries(spec: Spec, name: str) -> list[int]:
    """Return the indices of the action's entries in the observation `name`."""
    names = list(spec.observation[name].names) if name in spec.observation else []
    missing = [entry for entry in spec.action.names or ("?",) if entry not in names]
    if missing:
        raise ConfigError(
            f"policy.imitation_target={name} has names {names}, which lack {missing} of the action: "
            "say policy.imitation_target=action"
        )
    return [names.index(entry) for entry in spec.action.names]
