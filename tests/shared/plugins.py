"""Throw-away plugins of lerobot, as its users publish them: a robot, a leader arm and a camera."""

ROBOT = """
from dataclasses import dataclass
from lerobot.robots import Robot, RobotConfig

NAMES = ("base.pos", "hand.pos")


@RobotConfig.register_subclass("x_robot")
@dataclass
class XRobotConfig(RobotConfig):
    serial: str = ""
    most: float = 100.0  # its own limit, which it says in what it returns


class XRobot(Robot):
    config_class, name = XRobotConfig, "x_robot"

    def __init__(self, config):
        super().__init__(config)
        self.config, self.at, self.is_open = config, dict.fromkeys(NAMES, 0.0), False

    observation_features = property(lambda self: {**dict.fromkeys(NAMES, float), "load": float, "eye": (4, 6, 3)})
    action_features = property(lambda self: dict.fromkeys(NAMES, float))
    is_connected = property(lambda self: self.is_open)
    is_calibrated = property(lambda self: self.config.serial != "new")

    def connect(self, calibrate=True):
        assert not calibrate, "it would ask questions"
        self.is_open = True

    calibrate = configure = lambda self: None

    def get_observation(self):
        import numpy as np
        return {**self.at, "load": 0.5, "eye": np.full((4, 6, 3), 7, np.uint8)}

    def send_action(self, action):
        self.at = {name: min(value, self.config.most) for name, value in action.items()}
        return dict(self.at)

    def disconnect(self):
        self.is_open = False
"""
TELEOPERATOR = """
import time
from dataclasses import dataclass

from lerobot.teleoperators import Teleoperator, TeleoperatorConfig


@TeleoperatorConfig.register_subclass("x_leader")
@dataclass
class XLeaderConfig(TeleoperatorConfig):
    names: str = "base.pos hand.pos"


class XLeader(Teleoperator):
    config_class, name = XLeaderConfig, "x_leader"

    def __init__(self, config):
        super().__init__(config)
        self.config, self.is_open = config, False

    action_features = property(lambda self: dict.fromkeys(self.config.names.split(), float))
    feedback_features = property(lambda self: {})
    is_connected = property(lambda self: self.is_open)
    is_calibrated = property(lambda self: True)

    def connect(self, calibrate=True):
        self.is_open = True

    calibrate = configure = lambda self: None
    send_feedback = lambda self, feedback: None

    def get_action(self):
        return dict.fromkeys(self.action_features, 20.0 + 3.0 * (time.monotonic() % 2.0 > 1.0))  # somebody holds it

    def disconnect(self):
        self.is_open = False
"""
CAMERA = """
import time
from dataclasses import dataclass

import numpy as np
from lerobot.cameras import Camera, CameraConfig


@CameraConfig.register_subclass("x_camera")
@dataclass
class XCameraConfig(CameraConfig):
    bright: int = 200


class XCamera(Camera):
    def __init__(self, config):
        super().__init__(config)
        self.config, self.random, self.is_open = config, np.random.default_rng(0), False

    is_connected = property(lambda self: self.is_open)

    @staticmethod
    def find_cameras():
        return []

    def connect(self, warmup=True):
        self.is_open = True

    def read(self):
        time.sleep(1 / (self.fps or 30))
        return self.random.integers(0, self.config.bright, (self.height or 48, self.width or 64, 3), np.uint8)

    def async_read(self, timeout_ms=200):
        return self.read()

    def disconnect(self):
        self.is_open = False
"""


def publish(folder):
    """Put the packages into a folder, as an installation leaves them; it belongs on PYTHONPATH."""
    for name, text in (("robot", ROBOT), ("teleoperator", TELEOPERATOR), ("camera", CAMERA)):
        package, metadata = folder / f"lerobot_{name}_x", folder / f"lerobot_{name}_x-1.0.dist-info"
        package.mkdir(parents=True)
        metadata.mkdir()
        (package / "__init__.py").write_text(text)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: lerobot_{name}_x\nVersion: 1.0\n")
    return folder
