"""Builds an algorithm that begins with what another run has learned (`from`): weights and normalisers.

If the algorithm is the same, but for settings that may change, all its networks are taken. Else it is the policy alone,
as it acts: each copy that the algorithm makes of it (averages, references, encoders of critics) is a copy of these
weights, and every network normalises states as it does. Optimisers and random numbers begin anew.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from serl_client.errors import ConfigError
from serl_client.spec import Spec
from torch import nn

from serl_launcher.algorithms.base import Algorithm
from serl_launcher.networks.mlp import StateEncoder
from serl_launcher.training.checkpoint import newest_whole, read_state
from serl_launcher.training.resuming import check_taken, checkpoints_at, free_settings, kept_settings

log = logging.getLogger(__name__)

POLICIES = ("averaged.", "acts.policy.", "conditioned.policy.", "policy.")  # the first that an algorithm has is it


@dataclass(frozen=True)
class Origin:
    """What a run begins with: the algorithm's state of the checkpoint `path`, all of it (is_same) or the policy's."""

    path: Path
    state: Mapping[str, Any]
    is_same: bool

    def begun(self, make: Callable[..., Algorithm], spec: Spec) -> Algorithm:
        """Make the algorithm, with what is taken. make: a partial of its class, with a partial `policy`.

        Raises ConfigError if the networks have other shapes.
        """
        if self.is_same:
            algorithm = make(spec)
            self._load(algorithm, {**self.state, "_extra_state": algorithm.get_extra_state()})
            return algorithm
        encoders: list[StateEncoder] = []

        def begun(kind: Callable[..., nn.Module], *arguments: Any, **options: Any) -> nn.Module:
            policy = kind(*arguments, **options)
            self._load(policy, self._policy())
            encoders.extend(module for module in policy.modules() if isinstance(module, StateEncoder))
            return policy

        given = make.keywords["policy"]  # type: ignore[attr-defined]
        algorithm = make(spec, policy=partial(begun, given.func, **given.keywords))
        for module in algorithm.modules():
            if isinstance(module, StateEncoder) and encoders:
                module.load_state_dict(encoders[0].state_dict())
        return algorithm

    def _policy(self) -> dict[str, Any]:
        place = next((name for name in POLICIES if any(key.startswith(name) for key in self.state)), "")
        return {key.removeprefix(place): value for key, value in self.state.items() if place and key.startswith(place)}

    def _load(self, module: nn.Module, state: Mapping[str, Any]) -> None:
        try:
            module.load_state_dict(state)
        except RuntimeError as error:  # a headline, then a line for each kind of misfit
            why = "; ".join(line.strip() for line in str(error).splitlines()[1:4])
            raise ConfigError(
                f"from={self.path} has other networks than this run: {why}. Ask for what it has, or begin without it"
            ) from None


def origin(config: DictConfig, spec: Spec) -> Origin:
    """Read the newest whole checkpoint of what a run of this robot begins `from`; nothing there is changed.

    Raises ConfigError as `check_taken`, and if none is whole.
    """
    newest = newest_whole(checkpoints_at(config["from"]), set())
    if newest is None:
        raise ConfigError(f"from={config['from']}: no checkpoint is whole (see above): take another, or a backup of it")
    path, manifest = newest
    is_same = check_taken(path, manifest, kept_settings(config), lambda: free_settings(config), spec)
    what = "all networks and normalisers" if is_same else "the policy and its normalisers"
    log.info("begins with %s of %s, after %d updates; optimisers begin anew", what, path, manifest["updates"])
    return Origin(path, read_state(path)["algorithm"], is_same)
