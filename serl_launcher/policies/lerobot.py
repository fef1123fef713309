"""Trains and runs the policies of lerobot (ACT, diffusion, SmolVLA, pi0, pi0.5) by their own classes.

Loss, network, sampler, optional tokenizer and normalisation are lerobot's: what it computes of a batch and of an
observation is what is computed here. Ours is what surrounds them: windows, seeds, statistics that travel with the
weights, and publishing.
    images   uint8 [B, h, w, 3] become float [B, 3, h, w] in [0, 1], as in lerobot's datasets
    actions  behind the episode's end the last one is repeated, and `action_is_pad` is True there
"""

import importlib
import inspect
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from serl_client.errors import ConfigError
from serl_client.spec import IMAGES, Spec
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from serl_launcher.networks.hollow import is_hollow
from serl_launcher.networks.mlp import SMALLEST_STD, ActionScale, Normaliser, Statistics
from serl_launcher.policies import lerobot_files as files
from serl_launcher.policies.base import ScaledPolicy
from serl_launcher.policies.frozen import PartlyFrozen
from serl_launcher.policies.prefix import Rows
from serl_launcher.types import Batch, Metrics, Observation, Prefix

log = logging.getLogger(__name__)

IMAGE_MEAN, IMAGE_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, which lerobot-train takes as well
BACKBONE = "inner.model.backbone"  # ACT's ResNet
# {mode of lerobot: its statistics}
READ = {"MEAN_STD": ("mean", "std"), "MIN_MAX": ("min", "max"), "QUANTILES": ("q01", "q99"), "IDENTITY": ()}
PLAIN = {"mean": 0.0, "std": 1.0, "min": -1.0, "max": 1.0, "q01": -1.0, "q99": 1.0}  # with these nothing changes
OURS = {"mean": "mean", "std": "std", "min": "low", "max": "high"}


