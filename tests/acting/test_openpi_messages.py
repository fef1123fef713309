"""What an openpi client's request must hold, and what hostile bytes do: they become nothing but a MessageError."""

import math

import msgpack
import numpy as np
import pytest
from serl_client import ConfigError, Feature, Spec
from serl_client.errors import MessageError

from serl_launcher.acting.openpi import MAX_LENGTH, MAX_PARTS, Form, pack
from tests.shared.common import STATE

from .toy import message, packed

CAMERA = "observation.images.front"
ACTION = Feature((2,), low=-1, high=1)
SEEN = Spec(
    {STATE: Feature((3,)), CAMERA: Feature((4, 6, 3), "uint8"), "observation.count": Feature((), "int32")}, ACTION, 10.0
)
FORM = Form(SEEN, {"observation/image": CAMERA, "observation/state": STATE})


def request(**changes):
    """A request of FORM; a change to None leaves a key out."""
    made = {
        "observation/state": np.arange(3.0), "observation/image": np.zeros((4, 6, 3), np.uint8),
        "observation.count": np.int32(5), "prompt": "fold",
    }  # fmt: skip
    return {key: value for key, value in (made | changes).items() if value is not None}


def test_a_request_is_read_by_the_specs_names_and_dtypes():
    inner = request(**{"observation/state": None, "observation/image": None, "prompt": None})
    nested = inner | {"observation": {"state": np.arange(3), "image": np.ones((4, 6, 3), np.uint8)}}
    for sent, task in ((request(), "fold"), (nested, "")):
        observation, said = FORM.read(message(**sent))
        assert said == task
        for name, feature in SEEN.observation.items():
            feature.check(name, observation[name])
        assert observation[STATE].tolist() == [0, 1, 2]
        assert observation["observation.count"] == 5


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"observation/state": None, "observation/image": None}, "lacks 'observation/state', 'observation/image'"),
        ({"wrist": np.zeros(3)}, "has 'wrist', which is none of observation/state, observation/image"),
        ({"observation.state": np.zeros(3)}, "has 'observation.state', which is none"),
        ({"observation/state": [1.0, 2.0, 3.0]}, "'observation/state' should be a numpy array, not a list"),
        ({"observation/state": np.zeros(4)}, "observation/state should be float32 [3], not float64 [4]"),
        ({"observation/state": np.ones(3, bool)}, "should be float32 [3], not bool [3]"),
        ({"observation/image": np.zeros((3, 4, 6), np.uint8)}, "an image is [height, width, channel]"),
        ({"observation/image": np.zeros((4, 6, 3))}, "should be uint8 [4, 6, 3], not float64 [4, 6, 3]: an image"),
        ({"observation.count": np.int64(5)}, "observation.count should be int32 [], not int64 []"),
        ({"observation.count": 2**64 - 1}, "is a number that no array holds"),
        ({"prompt": 3}, "'prompt' should be a printable text"),
        ({"observation": {"state": np.zeros(3)}}, "names 'observation/state' twice"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_by_its_name(changes, sentence):
    with pytest.raises(MessageError) as refused:
        FORM.read(message(**request(**changes)))
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (
            {"state": "observation.stat"},
            "'state' stands for 'observation.stat'; name one of the robot's features, observation.state",
        ),
        ({"a": STATE, "b": STATE}, "two keys stand for the same feature"),
        ({"prompt": STATE}, "name no key 'prompt'"),
        ({CAMERA: STATE}, "or like another feature"),
        ({"a": {"b": STATE}}, "write {a client's key: our feature"),
        ([STATE], "write {a client's key: our feature"),
    ],
)
def test_keys_that_do_not_fit_the_robot_are_refused_before_anybody_asks(keys, sentence):
    with pytest.raises(ConfigError, match=sentence):
        Form(SEEN, keys)


def array(data, dtype, shape, **more):
    return {b"__ndarray__": True, b"data": data, b"dtype": dtype, b"shape": shape, **more}


HOSTILE = {
    "more than there is": array(b"", "<f4", [1 << 40]),
    "a product of 0": array(b"", "<f4", [0, 1 << 62]),
    "negative": array(b"\0" * 8, "<f4", [-1, -2]),
    "a product that wraps": array(b"", "<f8", [1 << 32, 1 << 32]),
    "objects": array(b"\0" * 24, "|O", [3]),
    "void": array(b"\0" * 24, "|V8", [3]),
    "complex": array(b"\0" * 24, "<c8", [3]),
    "a structure": array(b"\0" * 12, "f4,f4,f4", [1]),
    "a date": array(b"\0" * 24, "<M8[s]", [3]),
    "no text for a dtype": array(b"\0" * 12, [["a", "<f4"]], [3]),
    "many dimensions": array(b"\0" * 12, "<f4", [1] * 40 + [3]),
    "a float for a size": array(b"\0" * 12, "<f4", [3.0]),
    "true for a size": array(b"\0" * 4, "<f4", [True]),
    "text for data": array("\0" * 12, "<f4", [3]),
    "a scalar of text": {b"__npgeneric__": True, b"data": "x", b"dtype": "<f4"},
    "a scalar of another size": {b"__npgeneric__": True, b"data": 1 << 63, b"dtype": "<i4"},
    "an extension": msgpack.ExtType(5, b"\0" * 12),
    "a time": msgpack.Timestamp(1, 2),
}


@pytest.mark.parametrize("value", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_array_is_refused(value):
    with pytest.raises(MessageError):
        FORM.read(msgpack.packb(request(**{"observation/state": value}), default=packed))


def test_little_that_would_become_much_is_refused():
    """An empty list takes a byte on the way, and 72 in memory; deep ones would end the interpreter's stack."""
    key = b"\x81\xa1a"  # {"a": ...
    for data in (
        key + b"\xdd" + (1 << 31).to_bytes(4, "big"), key + b"\xc6" + (1 << 31).to_bytes(4, "big"),
        key * 100_000 + b"\x90", b"\x91" * 100_000 + b"\x90", key + b"\xdc\x03\xe8" + b"\xdc\x03\xe8" * 1000,
        msgpack.packb({"a": [[]] * MAX_LENGTH, "b": [[]] * (MAX_PARTS // 2)}), msgpack.packb({"a": [0] * 2000}),
        key + b"\x82\xa1b\x90\xa1b\x90", msgpack.packb({1: 2}), msgpack.packb({b"a": 2}), msgpack.packb([1]), b"",
        b"\xc1", b"\x80\x80", b"\x81\xd9\xc8" + b"b" * 200 + key + b"\x90", key * 300 + b"\x90",
    ):  # fmt: skip
        with pytest.raises(MessageError) as refused:
            FORM.read(data)
        assert len(str(refused.value)) < 500
    with pytest.raises(MessageError, match="not a text"):
        FORM.read("{}")


def test_a_camera_of_another_size_is_named_though_it_is_larger():
    """The limit of a request leaves room for a mistake that people make."""
    image = np.zeros((480, 640, 3), np.uint8)
    data = message(**request(**{"observation/image": image}))
    assert len(data) < FORM.limit
    with pytest.raises(MessageError, match=r"\[4, 6, 3\], not uint8 \[480, 640, 3\]"):
        FORM.read(data)
    large = Spec({CAMERA: Feature((1080, 1920, 3), "uint8"), STATE: Feature((8,))}, ACTION, 10.0)
    assert Form(large, {}).limit == 8 * (math.prod((1080, 1920, 3)) + 8) + (64 << 10), "as float64, and its keys"


def test_only_numbers_and_texts_are_packed():
    with pytest.raises(TypeError):
        pack({"actions": object()})
