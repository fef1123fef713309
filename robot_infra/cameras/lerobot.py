"""Opens real cameras of any make through lerobot and its plugins: USB webcams (OpenCV), RealSense, and others.

Source: lerobot.cameras, whose configurations name the options of each type.
"""

import importlib
from collections.abc import Mapping
from functools import partial
from typing import Any

from serl_client.errors import ConfigError
from serl_client.spec import Array

from robot_infra.cameras.threaded import ThreadedCamera
from robot_infra.drivers.lerobot_options import configuration

TIMEOUT = 2000.0  # milliseconds that a camera may take for an image before it counts as failed
OURS = ("crop", "size")


def open_camera(name: str, options: Mapping[str, Any]) -> ThreadedCamera:
    """Open a camera: `type` and lerobot's options of it, besides `crop` and `size` (ThreadedCamera).

    Raises ConfigError for a type or an option that lerobot does not know, and for a camera that gives no image.
    """
    config = camera_config(name, {key: value for key, value in options.items() if key not in OURS})
    return ThreadedCamera(name, partial(_Source, config), **{key: options[key] for key in OURS if key in options})


def camera_config(name: str, options: Mapping[str, Any]) -> Any:
    """Return lerobot's configuration of a camera."""
    try:
        registry = importlib.import_module("lerobot.cameras.configs").CameraConfig
    except ModuleNotFoundError as error:
        raise ConfigError(f"cameras need {error.name}: run `. examples/install.sh --extra robots`") from None
    return configuration(registry, "cameras", f"cameras.{name}", options)


class _Source:
    """One open camera of lerobot."""

    def __init__(self, config: Any) -> None:
        make = importlib.import_module("lerobot.cameras.utils").make_cameras_from_configs
        self._camera = make({"camera": config})["camera"]
        self._camera.connect()

    def read(self) -> Array:
        return self._camera.async_read(timeout_ms=TIMEOUT)

    def close(self) -> None:
        self._camera.disconnect()
