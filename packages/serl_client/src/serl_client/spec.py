"""Describes a robot's observation and action spaces (Spec): names, shapes, dtypes, units, bounds, discrete choices."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from serl_client.errors import ConfigError, Refused
from serl_client.names import check_names

Array = NDArray[Any]
DTYPES = (
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "float32", "float64",
)  # fmt: skip
MAX_DIMENSIONS = 8
MAX_ROW = 64 << 20  # bytes of one feature in one row, because it is sent in one frame
MAX_RECORD = 63 << 20  # of record_bytes
MAX_FEATURES = 240  # each is an array of a record
MAX_SPEC = 512 << 10  # bytes of a Spec in a Hello
MAX_BOUNDS = 4096  # numbers in a bound, because they are sent in the header of a Hello
ROW = {  # columns of every row
    "reward": "float32", "intervened": "bool", "chunk_start": "bool", "time": "float64", "gap": "bool",
    "chunk_delay": "uint16",
}  # fmt: skip
IMAGES = "observation.images."
UNITS = ("rad", "deg", "m", "percent", "")  # of a vector's entries; "": none
CODECS = ({"name": "raw"},)  # how images travel; raw: as their numbers
UNSAID = (".units", ".low", ".high", ".neutral", ".codec.name")  # what a feature may leave out and still be the same


@dataclass(frozen=True, slots=True, eq=False)
class Feature:
    """Describes one named array of every row: its shape without time, its dtype and its bounds.

    names: of the entries; may be empty.
    low, high: bounds, required for the action; numbers are broadcast to the shape. Of an observation or an extra they
        are plausible limits: a value outside of them cannot be (limits.py).
    one_hot: of the action: it is a choice among N, whose entry is 1 and the others 0.
    units: of a vector's entries, of UNITS; one text is that of all entries; empty: unsaid.
    neutral: of the action: the one [A] at rest, within the bounds; None: unsaid, which means the middle of the bounds.
    codec: of an image: how it travels, of CODECS; None: unsaid, which means raw.

    Raises ConfigError for a dtype, a shape or names that cannot be stored, for a one_hot that is not float32 [N] with
    N >= 2 and the bounds 0 and 1, and for units, a neutral action or a codec that do not fit.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    names: tuple[str, ...] = ()
    low: Array | None = None
    high: Array | None = None
    one_hot: bool = False
    units: Sequence[str] = ()
    neutral: Array | None = None
    codec: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(size) for size in self.shape))
        object.__setattr__(self, "names", tuple(self.names))
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype {self.dtype!r} cannot be stored; use one of {', '.join(DTYPES)}")
        if len(self.shape) > MAX_DIMENSIONS or min(self.shape, default=1) < 1 or self.nbytes > MAX_ROW:
            raise ConfigError(
                f"the shape {self.shape} cannot be stored: at most {MAX_DIMENSIONS} sizes, each at least 1, and "
                f"{MAX_ROW >> 20} MiB in all"
            )
        check_names("a feature's entries", *self.names, error=ConfigError)
        if math.prod(self.shape) > MAX_BOUNDS and (self.low is not None or self.high is not None):
            raise ConfigError(f"a feature of the shape {self.shape} has no bounds: at most {MAX_BOUNDS} numbers have")
        for bound in ("low", "high", "neutral"):
            if (value := getattr(self, bound)) is not None:
                with np.errstate(over="ignore"):  # Spec refuses an infinite bound of the action
                    value = np.asarray(value, self.dtype)
                if np.isnan(value).any():  # it would differ from itself
                    raise ConfigError(f"{bound} of a feature holds numbers, not {value}")
                object.__setattr__(self, bound, np.broadcast_to(value, self.shape).copy())
        if self.one_hot is not False:
            self._check_choice()
        is_one = isinstance(self.units, str) and len(self.shape) == 1 and self.shape[0] <= MAX_BOUNDS
        object.__setattr__(self, "units", (self.units,) * self.shape[0] if is_one else tuple(self.units))
        self._check_meaning()

    def _check_choice(self) -> None:
        is_vector = self.one_hot is True and self.dtype == "float32" and len(self.shape) == 1 and self.shape[0] > 1
        if not (is_vector and np.all(self.low == 0) and np.all(self.high == 1)):
            raise ConfigError(
                f"a feature with one_hot is float32 [N] with N >= 2, low 0 and high 1, not {self.dtype} "
                f"{list(self.shape)} with one_hot={self.one_hot!r}, {self.low} and {self.high}"
            )

    def _check_meaning(self) -> None:
        known = all(unit in UNITS for unit in self.units)
        if self.units and not (known and self.shape == (len(self.units),)):
            raise ConfigError(
                f"units are said of a vector, one of {', '.join(map(repr, UNITS))} for each entry, not {self.units} of "
                f"the shape {list(self.shape)}"
            )
        if self.neutral is not None:
            if self.one_hot or self.low is None or self.high is None:
                raise ConfigError("only an action with bounds that is no choice has a neutral one")
            if not ((self.low <= self.neutral) & (self.neutral <= self.high)).all():
                raise ConfigError(
                    f"the neutral action {self.neutral} must be finite and within the bounds {self.low} and {self.high}"
                )
        is_image = self.dtype == "uint8" and len(self.shape) == 3
        if self.codec is not None and not (is_image and self.codec in CODECS):
            raise ConfigError(
                f"the codec {self.codec} of a {self.dtype} {list(self.shape)} is not known: only images, uint8 "
                f"[height, width, channel], have one, and it is one of {', '.join(map(str, CODECS))}"
            )

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def to_dict(self) -> dict[str, Any]:
        arrays = ("low", "high", "neutral")
        said = {name: value.tolist() for name in arrays if (value := getattr(self, name)) is not None}
        said |= {"one_hot": True} if self.one_hot else {}
        said |= {"units": list(self.units)} if self.units else {}
        said |= {"codec": dict(self.codec)} if self.codec else {}
        return {"shape": list(self.shape), "dtype": self.dtype, "names": list(self.names), **said}

    def check(self, name: str, array: Array, leading: tuple[int, ...] = ()) -> None:
        """Raise ValueError unless `array` is [*leading, *shape] of this dtype."""
        if array.shape != (*leading, *self.shape) or array.dtype != self.dtype:
            raise ValueError(
                f"{name} should be {self.dtype} {[*leading, *self.shape]}, not {array.dtype} {list(array.shape)}"
            )