class LeRobotPolicy(PartlyFrozen, ScaledPolicy):
    """A policy of lerobot for this robot.

    path: folder of a pretrained model of lerobot: config.json, model.safetensors, and the processors' files.
    type: one of lerobot_files.TYPES, of random weights; a folder has its own.
    options: fields of lerobot's config that differ from the folder's or from lerobot's default; None: none.
    tokenizer: folder of the tokenizer, in place of the one that the folder's processors name; None: that one.
    rename: {the robot's name of an observation: the policy's}.

    Statistics that the folder brings are never fitted anew; random weights take those of `set_statistics`, and of
    images ImageNet's. A loss that lerobot gives as one mean of the batch is the same number for each row, of rows that
    are drawn by their weights; so it is for algorithms that weigh rows by `Batch.weight` alone. Its random numbers
    (dropout, latents, noise) come from the first row's seed.

    Raises ConfigError if lerobot does not have the type or cannot build it, and for a folder that does not fit the
    robot, by the name of the feature.
    """

    precision = torch.float32

    low: Tensor
    high: Tensor

    def __init__(
        self, spec: Spec, *, path: str | None, type: str, options: Mapping[str, Any] | None, tokenizer: str | None,
        cameras: Sequence[str], rename: Mapping[str, str] | None,
    ) -> None:  # fmt: skip
        super().__init__()
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        folder = None if path is None else Path(path).expanduser()
        kind, own = files.described(folder, type)
        self._names = files.named(spec, cameras, rename or {})  # {the robot's name: the policy's}
        features = files.features(spec, self._names)
        if folder is not None:
            features = files.fitting(own, features, kind)
        self.fields = files.config(kind, own, options or {}, features)
        self.inputs = tuple(ours for ours, theirs in self._names.items() if theirs in features["input_features"])
        self.size, self.scale = spec.action.shape[0], ActionScale(spec.action, "range")  # of critics, and of edits
        self._place(kind)
        self.inner = files.made(kind, self.fields)
        self.continues = "guided" if hasattr(self.inner, "init_rtc_processor") else None
        self._pre, self._post, found = files.processors(self.fields, folder, tokenizer)
        if folder is not None and not is_hollow():
            found = found or files.statistics_among(folder, self.fields)
            files.load(self.inner, folder)
        ours = {theirs: ours for ours, theirs in self._names.items()}
        self.statistics = _Scales(self.fields, found, ours, is_needed=folder is not None)
        if getattr(self.fields, "use_relative_actions", False) and not self.statistics.is_given:
            raise ConfigError(
                "use_relative_actions: the statistics of such actions are not fitted here: say policy.path=FOLDER of a "
                "policy that has them, or policy=pi0 with policy.relative=[...]"
            )
        self.frozen = {
            name for name, weight in self.named_parameters(remove_duplicate=False) if not weight.requires_grad
        }
        self.register_buffer("low", torch.as_tensor(spec.action.low, dtype=torch.float32), persistent=False)
        self.register_buffer("high", torch.as_tensor(spec.action.high, dtype=torch.float32), persistent=False)
        if not is_hollow():
            log.info("policy: %s of lerobot%s; %s", kind, f" from {folder}" if folder else "", self.statistics.said)

    def _place(self, kind: str) -> None:
        """Say which steps lerobot reads of a window, from its first observation on."""
        actions, seen = list(self.fields.action_delta_indices), self.fields.observation_delta_indices
        self._has_time = seen is not None
        self.history = len(seen or [0])
        self._rows = len(actions)  # actions of a window that is learned
        self._begins = -actions[0]  # rows of it before the newest observation
        self.horizon = self.fields.n_action_steps if kind == "diffusion" else self._rows
        self.mode_at_zero = kind == "act"  # it has no noise
        self.reads_words = kind not in ("act", "diffusion")
        self.width = getattr(self.fields, "max_action_dim", self.size)
        self._noise = (1,) if kind == "act" else (1, self._rows, self.width)  # as that of a flow or DDIM of ours

    @property
    def is_deterministic(self) -> bool:
        return self.mode_at_zero

    @property
    def noise_shape(self) -> tuple[int, ...]:
        return self._noise

    @property
    def optimizer_preset(self) -> dict[str, Any]:
        """What lerobot trains it with, as options of Optimizer."""
        adam, schedule = self.fields.get_optimizer_preset(), self.fields.get_scheduler_preset()
        backbone = getattr(self.fields, "optimizer_lr_backbone", adam.lr) / adam.lr
        names = [name for name, weight in self.named_parameters() if weight.requires_grad]
        lowest, peak = (getattr(schedule, name, adam.lr) for name in ("decay_lr", "peak_lr"))
        return {
            "learning_rate": adam.lr, "betas": adam.betas, "weight_decay": adam.weight_decay, "epsilon": adam.eps,
            "grad_clip_norm": adam.grad_clip_norm, "warmup": getattr(schedule, "num_warmup_steps", 0),
            "decay": getattr(schedule, "num_decay_steps", None), "final": lowest / peak,
            "rates": {BACKBONE: backbone} if any(name.startswith(BACKBONE) for name in names) else {},
        }  # fmt: skip

    @property
    def offsets(self) -> dict[str, tuple[int, ...]]:
        first = self._begins + 1 - self.history
        observed = tuple(range(first, first + self.history))
        return {**dict.fromkeys(self.inputs, observed), "action": tuple(range(self._rows))}

    # -- training
    def forward(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Return lerobot's loss [B], and what it tells of it."""
        by_row = "reduction" in _arguments(self.inner.forward)
        if not by_row and not isinstance(batch.weight, FakeTensor):
            batch = batch.rows(_drawn(batch.weight))
        if not self.inner.training:
            self.inner.train()
        given = self._prepared(self._observed(batch.observation), batch.task)
        given |= {"action": _padded(batch), "action_is_pad": ~batch.valid}
        with _seeded(batch.seed[0], batch.action.device):
            given = self._run(self._pre, given)
            loss, told = self.inner(given, reduction="none") if by_row else self.inner(given)
        numbers = {name: value for name, value in (told or {}).items() if isinstance(value, int | float)}
        metrics = {name: torch.as_tensor(value, device=loss.device) for name, value in numbers.items()}
        return loss.expand(len(batch)), metrics

    # -- acting
    def sample(
        self, observation: Observation, *, task: Sequence[str] = (), n: int = 1, noise: Tensor | None = None,
        prefix: Prefix | None = None,
    ) -> Tensor:  # fmt: skip
        """Sample n chunks, see Policy.sample. Numbers that a sampler draws besides `noise` follow from all of it."""
        count = len(next(iter(observation.values())))
        noise = torch.randn(n, count, *self.noise_shape, device=self.low.device) if noise is None else noise
        seen = {name: observation[name] for name in self.inputs}
        if self.history == 1 and self._has_time:
            seen = {name: value.unsqueeze(1) for name, value in seen.items()}
        given, ask = self._prepared(seen, task or ("",) * count), self._chunk
        if prefix is not None:
            given |= {"action": prefix.action}
            ask = partial(self._continued, prefix=prefix)
        chunks = torch.stack([ask(dict(given), each) for each in noise]).clamp(self.low, self.high)
        if prefix is None:
            return chunks
        return Rows(prefix.action, prefix.action, prefix.committed, prefix.left).kept(chunks)

    @torch.no_grad()
    def _chunk(self, given: dict[str, Any], noise: Tensor) -> Tensor:
        """Ask lerobot for one chunk for each row -> [B, H, A]."""
        self.inner.eval()
        with _seeded(noise.double().sum().view(torch.int64), noise.device):
            given = self._run(self._pre, given)
            if self.fields.type == "diffusion":  # its `predict_action_chunk` reads queues of single observations
                if self.fields.image_features:
                    images = [given[name] for name in self.fields.image_features]
                    given["observation.images"] = torch.stack(images, dim=-4)
                chunk = self.inner.diffusion.generate_actions(given, noise=noise[:, 0])
            else:
                words = {} if self.fields.type == "act" else {"noise": noise[:, 0]}
                chunk = self.inner.predict_action_chunk(given, **words)
        return self._actions(chunk)

    @torch.no_grad()
    def _continued(self, given: dict[str, Any], noise: Tensor, *, prefix: Prefix) -> Tensor:
        """Do what `_chunk` does, guided by what is left of the old chunk [B, H, A], by lerobot's own RTC. It has one
        delay for a whole batch, so each row is asked for alone."""
        self.inner.eval()
        chunks = []
        with _seeded(noise.double().sum().view(torch.int64), noise.device), self._guided():
            given = self._run(self._pre, given)
            old = given.pop("action")
            for row, (committed, left) in enumerate(zip(prefix.committed.tolist(), prefix.left.tolist(), strict=True)):
                one = {name: value[row : row + 1] for name, value in given.items() if isinstance(value, Tensor)}
                before = old[row : row + 1, :left] if left else None
                words = {"inference_delay": committed, "prev_chunk_left_over": before}
                chunks.append(self.inner.predict_action_chunk(one, noise=noise[row], **words))
        return self._actions(torch.cat(chunks))

    @contextmanager
    def _guided(self) -> Iterator[None]:
        """Let lerobot's sampler continue chunks, as long as this lasts, as the folder's `rtc_config` says."""
        before = self.fields.rtc_config
        usual = importlib.import_module("lerobot.policies.rtc.configuration_rtc").RTCConfig
        self.fields.rtc_config = replace(before or usual(), enabled=True)
        try:
            self.inner.init_rtc_processor()
            yield
        finally:
            self.fields.rtc_config = before

    def _actions(self, chunk: Tensor) -> Tensor:
        """Return actions in the robot's units."""
        steps = importlib.import_module("lerobot.processor.converters")
        return self._run(self._post, chunk, steps.policy_action_to_transition, steps.transition_to_policy_action)

    def load_published(self, tensors: Mapping[str, Tensor]) -> None:
        if not bool(tensors["statistics.fitted"]):
            raise ConfigError(
                "policy.path brought no statistics, and none are fitted yet: no action before a phase with "
                "`fit_normalizer`"
            )
        super().load_published(tensors)

    # -- both
    def _observed(self, observation: Observation) -> dict[str, Tensor]:
        first = slice(self.history) if self._has_time else 0
        return {name: observation[name][:, first] for name in self.inputs}

    def _prepared(self, observation: Observation, task: Sequence[str]) -> dict[str, Any]:
        """Name and shape observations as lerobot's datasets have them."""
        given: dict[str, Any] = {"task": list(task)}
        for name, value in observation.items():
            is_image = name.startswith(IMAGES)
            given[self._names[name]] = value.movedim(-1, -3).float() / 255 if is_image else value
        if files.STATE not in given and files.ENVIRONMENT in given:  # lerobot's ACT asks it for the device
            given[files.STATE] = given[files.ENVIRONMENT]
        return given

    def _run(self, pipeline: Any, given: Any, enter: Any = None, leave: Any = None) -> Any:
        """Run a processor's steps where the tensors are, with the statistics that were fitted or published."""
        converters = importlib.import_module("lerobot.processor.converters")
        transition = (enter or converters.batch_to_transition)(given)
        for step in pipeline.steps:
            if hasattr(step, "_tensor_stats"):
                step._tensor_stats = self.statistics.tensors()
            if type(step).__name__ != "DeviceProcessorStep":
                transition = step(transition)
        return (leave or converters.transition_to_batch)(transition)

    def save(self, folder: Path) -> None:
        """Write a `pretrained_model` that lerobot's own programs load."""
        self.inner.save_pretrained(folder)
        for pipeline in (self._pre, self._post):
            for step in pipeline.steps:
                if hasattr(step, "_tensor_stats"):
                    step._tensor_stats = self.statistics.tensors()
            pipeline.save_pretrained(folder)


class _Scales(Normaliser):
    """The statistics by which lerobot's processors normalise, as buffers: they are stored and published.

    found: {feature: {statistic: numbers}} of a folder; without any they are fitted. names: {the policy's: the robot's}.
    is_needed: no action is right until they are; random weights have none that is.
    """

    fitted: Tensor

    def __init__(
        self, config: Any, found: Mapping[str, Mapping[str, Tensor]], names: Mapping[str, str], *, is_needed: bool
    ) -> None:
        super().__init__()
        self.register_buffer("fitted", torch.tensor(bool(found) or not is_needed))
        self._names, self.is_given, self._places = names, bool(found), list[tuple[str, str, str]]()
        for feature, about in {**config.input_features, **config.output_features}.items():
            mode = config.normalization_mapping.get(about.type.value)
            shape = (about.shape[0], 1, 1) if about.type.value == "VISUAL" else tuple(about.shape)
            if (how := getattr(mode, "value", "IDENTITY")) not in READ:
                raise ConfigError(
                    f"policy: {feature} is normalised by {how}, which is not read here: use another policy"
                )
            for kind in READ[how]:
                name = f"{feature}/{kind}".replace(".", "/")
                value = torch.full(shape, PLAIN[kind])
                if about.type.value == "VISUAL" and kind in ("mean", "std") and shape[0] == 3:
                    value = torch.tensor(IMAGE_MEAN if kind == "mean" else IMAGE_STD).view(shape)
                if found:
                    value = _shaped(found.get(feature, {}).get(kind), torch.full(shape, PLAIN[kind]), feature)
                self.register_buffer(name, value)
                self._places.append((feature, kind, name))

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Return {feature: {statistic: numbers}}."""
        tensors: dict[str, dict[str, Tensor]] = {}
        for feature, kind, name in self._places:
            tensors.setdefault(feature, {})[kind] = self.get_buffer(name)
        return tensors

    @property
    def said(self) -> str:
        """Whose statistics these are, in words."""
        if not self.is_given:
            return "its statistics are fitted to this run's data"
        told = (f"{feature} {kind} {_short(self.get_buffer(name))}" for feature, kind, name in self._places)
        return f"it normalises by its folder's statistics: {'; '.join(told)}"

    def set_statistics(self, statistics: Statistics) -> None:
        if self.is_given:
            log.info("the policy keeps the statistics that it was trained with")
            return
        for feature, kind, name in self._places:
            ours = self._names.get(feature, feature)
            found = statistics[OURS.get(kind, kind)].get(ours)
            if found is None:  # an image
                continue
            buffer = self.get_buffer(name)
            buffer.copy_(torch.as_tensor(found).reshape(buffer.shape))
            if kind == "std":
                buffer[buffer < SMALLEST_STD] = 1
        self.fitted.fill_(True)


class _Shapes(TorchFunctionMode):
    """Tensors without values tell none: what lerobot asks of them is 0."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return 0.0 if function is Tensor.item else function(*args, **(kwargs or {}))


@contextmanager
def _seeded(seed: Tensor, device: torch.device) -> Iterator[None]:
    """Draw torch's global random numbers from this seed [] int64, and leave them as they were."""
    if isinstance(seed, FakeTensor):
        with _Shapes():
            yield
        return
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(int(seed))
        yield


def _drawn(weight: Tensor) -> Tensor:
    """Draw B rows in proportion to their weights [B], evenly spread: equal weights give every row once."""
    share = weight.double().cumsum(0) / weight.double().sum().clamp_min(1e-300)
    middle = (torch.arange(len(weight), device=weight.device, dtype=torch.float64) + 0.5) / len(weight)
    return torch.searchsorted(share, middle).clamp_max(len(weight) - 1)


def _padded(batch: Batch) -> Tensor:
    """Return the actions [B, H, A], the last valid one in place of those behind the end."""
    steps = torch.arange(batch.action.shape[1], device=batch.length.device)
    last = torch.minimum(steps, batch.length.unsqueeze(1) - 1).clamp_min(0)  # [B, H]; rows of zeros have no length
    return batch.action.gather(1, last.unsqueeze(-1).expand_as(batch.action))


def _shaped(value: Tensor | None, plain: Tensor, feature: str) -> Tensor:
    if value is None:
        return plain
    if value.numel() != plain.numel():
        raise ConfigError(
            f"policy.path: the statistics of {feature} have {value.numel()} numbers, and the robot {plain.numel()}: "
            "delete the processors' files, so that they are fitted here"
        )
    return value.float().reshape(plain.shape)


def _short(values: Tensor) -> str:
    return "[" + ", ".join(f"{value:.3g}" for value in values.flatten().tolist()) + "]"


def _arguments(function: Any) -> Mapping[str, Any]:
    return inspect.signature(function).parameters
