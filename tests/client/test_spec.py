"""An action that is a choice: what a Spec may say of it, and which rows fit."""

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
    with pytest.raises(Refused, match=r"action\.one_hot: None, True"):
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


@pytest.mark.parametrize("row", [[0, 0], [1, 1], [0.5, 0.5], [2, -1], [1, 1e-6], [0, 0.999]])
def test_a_row_that_is_no_choice_is_not_stored(row):
    spec = spec_of(CHOICE)
    segment = make_segment(steps=3)
    chosen = np.eye(2, dtype=np.float32)[[0, 1, 0]]
    replace(segment, action=chosen).check(spec)
    chosen[1] = row
    with pytest.raises(NotFinite, match="one-hot"):
        replace(segment, action=chosen).check(spec)
