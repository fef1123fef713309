"""Adds columns of an algorithm (`extras`) to each row: it gives them with its actions (`Decision`)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from serl_client.errors import ConfigError
from serl_client.spec import UNSAID, Feature, Spec, difference

ACTION = "action"  # a column that is like the action
ONE = np.ones(1, np.float32)
ANY = Spec({"observation.any": Feature((1,))}, Feature((1,), low=-ONE, high=ONE), fps=1.0)  # robot: to try extras on


def with_extras(spec: Spec, extras: Mapping[str, Any]) -> Spec:
    """Add `extras` of an algorithm's yaml to a robot's Spec: {name: `action`, or {shape, dtype}}.

    Raises ConfigError for what describes no column, and for one that the robot has too, of another shape or dtype.
    """
    added = {name: _feature(name, kind, spec) for name, kind in extras.items()}
    for name in added.keys() & spec.extras.keys():
        if difference({name: added[name].to_dict()}, {name: spec.extras[name].to_dict()}, UNSAID):
            raise ConfigError(
                f"robot and algorithm both give the column {name}, and each another one: give one another name"
            )
    return replace(spec, extras={**added, **spec.extras})


def _feature(name: str, kind: Any, spec: Spec) -> Feature:
    if kind == ACTION:
        return Feature(spec.action.shape, spec.action.dtype)
    try:
        return Feature(**kind)
    except (TypeError, ValueError):
        raise ConfigError(f"extras.{name}={kind}: say {ACTION}, or the shape and dtype of the column") from None