@dataclass(frozen=True, slots=True, eq=False)
class Spec:
    """Describes everything that an actor records, by names, shapes, dtypes and bounds, and the steps per second.

    Observation keys are LeRobot's feature names (`observation.state`, `observation.images.cam_high`); images are
    uint8 [height, width, channel]. Rows have a fixed size. Raises ConfigError for an action without finite bounds.
    """

    observation: Mapping[str, Feature]
    action: Feature
    fps: float
    extras: Mapping[str, Feature] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.observation:
            raise ConfigError("a Spec needs at least one observation")
        names = [*self.observation, *self.extras]
        check_names("features", *names, error=ConfigError)
        if len(set(names)) < len(names) or not all(name.startswith("observation.") for name in self.observation):
            raise ConfigError(f"observations are called observation.<name>, and no name comes twice: {names}")
        if reserved := {"action", *ROW} & set(names):
            raise ConfigError(f"every row has {sorted(reserved)} already: give the extras other names")
        if len(self.action.shape) != 1 or self.action.low is None or self.action.high is None:
            raise ConfigError("the action must be one vector with the bounds low and high")
        if not (np.isfinite(self.action.low).all() and np.isfinite(self.action.high).all()):
            raise ConfigError("the action's bounds must be finite: they scale what the policy puts out")
        if not (self.action.low < self.action.high).all():
            raise ConfigError("each low bound of the action must lie below its high bound")
        others = (*self.observation.values(), *self.extras.values())
        if any(feature.one_hot or feature.neutral is not None for feature in others):
            raise ConfigError("one_hot and neutral are said of the action alone")
        if not 0 < self.fps < math.inf:
            raise ConfigError(f"fps must be positive and finite, not {self.fps}")
        self._check_size()

    def _check_size(self) -> None:
        if (record := self.record_bytes) > MAX_RECORD:
            name, largest = max(self.observation.items(), key=lambda item: item[1].nbytes)
            raise ConfigError(
                f"a row of this robot cannot be sent: the last one of an episode has {record / 2**20:.1f} MiB with the "
                f"observation after it, and at most {MAX_RECORD >> 20} MiB travel in one record. Take fewer cameras or "
                f"smaller images: {name} alone has {largest.nbytes / 2**20:.1f} MiB"
            )
        if (count := len(self.observation) + len(self.extras)) > MAX_FEATURES:
            raise ConfigError(f"a row has at most {MAX_FEATURES} features, not {count}")
        if (size := len(msgpack.packb(self.to_dict()) or b"")) > MAX_SPEC:
            raise ConfigError(f"a Spec has at most {MAX_SPEC >> 10} KiB with all names and bounds, not {size >> 10}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Spec) and self.to_dict() == other.to_dict()

    def to_dict(self) -> dict[str, Any]:
        return {
            "observation": {name: feature.to_dict() for name, feature in sorted(self.observation.items())},
            "action": self.action.to_dict(),
            "fps": float(self.fps),
            "extras": {name: feature.to_dict() for name, feature in sorted(self.extras.items())},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Spec":
        """Return the Spec that `to_dict` described. Raises ConfigError when `data` describes none."""
        try:
            return cls(
                {name: Feature(**feature) for name, feature in data["observation"].items()},
                Feature(**data["action"]),
                float(data["fps"]),
                {name: Feature(**feature) for name, feature in data["extras"].items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ConfigError(f"this is no Spec: {error!r}") from None

    def widened(self, run: Mapping[str, Any]) -> "Spec":
        """Return the Spec of a run, which `run` describes: this one with further extras, and without images that the
        run leaves out. Raises Refused for another."""
        spec = Spec.from_dict(run)
        own = {name: feature for name, feature in spec.extras.items() if name in self.extras}
        if difference := replace(spec, extras=own).difference(self.as_in(spec)):
            raise Refused(
                f"the learner's run is of another robot (the run, yours): {difference}. Start the learner with another "
                "run_dir=..., or this actor with the run's task"
            )
        return spec

    @property
    def record_bytes(self) -> int:
        """Bytes of the smallest record that ends an episode: one row, and the observation after it."""
        seen = sum(feature.nbytes for feature in self.observation.values())
        return 2 * seen + sum(feature.nbytes for feature in (*self.extras.values(), self.action))

    @property
    def images(self) -> tuple[str, ...]:
        """The names of the cameras' images, sorted."""
        return tuple(sorted(name for name in self.observation if name.startswith(IMAGES)))

    def without(self, names: Collection[str]) -> "Spec":
        """Return this Spec without these observations; this one itself where no other would be left."""
        left = {name: feature for name, feature in self.observation.items() if name not in names}
        return replace(self, observation=left) if left else self

    def as_in(self, run: "Spec") -> "Spec":
        """Return this Spec without the images that a run does not store."""
        return self.without(set(self.images) - run.observation.keys())

    def difference(self, other: "Spec") -> str:
        """Return what the two say differently, as `difference`. What one of them leaves UNSAID is no difference."""
        return difference(self.to_dict(), other.to_dict(), UNSAID)


def difference(mine: Mapping[str, Any], theirs: Mapping[str, Any], unsaid: tuple[str, ...] = ()) -> str:
    """Return what differs between two trees of plain data, as `name: mine, theirs`; empty when nothing does.

    A branch that one of them lacks is told once, by its name. unsaid: ends of names that count only where both trees
    have them.
    """
    return "; ".join(_differences(mine, theirs, unsaid, ""))


def _differences(mine: Mapping[str, Any], theirs: Mapping[str, Any], unsaid: tuple[str, ...], at: str) -> Iterator[str]:
    for name in sorted({*mine, *theirs}):
        own, other, place = mine.get(name), theirs.get(name), f"{at}{name}"
        is_alone = (name in mine) != (name in theirs)
        if isinstance(own, dict) and isinstance(other, dict):
            yield from _differences(own, other, unsaid, f"{place}.")
        elif own != other and not (is_alone and _is_unsaid(place, own if name in mine else other, unsaid)):
            yield f"{place}: {_told(own)}, {_told(other)}"


def _is_unsaid(place: str, value: Any, unsaid: tuple[str, ...]) -> bool:
    """Return whether all that is said here is of the ends `unsaid`."""
    if not isinstance(value, dict):
        return place.endswith(unsaid)
    return all(_is_unsaid(f"{place}.{name}", below, unsaid) for name, below in value.items())


def _told(side: Any) -> str:
    """Return a value, or that a branch is there, or nothing is."""
    return "it is there" if isinstance(side, dict) else "nothing" if side is None else str(side)
