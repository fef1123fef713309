"""Converts a gymnasium task's observations to those of a Spec, and a policy's actions to what the task takes."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from serl_client.env import Observation
from serl_client.errors import ConfigError
from serl_client.spec import Array, Feature

Path = tuple[str, ...]  # the keys of an observation, from the outermost Dict inwards


class Observations:
    """Reads the observations of a task as `features` say.

    A Box becomes `observation.state`, flattened to float32; each of a Dict becomes `observation.<key>`, with a dot for
    a Dict in a Dict. Discrete, MultiDiscrete and MultiBinary become vectors of 0 and 1, a choice one-hot. An image,
    uint8 [height, width, channel], becomes `observation.images.<key>` (`camera` without a key).

    task: its name, for errors. Raises ConfigError for another space, and for two that get the same name.
    """

    def __init__(self, task: str, space: Any) -> None:
        self._leaves = _named(dict(_leaves(task, space, ())))
        self.features = {name: _feature(leaf) for name, (_, leaf) in self._leaves.items()}

    def read(self, raw: Any) -> Observation:
        """Return an observation as the task gave it, in arrays of its own."""
        found: Observation = {}
        for name, (path, leaf) in self._leaves.items():
            value, feature = _at(raw, path), self.features[name]
            if not hasattr(leaf, "high"):
                from gymnasium.spaces import flatten

                value = flatten(leaf, value)
            found[name] = np.array(value, feature.dtype).reshape(feature.shape)
        return found


class Actions:
    """Turns actions [A] of a policy into what a task's action space takes. `feature` describes them.

    Box of floats: the action is clipped to its bounds, in place of infinite ones to `scale`, a number or one for each
        entry.
    Discrete: one-hot; the largest entry is taken, and is what was executed (Feature.one_hot).
    MultiDiscrete: one-hot groups, one beside the other, of each of which the largest entry is taken; to an algorithm
        they are numbers from 0 to 1. MultiBinary: numbers from 0 to 1, of which those above 1/2 are taken as 1.

    names: of the entries. neutral: see Feature. Raises ConfigError for another space, and for what does not fit it.
    """

    def __init__(
        self, task: str, space: Any, *, names: Sequence[str] = (), neutral: Sequence[float] | None = None,
        scale: float | Sequence[float] | None = None,
    ) -> None:  # fmt: skip
        from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete

        is_box = isinstance(space, Box) and np.issubdtype(space.dtype, np.floating)
        if not is_box and not isinstance(space, Discrete | MultiDiscrete | MultiBinary):
            kind = space.dtype if isinstance(space, Box) else type(space).__name__
            known = "only a Box of floats fits, or Discrete, MultiDiscrete and MultiBinary"
            raise ConfigError(f"task.env_id={task} takes actions of {kind}; {known}")
        self.is_choice = not is_box
        self._space: Any = space
        self._groups: list[int] = []
        if isinstance(space, Discrete | MultiDiscrete):
            self._groups = [int(n) for n in np.ravel(space.n if isinstance(space, Discrete) else space.nvec)]
        size = sum(self._groups) or math.prod(space.shape or ())
        for what, said in (("names", names or None), ("numbers of the neutral action", neutral)):
            if said is not None and len(said) != size:
                raise ConfigError(f"{task} takes actions of {size} entries: give as many {what}")
        low, high = np.zeros(size), np.ones(size)
        if is_box:
            low, high = _bounds(task, space, scale)
        self.feature = Feature(
            (size,), names=tuple(names), low=low, high=high, one_hot=isinstance(space, Discrete),
            neutral=None if neutral is None else np.array(neutral),
        )  # fmt: skip

    @property
    def told(self) -> str:
        """Return how a choice is taken, in words."""
        size = self.feature.shape[0]
        if not self._groups:
            return f"the policy gives {size} numbers from 0 to 1, and each above 1/2 counts as 1"
        several = f", in groups of {', '.join(map(str, self._groups))}" * (len(self._groups) > 1)
        return f"the policy gives {size} numbers{several}; the largest{' of each' * bool(several)} is chosen"

    def executable(self, action: Array) -> Array:
        """Return the action [A] that is executed where this one is asked for."""
        if self._groups:
            groups = np.split(action, np.cumsum(self._groups)[:-1])
            return np.concatenate([np.eye(len(group), dtype=action.dtype)[group.argmax()] for group in groups])
        if self.is_choice:
            return (action > 0.5).astype(action.dtype)
        return np.clip(action, self.feature.low, self.feature.high)

    def taken(self, executed: Array) -> Any:
        """Return an executed action [A] as the task takes it."""
        if not self._groups:
            return executed.astype(self._space.dtype).reshape(self._space.shape)
        groups = np.split(executed, np.cumsum(self._groups)[:-1])
        chosen = np.array([group.argmax() for group in groups], self._space.dtype).reshape(self._space.shape)
        return self._space.start + chosen[()]


def _bounds(task: str, space: Any, scale: float | Sequence[float] | None) -> tuple[Array, Array]:
    """Return the bounds [A] of a Box of actions, with `scale` in place of infinite ones."""
    low, high = space.low.reshape(-1), space.high.reshape(-1)
    if np.isfinite([low, high]).all():
        return low, high
    if scale is None:
        raise ConfigError(f"{task} takes actions without bounds: say how large they are, as in task.env.scale=1.0")
    try:
        scales = np.broadcast_to(np.array(scale, float), low.shape)
    except ValueError:
        raise ConfigError(f"{task} takes {low.size} numbers: give task.env.scale one, or as many") from None
    low, high = np.where(np.isfinite(low), low, -scales), np.where(np.isfinite(high), high, scales)
    if not (np.isfinite(scales) & (low < high)).all():
        raise ConfigError(f"task.env.scale={scale} makes no range of actions: {low} to {high}")
    return low, high


def _leaves(task: str, space: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete

    if isinstance(space, Dict):
        for name, below in space.spaces.items():
            yield from _leaves(task, below, (*path, name))
    elif isinstance(space, Box | Discrete | MultiDiscrete | MultiBinary):
        yield path, space
    else:
        kinds = "Box, Discrete, MultiDiscrete and MultiBinary fit, and a Dict of them"
        raise ConfigError(f"task.env_id={task} sees a {type(space).__name__} space; {kinds}")


def _is_image(leaf: Any) -> bool:
    return leaf.dtype == np.uint8 and len(leaf.shape) == 3 and hasattr(leaf, "high")


def _named(leaves: Mapping[Path, Any]) -> dict[str, tuple[Path, Any]]:
    """Return {name of the observation: (its path, its space)}. An image is called by its last key; where two share
    that, by all."""
    last = Counter(path[-1:] for path, leaf in leaves.items() if _is_image(leaf))
    found: dict[str, tuple[Path, Any]] = {}
    for path, leaf in leaves.items():
        if _is_image(leaf):
            name = f"observation.images.{'_'.join(path[-1:] if last[path[-1:]] == 1 else path) or 'camera'}"
        else:
            name = f"observation.{'.'.join(path) or 'state'}"
        if name in found:
            one, other = ".".join(found[name][0]), ".".join(path)
            raise ConfigError(f"{one} and {other} of the task would both be {name}: give one another name")
        found[name] = path, leaf
    return found


def _at(raw: Any, path: Path) -> Any:
    for name in path:
        raw = raw[name]
    return raw


def _feature(leaf: Any) -> Feature:
    from gymnasium.spaces import flatdim

    if not _is_image(leaf):
        return Feature((flatdim(leaf),))
    if leaf.shape[2] not in (1, 3, 4):
        raise ConfigError(
            f"an image should be [height, width, channel], with 1, 3 or 4 channels, not {list(leaf.shape)}"
        )
    return Feature(leaf.shape, "uint8")
