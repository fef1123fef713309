"""Asks a pretrained reward model of lerobot (0.6: reward_classifier, Robometer, TOPReward) what images show.

Such a model was trained elsewhere, on other robots' videos, or on none. What it says is no probability of success on
this robot yet; algorithms/judge.py makes one of it. Its processors and its forward pass are lerobot's own.
"""

import dataclasses
import importlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import safetensors
import torch
from serl_client.errors import ConfigError
from serl_client.spec import IMAGES, Spec
from serl_client.words import nearest
from torch import Tensor

from serl_launcher.networks.hollow import apart, is_hollow
from serl_launcher.policies.lerobot_files import described

CLASSIFIER, ROBOMETER, TOPREWARD = "reward_classifier", "robometer", "topreward"
TYPES = (CLASSIFIER, ROBOMETER, TOPREWARD)
PROCESSOR = "classifier_preprocessor.json"  # with the statistics of the classifier's images
LONGEST = 300  # characters that are told of an error of lerobot
LEAST = 1e-6  # of a probability, and of 1 minus it


class RewardModel(ABC):
    """Says how much the images of an episode look like success, in any measure that grows with it.

    It is no module: its weights are neither trained, kept in checkpoints nor published. Each process builds its own.
    """

    inputs: Sequence[str]  # names of the images that it sees
    frames: int  # K, how many of an episode it is shown, the newest last; 1: the newest alone

    @abstractmethod
    def score(self, images: Mapping[str, Tensor], task: Sequence[str]) -> Tensor:
        """Return numbers, float32 [B] on the CPU, for images {name: uint8 [B, K, H, W, 3]} and B tasks in words.

        Of a probability these are its log odds, so that a calibration can scale them.
        """


class LeRobotReward(RewardModel):
    """A reward model of lerobot.

    path: folder of a pretrained one: config.json, and model.safetensors where the model has weights of its own.
    type: one of TYPES, where there is no folder.
    options: fields of lerobot's config that differ from the folder's, or from lerobot's default; None: none.
    rename: {the robot's name of a camera's images: the model's}; what is not in it goes by its own name.
    frames: as RewardModel; a reward_classifier is shown one.
    Raises ConfigError for a lerobot without reward models, for a folder or option that it does not take, and for a
    camera that the robot lacks.
    """

    def __init__(
        self, spec: Spec, *, path: str | None, type: str, options: Mapping[str, Any] | None,
        rename: Mapping[str, str] | None, frames: int,
    ) -> None:  # fmt: skip
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        folder = None if path is None else Path(path).expanduser()
        said = json.dumps(options or {}, default=_plain, sort_keys=True)
        self._type, config = _described(folder, type, said)
        self.frames = 1 if self._type == CLASSIFIER else frames
        ours: dict[str, str] = {theirs: name for name, theirs in (rename or {}).items()}
        theirs: list[str] = [*config.input_features] if self._type == CLASSIFIER else [config.image_key]
        self._names: dict[str, str] = {ours.get(name, name): name for name in theirs}
        for name, own in self._names.items():
            if name not in spec.images:
                there = ", ".join(spec.images) or "no camera"
                raise ConfigError(
                    f"algo.model: this {self._type} sees {own}, and the robot has {there}: say which one "
                    f"it is, as in 'algo.model.rename={{{next(iter(spec.images), IMAGES)}: {own}}}'"
                )
        self.inputs = tuple(self._names)
        if not is_hollow():  # while memory is counted nothing has values
            self._built = _built(folder, self._type, said)

    @torch.no_grad()
    def score(self, images: Mapping[str, Tensor], task: Sequence[str]) -> Tensor:
        model, pre = self._built.on(next(iter(images.values())).device)
        seen = {theirs: images[ours].movedim(-1, 2) for ours, theirs in self._names.items()}
        if self._type == CLASSIFIER:
            given = pre({name: value[:, -1].float() / 255 for name, value in seen.items()})
            return model.predict([given[name] for name in seen]).logits.float().cpu()
        said = model.compute_reward(pre({**seen, "task": list(task)})).float().cpu()
        return torch.logit(said.exp() if self._type == TOPREWARD else said, LEAST)


