"""Reads and writes openpi's messages: msgpack, where an array is a map of its bytes, dtype and shape. No socket.

Source: packages/openpi-client of github.com/Physical-Intelligence/openpi at 15a9616. All sizes are checked before
memory is taken, and no input can run code.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import msgpack
import numpy as np
from serl_client.errors import ConfigError, MessageError
from serl_client.names import MAX_NAME, is_name
from serl_client.spec import DTYPES, MAX_DIMENSIONS, Array, Feature, Spec

PROMPT = "prompt"  # the key of the task in words
MAX_PARTS = 1000  # lists, maps and arrays in one request
MAX_LENGTH = 1000  # entries of a list or a map
LEAST_LIMIT = 4 << 20  # bytes of a request that are read in any case, so that an image of a wrong size is named
WIDEST = 8  # bytes of a number: scripts send float64 where the Spec has float32
TYPES = {np.dtype(name).str: np.dtype(name) for name in DTYPES}  # {"<f4": float32, ...}
ARRAY = frozenset({b"__ndarray__", b"data", b"dtype", b"shape"})
SCALAR = frozenset({b"__npgeneric__", b"data", b"dtype"})


class Form:
    """What a request has to hold for a Spec, and what it becomes.

    keys: {a client's key: the Spec's feature}; features that are not in it go by their own names. A map within a
    request is read as the keys `outer/inner`. Raises ConfigError for keys that do not fit the Spec.
    """

    def __init__(self, spec: Spec, keys: Mapping[str, str]) -> None:
        if not isinstance(keys, Mapping) or any(type(name) is not str for pair in keys.items() for name in pair):
            raise ConfigError(f"bridge.keys={keys}: write {{a client's key: our feature, ...}}")
        names = ", ".join(spec.observation)
        for theirs, ours in keys.items():
            if ours not in spec.observation:
                raise ConfigError(
                    f"bridge.keys: {theirs!r} stands for {ours!r}; name one of the robot's features, {names}"
                )
        if len(set(keys.values())) < len(keys):
            raise ConfigError("bridge.keys: two keys stand for the same feature; name each feature once")
        own = {ours: theirs for theirs, ours in keys.items()}
        self._features = {own.get(name, name): (name, feature) for name, feature in spec.observation.items()}
        if len(self._features) < len(spec.observation) or PROMPT in self._features:
            raise ConfigError(f"bridge.keys: name no key {PROMPT!r}, nor like another feature of the robot ({names})")
        numbers = sum(math.prod(feature.shape) for feature in spec.observation.values())
        self.limit = max(LEAST_LIMIT, (64 << 10) + WIDEST * numbers)  # bytes of a request

    def describe(self) -> dict[str, Any]:
        """Return {key: {feature, dtype, shape}} of the keys that each request has."""
        return {
            theirs: {"feature": name, "dtype": feature.dtype, "shape": list(feature.shape)}
            for theirs, (name, feature) in self._features.items()
        }

    def read(self, data: object) -> tuple[dict[str, Array], str]:
        """Return (observation by the Spec's names, task) of a request. Floats have the Spec's dtype.

        Raises MessageError.
        """
        found = dict(_flat(unpack(data)))
        task = found.pop(PROMPT, "")
        if not is_name(task):
            raise MessageError(f"{PROMPT!r} should be a printable text of at most {MAX_NAME} characters")
        if strange := sorted(found.keys() - self._features.keys()):
            raise MessageError(
                f"the request has {strange[0][:MAX_NAME]!r}, which is none of {', '.join(self._features)}: "
                "leave it out, or name it in bridge.keys of the learner"
            )
        if lacking := [theirs for theirs in self._features if theirs not in found]:
            raise MessageError(f"the request lacks {', '.join(map(repr, lacking))} (bridge.keys of the learner)")
        return {
            name: _fitted(theirs, found[theirs], name, feature) for theirs, (name, feature) in self._features.items()
        }, task


def pack(message: Mapping[str, Any]) -> bytes:
    """Return the message as bytes, with its arrays as openpi's client unpacks them."""
    packed = msgpack.packb(message, default=_packed)
    assert packed is not None
    return packed


def _packed(array: object) -> dict[bytes, Any]:
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{type(array).__name__} is nothing that openpi's clients read")
    return {b"__ndarray__": True, b"data": array.tobytes(), b"dtype": array.dtype.str, b"shape": array.shape}


def unpack(data: object, what: str = "request of an openpi client") -> dict[Any, Any]:
    """Return a message's map, whose arrays lie in `data`. Raises MessageError; `what`: what it should be."""
    if not isinstance(data, bytes):
        raise MessageError(f"a {what} is one binary message of msgpack, not a text")
    reader = _Reader()
    try:
        found = msgpack.unpackb(
            data, max_array_len=MAX_LENGTH, max_map_len=MAX_LENGTH, max_ext_len=0, ext_hook=_no_extension,
            object_pairs_hook=reader.mapping, list_hook=reader.listing,
        )  # fmt: skip
    except (ValueError, TypeError, RecursionError, OverflowError, msgpack.UnpackException) as error:
        raise MessageError(f"this is no {what}: {error}"[:300]) from None
    if type(found) is not dict:
        raise MessageError(f"a {what} is a map of keys to arrays")
    return found


def _no_extension(code: int, data: bytes) -> None:
    raise ValueError("an extension type")


class _Reader:
    """Turns what msgpack has read into arrays. Counts the parts: an empty list takes 1 byte there, and 72 here."""

    def __init__(self) -> None:
        self.parts = 0

    def listing(self, entries: list[Any]) -> list[Any]:
        self.parts += 1
        if self.parts > MAX_PARTS:
            raise ValueError(f"more than {MAX_PARTS} lists and maps")
        return entries

    def mapping(self, pairs: list[tuple[Any, Any]]) -> Any:
        self.listing(pairs)
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("a map names a key twice")
        if found.keys() == ARRAY:
            return _array(found[b"data"], found[b"dtype"], found[b"shape"])
        if found.keys() == SCALAR:
            return _scalar(found[b"data"], found[b"dtype"])
        return found


def _array(data: Any, dtype: Any, shape: Any) -> Array:
    kind = _kind(dtype)
    if type(data) is not bytes or type(shape) is not list or len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"an array has bytes, and a shape of at most {MAX_DIMENSIONS} sizes")
    if any(type(size) is not int or size < 1 for size in shape):
        raise ValueError("an array's shape has whole numbers from 1 on")
    if (count := math.prod(shape) * kind.itemsize) != len(data):
        raise ValueError(f"an array of {kind} {shape} has {count} bytes, not {len(data)}"[:200])
    return np.ndarray(shape, kind, data)


