"""Turns a verdict that came later (success or failure) into the reward of an episode's last step. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from serl_client.errors import ConfigError
from serl_client.limits import LIMIT
from serl_client.words import check_choice

from serl_launcher.config import saved
from serl_launcher.replay.views import EpisodeInfo

WHERE = "task.verdict"
MODEL = "reward model"  # `judged_by` of what a judge says of stored episodes (tools/reward.py)
LATER = ("operator", MODEL)  # whose verdicts come after the steps, and are a reward


@dataclass(frozen=True, slots=True)
class VerdictRewards:
    """The rewards that the verdict of an operator, or of a judge of stored episodes, gives the last step of an episode,
    which becomes terminal by it.

    What is stored stays as it is. Who reads episodes for training, a report or a dataset applies this. A verdict counts
    once the episode is closed. Of an episode that was cut in several parts, it is about the last part.
    """

    success: float = 1.0
    failure: float = 0.0

    def last_of(self, episode: EpisodeInfo) -> float | None:
        """Return the reward of the last step by a later verdict. None: what is stored counts."""
        if episode.judged_by not in LATER or episode.discard or not episode.closed or episode.continued:
            return None
        if episode.success is None:
            return None
        return self.success if episode.success else self.failure

    def applied(self, episode: EpisodeInfo) -> EpisodeInfo:
        """Return an episode that the server reported, with the reward and the end that its operator gave it."""
        if (last := self.last_of(episode)) is None:
            return episode
        reward = episode.reward - episode.last_reward + last
        return episode._replace(reward=reward, last_reward=last, terminated=True, truncated=False)


def rewards_of(config: DictConfig) -> VerdictRewards:
    """Return the rewards that a run's config gives; what it does not name has its default.

    Raises ConfigError for an unknown verdict, and for a reward that is no number within LIMIT, as for every reward.
    """
    try:
        said: Any = OmegaConf.select(config, WHERE)
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"{WHERE} cannot be read: {str(error).splitlines()[0]}. Write it as {{success: 1.0, failure: 0.0}}"
        ) from None
    said = {} if said is None else said
    if not isinstance(said, Mapping):
        raise ConfigError(f"{WHERE}={said}: write the rewards of both verdicts, as in {{success: 1.0, failure: 0.0}}")
    names = [field.name for field in fields(VerdictRewards)]
    return VerdictRewards(**{check_choice(name, names, "verdict", WHERE): _reward(name, said[name]) for name in said})


def rewards_of_run(run_dir: Path) -> VerdictRewards:
    """Return the rewards with which a learner was last started on this run folder."""
    return rewards_of(saved(run_dir))


def _reward(name: str, value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(value) <= LIMIT:  # NaN is not <= anything
        raise ConfigError(f"{WHERE}.{name}={value}: a reward is a number from {-LIMIT:.0f} to {LIMIT:.0f}, such as 1.0")
    return float(value)