class _Built:
    """Lerobot's model and preprocessor, wherever they are asked."""

    def __init__(self, folder: Path | None, kind: str, config: Any) -> None:
        self._folder, self._kind, self._config = folder, kind, config
        if folder is not None or kind != CLASSIFIER:
            config.pretrained_path = None if folder is None else str(folder)
        try:
            self._model = importlib.import_module("lerobot.rewards").make_reward_model(config)
            self._model.eval().requires_grad_(False)
            self._check()
            self._pre, self._device = self._processor(), torch.device("cpu")
        except ConfigError:
            raise
        except Exception as error:  # lerobot and transformers have many of their own
            raise _refused(kind, error) from None

    def on(self, device: torch.device) -> tuple[Any, Any]:
        """Return both, on this device from now on."""
        if device != self._device:
            self._device, self._config.device = device, str(device)
            self._model.to(device)
            self._pre = self._processor()
        return self._model, self._pre

    def _check(self) -> None:
        """Raise ConfigError where the folder lacks a weight: lerobot leaves it random. Shared ones are there once."""
        file = self._folder and self._folder / "model.safetensors"
        if self._kind == TOPREWARD or not file:
            return
        with safetensors.safe_open(file, "pt") as there:
            names, state = set(there.keys()), self._model.state_dict()
        known = {tensor.data_ptr() for name, tensor in state.items() if name in names}
        lacking = [name for name, tensor in state.items() if name not in names and tensor.data_ptr() not in known]
        if lacking:
            raise ConfigError(f"algo.model: {file} lacks {min(lacking)}: bring a whole folder")

    def _processor(self) -> Any:
        """Build lerobot's preprocessor: of a classifier the folder's, which has the statistics."""
        if self._kind == CLASSIFIER and self._folder is not None and (self._folder / PROCESSOR).is_file():
            pipeline = importlib.import_module("lerobot.processor").PolicyProcessorPipeline
            device = {"device_processor": {"device": self._config.device}}
            return pipeline.from_pretrained(self._folder, PROCESSOR, overrides=device)
        return importlib.import_module("lerobot.rewards").make_reward_pre_post_processors(self._config)[0]


@lru_cache(maxsize=2)
@apart
def _built(folder: Path | None, kind: str, options: str) -> _Built:
    """Build a model once in this process."""
    return _Built(folder, kind, _described(folder, kind, options)[1])


def _plain(value: Any) -> Any:
    """Return a list or map of a config as that of JSON."""
    return dict(value) if isinstance(value, Mapping) else list(value)


def _described(folder: Path | None, kind: str, words: str) -> tuple[str, Any]:
    """Return the model's type, and lerobot's config of it. words: the options, as JSON."""
    options: dict[str, Any] = json.loads(words)
    try:
        draccus = importlib.import_module("draccus")
        importlib.import_module("lerobot.rewards")  # registers the types
        configs = importlib.import_module("lerobot.configs.rewards")
    except ImportError:
        raise ConfigError(
            "algo.model: reward models came with lerobot 0.6, which needs Python 3.12: "
            "`. examples/install.sh --python 3.12 --extra learner --extra data --extra vla`"
        ) from None
    kind, fields = described(folder, kind, TYPES, where="algo.model", what="reward model")
    kind_of = configs.RewardModelConfig.get_choice_class(kind)
    names = {field.name for field in dataclasses.fields(kind_of)}
    if strange := sorted(options.keys() - names):
        near = nearest(strange[0], names)
        raise ConfigError(f"algo.model.options: {kind} has no field {strange[0]!r}: use those of lerobot; {near}")
    forced: dict[str, Any] = {"device": "cpu"}
    if kind != CLASSIFIER:
        forced["max_frames"] = None  # with a number it drops the first ones
    if kind == TOPREWARD:
        forced["success_threshold"] = float("-inf")  # with another one it answers 0 or 1
    try:
        config = draccus.decode(kind_of, {k: v for k, v in fields.items() if k in names} | {**options, **forced})
    except Exception as error:
        raise _refused(kind, error) from None
    if getattr(config, "num_classes", 2) != 2:
        raise ConfigError(f"algo.model: this {kind} tells {config.num_classes} classes, not success: take one of 2")
    return kind, config


def _refused(kind: str, error: Exception) -> ConfigError:
    text = " ".join(str(error).split())[:LONGEST]
    return ConfigError(
        f"algo.model: lerobot cannot build {kind} ({type(error).__name__}: {text}): give a whole folder, and those "
        "that its config names as algo.model.options, such as {base_model_id: FOLDER}, {vlm_name: FOLDER} or "
        "{model_name: FOLDER}"
    )
