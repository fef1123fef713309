"""The robot side of Retake; installs without torch."""

from serl_client.client import TrainerClient
from serl_client.controller import RemotePolicy
from serl_client.env import Env, Step
from serl_client.episode import Outcome, Segment, Stamp
from serl_client.errors import ConfigError, RetakeError, TrainerError
from serl_client.runner import run_actor
from serl_client.spec import Array, Feature, Spec

__all__ = [
    "Array", "ConfigError", "Env", "Feature", "Outcome", "RemotePolicy", "RetakeError", "Segment", "Spec", "Stamp",
    "Step", "TrainerClient", "TrainerError", "run_actor",
]  # fmt: skip
