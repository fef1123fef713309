"""Which numbers cannot be: by what the Spec says of a feature, and by what holds where it says nothing."""

import numpy as np
import pytest
from serl_client import Feature, Spec
from serl_client.limits import Limits

from tests.shared.common import STATE

SPEC = Spec(
    {
        STATE: Feature((3,), names=("a", "b", "c"), units=("rad", "m", ""), low=[-3, -3, -np.inf], high=[3.5, 7e6, 9]),
        "observation.half": Feature((2, 2), "float16"), "observation.count": Feature((), "int64"),
        "observation.image": Feature((4, 4, 3), "uint8"), "observation.small": Feature((2,), "uint8", high=7),
    },
    Feature((2,), low=-1, high=1, names=("x", "y")), 10.0, {"flag": Feature((), "bool"), "force": Feature(())},
)  # fmt: skip
GOOD = {
    STATE: [3.5, 7e6, -1e6], "observation.half": np.full((2, 2), 6e4), "observation.count": -(10**6),
    "observation.image": np.full((4, 4, 3), 255, np.uint8), "observation.small": np.array([7, 0], np.uint8),
    "flag": True, "force": 1e6, "action": [201, -201], "reward": -1e6, "time": 1e11, "gap": True,
}  # fmt: skip


def test_what_is_within_its_limits_can_be():
    assert not Limits(SPEC).broken(GOOD)
    assert not Limits(SPEC).broken({name: np.stack([values] * 2) for name, values in GOOD.items()}, 5)


@pytest.mark.parametrize(
    ("column", "value", "says"),
    [
        (STATE, [0, 7.1e6, 0], "observation.state (b) is 7.1e+06 m at step 5, beyond its limit of 7e+06 m"),
        (STATE, [-3.25, 0, 0], "observation.state (a) is -3.25 rad at step 5, beyond its limit of -3 rad"),
        (STATE, [0, 0, -2e6], "observation.state (c) is -2e+06 at step 5, beyond its limit of -1e+06"),
        (STATE, [np.nan, 0, 0], "observation.state (a) is nan rad at step 5, which is not finite"),
        ("observation.half", [[0, 0], [7e4, 0]], "observation.half [1, 0] is inf at step 5, which is not finite"),
        ("observation.count", -(2**63), "observation.count is -9.22337e+18 at step 5, beyond its limit of -1e+06"),
        ("observation.small", [[0, 7], [8, 0]], "observation.small [0] is 8 at step 6, beyond its limit of 7"),
        ("force", [0, 0, 1e300], "force is inf at step 7, which is not finite"),
        ("action", [0, 202], "action (y) is 202 at step 5, beyond its limit of 201"),
        ("prefix", [[0, 0], [-np.inf, 0]], "prefix (x) is -inf at step 6, which is not finite"),
        ("reward", 2e6, "reward is 2e+06 at step 5, beyond its limit of 1e+06"),
        ("time", -1e308, "time is -1e+308 s at step 5, beyond its limit of -1e+11 s"),
    ],
)
def test_what_is_beyond_is_named_with_entry_unit_step_and_limit(column, value, says):
    assert Limits(SPEC).broken({**GOOD, column: value}, 5) == says
    step = says.partition(" at step ")[2].partition(",")[0]
    assert Limits(SPEC).broken({column: value}) == says.replace(f" at step {step}", "")
