"""What the checks share: the run that is about to start, and what a check says of it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from serl_client.identity import named
from serl_client.keys import Key
from serl_client.messages import Welcome
from serl_client.spec import Spec

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "config"


@dataclass(frozen=True, slots=True)
class Finding:
    """`state` is ok, WARN (the run goes on, less well) or FAIL (it does not); `advice` is what to do about it."""

    state: str
    text: str
    advice: str = ""


@dataclass
class Run:
    """The side of a run that is to start here, as examples/train.py would compose it, and what earlier checks found.

    `move`: a real robot may be moved. `seconds`: how long cameras and control are watched.
    """

    side: str  # learner or actor
    config: DictConfig
    move: bool = False
    seconds: float = 3.0
    env: Any = None  # the open serl_client.runner.Env
    spec: Spec | None = None
    key: Key | None = None
    welcome: Welcome | None = None

    @property
    def folder(self) -> Path:
        """Where this side writes."""
        return self.actors.parent if self.side == "learner" else self.actors / self.name

    @property
    def actors(self) -> Path:
        """Where the actors' folders are."""
        return Path(str(self.config.run_dir)).resolve() / "actors"

    @property
    def name(self) -> str:
        """The actor's."""
        return named(str(self.config.name), self.key, self.actors)

    @property
    def rate(self) -> float:
        """Bytes of one actor's rows per second; 0 before the Spec is known."""
        if self.spec is None:
            return 0.0
        features = (*self.spec.observation.values(), *self.spec.extras.values(), self.spec.action)
        return self.spec.fps * sum(feature.nbytes for feature in features)


Check = Callable[[Run], Iterator[Finding]]


def said(size: float) -> str:
    """Bytes, for a person."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
