"""What a Spec may say of its features beyond their shape: choices, units, limits, rest, codec; and which rows fit."""

from dataclasses import replace

import numpy as np
import pytest
from serl_client import ConfigError, Feature, Spec
from serl_client.episode import NotFinite
from serl_client.errors import Refused

from tests.shared.data import make_segment

SEEN = {"observation.state": Feature((8,))}
CHOICE = Feature((2,), low=0, high=1, one_hot=True)


def spec_of(action, **more):
    return Spec({**SEEN, **more}, action, fps=10.0)


def test_a_choice_is_said_in_the_spec_alone_and_a_continuous_robots_spec_says_nothing_of_it():
    spec = spec_of(CHOICE)
    assert spec.to_dict()["action"]["one_hot"] is True
    assert Spec.from_dict(spec.to_dict()) == spec
    other = spec_of(Feature((2,), low=0, high=1))
    assert "one_hot" not in other.to_dict()["action"]
    with pytest.raises(Refused, match=r"action\.one_hot: nothing, True"):
        spec.widened(other.to_dict())


@pytest.mark.parametrize(
    "said",
    [
        {"shape": (1,), "low": 0, "high": 1}, {"shape": (2, 2)}, {"low": -1}, {"high": 2}, {"low": None},
        {"dtype": "float64"}, {"one_hot": 1}, {"one_hot": None}, {"one_hot": [True]},
    ],
)  # fmt: skip
def test_a_choice_that_is_none_is_refused(said):
    described = spec_of(CHOICE).to_dict()
    described["action"] |= said
    with pytest.raises(ConfigError, match="one_hot"):
        Spec.from_dict(described)


def test_only_the_action_may_be_a_choice():
    with pytest.raises(ConfigError, match="of the action alone"):
        spec_of(CHOICE, **{"observation.word": CHOICE})


IMAGE = "observation.images.front"
ARM = Feature((2,), low=-1, high=3)
PICTURE = Feature((4, 4, 3), "uint8")
WORDS = [
    ("action", "units", {"units": ("deg", "percent")}, ["deg", "percent"], {"units": ["rad", "rad"]}),
    ("action", "neutral", {"neutral": [0, 3]}, [0.0, 3.0], {"neutral": [0, 2]}),
    ("observation.state", "units", {"units": "m"}, ["m"] * 8, {"units": ""}),
    ("observation.state", "low", {"low": -4}, [-4.0] * 8, {"low": -5}),
    ("observation.state", "high", {"high": np.inf}, [np.inf] * 8, {"high": 5}),
    (IMAGE, "codec", {"codec": {"name": "raw"}}, {"name": "raw"}, None),
]


def saying(where, said):
    """The Spec of an arm whose feature `where` says these words."""
    features = {"observation.state": Feature((8,)), IMAGE: PICTURE, "action": ARM}
    features[where] = replace(features[where], **said)
    return Spec({name: each for name, each in features.items() if name != "action"}, features["action"], fps=10.0)


@pytest.mark.parametrize(("where", "word", "said", "told", "other"), WORDS)
def test_a_word_travels_and_fits_a_spec_that_leaves_it_unsaid(where, word, said, told, other):
    spec, unsaid = saying(where, said), saying(where, {})
    described = spec.to_dict()
    assert (described["action"] if where == "action" else described["observation"][where])[word] == told
    assert Spec.from_dict(described) == spec != unsaid
    assert unsaid.difference(spec) == spec.difference(unsaid) == spec.difference(spec) == ""
    assert spec.widened(unsaid.to_dict()) == unsaid
    if other is not None:
        with pytest.raises(Refused, match=rf"{where.replace('.', '[.]')}[.]{word}: .*, "):
            spec.widened(saying(where, other).to_dict())


def test_a_spec_that_leaves_the_words_unsaid_has_the_bytes_of_before():
    assert saying("action", {}).to_dict() == {
        "observation": {
            "observation.state": {"shape": [8], "dtype": "float32", "names": []},
            IMAGE: {"shape": [4, 4, 3], "dtype": "uint8", "names": []},
        },
        "action": {"shape": [2], "dtype": "float32", "names": [], "low": [-1.0, -1.0], "high": [3.0, 3.0]},
        "fps": 10.0,
        "extras": {},
    }


def test_a_feature_that_one_side_lacks_is_told_once():
    spec = saying("action", {})
    blind = replace(spec, observation={"observation.state": spec.observation["observation.state"]})
    assert spec.difference(blind) == f"observation.{IMAGE}: it is there, nothing"
    assert blind.difference(spec) == f"observation.{IMAGE}: nothing, it is there"


@pytest.mark.parametrize("bound", ["low", "high"])
def test_the_actions_bounds_are_never_unsaid(bound):
    spec = saying("action", {})
    assert f"action.{bound}" in spec.difference(replace(spec, action=replace(ARM, **{bound: getattr(ARM, bound) * 2})))


@pytest.mark.parametrize(
    ("where", "said", "complaint"),
    [
        ("action", {"units": ("rad",)}, "one of .* for each entry"),
        ("action", {"units": ("rad", "degrees")}, "one of .* for each entry"),
        ("action", {"units": ([], {})}, "one of .* for each entry"),
        (IMAGE, {"units": "m"}, "one of .* for each entry"),
        ("action", {"neutral": [0, 3.1]}, "neutral action .* within the bounds"),
        ("action", {"neutral": [-np.inf, 0]}, "neutral action .* within the bounds"),
        ("action", {"neutral": [np.nan, 0]}, "neutral of a feature holds numbers"),
        ("action", {"neutral": 0, "low": 0, "high": 1, "one_hot": True}, "that is no choice"),
        ("observation.state", {"neutral": 0}, "with bounds"),
        ("observation.state", {"neutral": 0, "low": -1, "high": 1}, "of the action alone"),
        ("observation.state", {"low": np.nan}, "low of a feature holds numbers"),
        (IMAGE, {"codec": {"name": "jpeg"}}, "codec .*jpeg.* is not known"),
        (IMAGE, {"codec": {"name": "raw", "level": 1}}, "is not known"),
        (IMAGE, {"codec": {}}, "is not known"),
        ("observation.state", {"codec": {"name": "raw"}}, "only images"),
    ],
)
def test_words_that_mean_nothing_are_refused(where, said, complaint):
    with pytest.raises(ConfigError, match=complaint):
        saying(where, said)


def test_the_units_of_a_huge_vector_are_not_made_of_one_word():
    with pytest.raises(ConfigError, match="for each entry"):
        Feature((1 << 24,), "uint8", units="deg")


@pytest.mark.parametrize("row", [[0, 0], [1, 1], [0.5, 0.5], [2, -1], [1, 1e-6], [0, 0.999]])
def test_a_row_that_is_no_choice_is_not_stored(row):
    spec = spec_of(CHOICE)
    segment = make_segment(steps=3)
    chosen = np.eye(2, dtype=np.float32)[[0, 1, 0]]
    replace(segment, action=chosen).check(spec)
    chosen[1] = row
    with pytest.raises(NotFinite, match="one-hot"):
        replace(segment, action=chosen).check(spec)