def _scalar(data: Any, dtype: Any) -> Array:
    kind = _kind(dtype)
    if type(data) not in (bool, int, float):
        raise ValueError("a scalar is a number")
    return np.asarray(data, kind)


def _kind(dtype: Any) -> np.dtype[Any]:
    if not isinstance(dtype, str) or dtype not in TYPES:
        raise ValueError(f"the dtype {dtype!r}; there are {', '.join(TYPES)}"[:200])
    return TYPES[dtype]


def _flat(found: Mapping[Any, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (`outer/inner`, value) of maps within maps. A key that comes so twice is refused."""
    seen: set[str] = set()
    for key, value in found.items():
        if not isinstance(key, str):
            raise MessageError("the keys of a request are texts")
        if len(above) + len(key) > MAX_NAME:  # each map within a map holds the keys of all around it
            raise MessageError(f"the keys of a request have at most {MAX_NAME} characters, with those around them")
        for pair in _flat(value, f"{above}{key}/") if isinstance(value, dict) else [(f"{above}{key}", value)]:
            if pair[0] in seen:
                raise MessageError(f"the request names {pair[0][:MAX_NAME]!r} twice")
            seen.add(pair[0])
            yield pair


def _fitted(theirs: str, value: Any, name: str, feature: Feature) -> Array:
    """Return the value as this feature. Numbers become its floats; every other type has to be its own."""
    if isinstance(value, (bool, int, float)):
        value = _number(theirs, value)
    if not isinstance(value, np.ndarray):
        raise MessageError(f"{theirs!r} should be a numpy array, not a {type(value).__name__}")
    is_float = np.dtype(feature.dtype).kind == "f"
    if is_float and value.dtype.kind in "fiu" and value.shape == feature.shape:
        with np.errstate(over="ignore", invalid="ignore"):  # PolicyHost.check refuses what is not finite
            value = value.astype(feature.dtype, copy=False)
    try:
        feature.check(theirs, value)
    except ValueError as error:
        hint = ": an image is [height, width, channel]" if name.startswith("observation.images.") else ""
        raise MessageError(f"{error}{hint}") from None
    return value


def _number(theirs: str, value: float) -> Array:
    try:
        return np.asarray(value, {bool: "bool", int: "int64", float: "float64"}[type(value)])
    except OverflowError:
        raise MessageError(f"{theirs!r} is a number that no array holds") from None
