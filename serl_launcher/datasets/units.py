"""Compares the units of datasets with those of their run, and turns percent of lerobot's arms into degrees.

lerobot measures a joint from the middle of its calibrated range: in degrees, or in percent of half the range. So the
calibration of the arm that was recorded tells how many degrees one percent of each joint is.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
from serl_client.episode import Segment
from serl_client.errors import ConfigError
from serl_client.spec import Array, Feature, Spec

from serl_launcher.datasets.reader import Dataset
from serl_launcher.datasets.robomimic import RobomimicFile
from serl_launcher.datasets.tables import reading
from serl_launcher.training.plan import ANGLES, Change, Plan, PlanSource

TURN = 4095  # steps of a turn, as lerobot counts those of the motors of SO-100, SO-101, Koch and LeKiwi
WHERE = "~/.cache/huggingface/lerobot/calibration/robots/TYPE/ID.json"


@dataclass(frozen=True, slots=True)
class Conversion:
    """Multiplies vectors of a dataset.

    factors: {feature: of each entry, [D]}; a feature without stays as it is. change: what was done to its rows before.
    """

    factors: Mapping[str, Array]
    change: Change = field(default_factory=Change)

    @property
    def mark(self) -> str:
        """The end of the ids of episodes that were changed and multiplied like this; empty for none."""
        told = json.dumps({name: self.factors[name].tolist() for name in sorted(self.factors)})
        is_changed = self.change != Change()
        change = {name: value for name, value in asdict(self.change).items() if value or name != "deltas"}  # it is new
        told += json.dumps(change, sort_keys=True) * is_changed
        word = "as" if is_changed else "deg"
        return f"-{word}{hashlib.sha256(told.encode()).hexdigest()[:8]}" if self.factors or is_changed else ""

    def converted(self, segment: Segment) -> Segment:
        action, observation = self._scaled("action", segment.action), segment.observation
        return replace(
            segment, action=action, observation={name: self._scaled(name, seen) for name, seen in observation.items()}
        )

    def _scaled(self, name: str, values: Array) -> Array:
        return (values * self.factors[name]).astype(values.dtype) if name in self.factors else values


def conversions(plan: Plan, datasets: Mapping[str, Dataset | RobomimicFile], spec: Spec) -> dict[str, Conversion]:
    """Return {source: its conversion} of a plan's datasets, which must fit the run's Spec but for their units.

    Raises ConfigError for a dataset whose unit is another one and cannot be converted, or is unsaid where the run, or
    another dataset, says one.
    """
    vectors = {**spec.observation, "action": spec.action}
    own = {name: _word(dataset.described(spec).values()) for name, dataset in datasets.items()}
    words = {name: word or plan.sources[name].units for name, word in own.items()}
    if not _word(vectors.values()) and len({*words.values()}) > 1:
        said = ", ".join(f"{name} {word or 'unsaid'}" for name, word in words.items())
        raise ConfigError(
            f"the datasets of this plan are not measured in the same unit ({said}): take those of one unit, and say "
            f"plan.sources.<source>.units={', '.join(ANGLES)} of each that does not say it"
        )
    found = {}
    for source, dataset in datasets.items():
        at, told, features = f"plan.sources.{source}", plan.sources[source], dataset.described(spec)
        factors = {n: _factors(at, told, dataset.folder, n, features[n], theirs) for n, theirs in vectors.items()}
        found[source] = Conversion({name: by for name, by in factors.items() if by is not None}, told.change)
        if told.calibration and not found[source].factors:
            raise ConfigError(
                f"{at}.calibration: nothing of {dataset.folder} is in percent where the run is in degrees, so there is "
                "nothing to convert: leave it out"
            )
    return found


def degrees_per_percent(name: str) -> dict[str, float]:
    """Return {entry, such as `elbow_flex.pos`: degrees} of an arm, of which this file is lerobot's calibration.

    Raises ConfigError if it is none, or of motors of which it does not tell the degrees.
    """
    path = Path(name).expanduser()
    with reading(path):
        motors = json.loads(path.read_text()).items()
        ends = {name: (motor["range_min"], motor["range_max"], motor["drive_mode"]) for name, motor in motors}
        for motor, (low, high, mode) in ends.items():
            if mode != 0 or not 0 <= low < high <= TURN:
                raise ConfigError(
                    f"{path}: {motor} is turned around, or does not count {TURN + 1} steps in a turn: take another file"
                )
        return {f"{motor}.pos": (high - low) / 200 * 360 / TURN for motor, (low, high, _) in ends.items()}


def _word(features: Iterable[Feature]) -> str:
    """Return what a plan calls the units of these features, empty if it has no word for them.

    Where entries in percent stand beside others, as lerobot's grippers do, the unit is that of the others.
    """
    units = {unit for feature in features for unit in feature.units}
    words = {word for word, unit in ANGLES.items() if unit in units}
    return " and ".join(sorted(words - {"percent"} or words))


def _factors(
    at: str, source: PlanSource, folder: Path | str, name: str, mine: Feature, theirs: Feature
) -> Array | None:
    """Return by what each entry of a feature is multiplied, [D]; None if it stays as it is. at: the source's name."""
    wanted = _word([theirs])
    is_asked, unit = bool(wanted and not mine.units), source.units
    if is_asked and unit is None:
        raise ConfigError(
            f"{folder} does not say what its {name} is measured in, and the run's is in {wanted}: find out, then "
            f"write {at}.units=degrees, percent or radians (lerobot-record: degrees since PR 2968)"
        )
    units = (ANGLES[unit],) * len(theirs.units) if is_asked and unit and unit != wanted else mine.units
    others = [i for i, (own, run) in enumerate(zip(units, theirs.units, strict=False)) if own != run]
    if not others:
        return None
    if any((units[i], theirs.units[i]) != ("percent", "deg") for i in others):
        raise ConfigError(
            f"{at}: the {name} of {folder} is in {unit if is_asked else [*units]}, the run's in {[*theirs.units]}, and "
            "only percent become degrees. Take another dataset, or begin another run whose task is in its unit "
            "(task=so101: task.env.options.robot.use_degrees)"
        )
    if source.calibration is None:
        raise ConfigError(
            f"{at}: the {name} of {folder} is in percent, the run's in {wanted}. To convert it, say {at}.calibration="
            f"FILE, lerobot's calibration of the arm when that was recorded ({WHERE}). Without that file, begin "
            "another run in percent (task=so101: task.env.options.robot.use_degrees=false)"
        )
    factors, degrees = np.ones(len(theirs.units)), degrees_per_percent(source.calibration)
    for i in others:
        entry = (theirs.names or mine.names or [str(i)] * (i + 1))[i]
        if entry not in degrees:
            known = ", ".join(degrees)
            raise ConfigError(
                f"{source.calibration} is of another arm, with {known}: give that of the arm whose {name} has {entry}"
            )
        factors[i] = degrees[entry]
    return factors
