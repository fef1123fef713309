"""The robot side of Retake; installs without torch."""

from serl_client.episode import Outcome, Segment, Stamp
from serl_client.errors import ConfigError, RetakeError, TrainerError
from serl_client.spec import Array, Feature, Spec

__all__ = ["Array", "ConfigError", "Feature", "Outcome", "RetakeError", "Segment", "Spec", "Stamp", "TrainerError"]
