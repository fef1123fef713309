"""Turns options of a yaml into lerobot's own configuration of a robot, a teleoperator or a camera."""

import importlib
import importlib.metadata
import pkgutil
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from serl_client.errors import ConfigError

PLUGINS = {"robots": "robot", "teleoperators": "teleoperator", "cameras": "camera"}


def configuration(
    registry: Any, room: str, where: str, options: Mapping[str, Any], *,
    defaults: Mapping[str, Any] | None = None,
) -> Any:  # fmt: skip
    """Return the configuration of the type that `options` name, of one of lerobot's registries.

    A type is known once the module that defines it was imported: those of lerobot.<room> are tried in turn, then the
    plugins, which are distributions called lerobot_robot_*, lerobot_teleoperator_* or lerobot_camera_*.
    defaults: options that the type gets, if it knows them and `options` do not say them.
    Raises ConfigError for an unknown type, with all that are known, and for options that it does not take.
    """
    kind, failed = str(options.get("type", "")), {}
    for module in pkgutil.iter_modules(importlib.import_module(f"lerobot.{room}").__path__):
        if kind in registry.get_known_choices():
            break
        try:
            importlib.import_module(f"lerobot.{room}.{module.name}")
        except Exception as error:  # one device's module may need what is not installed
            failed[module.name] = f"{type(error).__name__}: {error}"
    if kind not in registry.get_known_choices():
        _import_plugins(PLUGINS[room], failed)
    if kind not in registry.get_known_choices():
        choices = ", ".join(sorted(registry.get_known_choices()))
        more = "".join(f"; {name} cannot be imported ({why})" for name, why in failed.items())
        raise ConfigError(f"{where}.type={kind or 'null'} is unknown to lerobot: use one of {choices}{more}")
    takes = {field.name for field in fields(registry.get_choice_class(kind))}
    given = {name: value for name, value in (defaults or {}).items() if name in takes} | dict(options)
    try:
        return importlib.import_module("draccus").decode(registry, given)
    except Exception as error:  # draccus has several of its own
        said = " ".join(str(error).split())
        raise ConfigError(f"{where}: lerobot's {kind} does not take this: {said}; use {sorted(takes)}") from None


def _import_plugins(kind: str, failed: dict[str, str]) -> None:
    """Import the plugins of one kind alone: those of robots import torch, which an actor has no need of."""
    begin = f"lerobot_{kind}_"
    for distribution in importlib.metadata.distributions():
        name = str(distribution.metadata["Name"]).replace("-", "_")
        if name.startswith(begin):
            try:
                importlib.import_module(f"lerobot_{name.removeprefix('lerobot_')}")
            except Exception as error:
                failed[name] = f"{type(error).__name__}: {error}"
