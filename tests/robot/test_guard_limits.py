"""What a task's yaml says of an arm's limits and home, and how a person is shown it."""

import re

import numpy as np
import pytest
import yaml
from serl_client.errors import ConfigError

from robot_infra.guard.limits import KEYS, read_home, read_limits, read_waypoints, template
from tests.robot.test_guard_motion import ENTRIES, LIMITS, TOOL


def test_the_template_says_what_is_missing_and_with_ranges_it_is_right_as_it_stands():
    with pytest.raises(ConfigError, match=r"no limits for shoulder, elbow, tool.*`limits: \{shoulder: \{range: \[LOW"):
        read_limits(ENTRIES, None, has_tool=True)
    written = yaml.safe_load(template(ENTRIES, [(-1, 1), (-0.5, 2)], has_tool=False))["limits"]
    limits = read_limits(ENTRIES, written, has_tool=False)
    np.testing.assert_array_equal([limits.low, limits.high], [[-1, -0.5], [1, 2]])


def test_limits_are_shown_in_degrees_and_millimetres():
    written = {"shoulder": LIMITS["shoulder"], "hand": {**LIMITS["elbow"], "range": [0, 0.08]}, "tool": TOOL}
    lines = read_limits({"shoulder": "rad", "hand": "m"}, written, has_tool=True).described()
    assert lines[0].startswith("shoulder: -57.3° to 57.3°, 114.6°/s, 17.19° from target to target, 28.65°")
    assert lines[1].startswith("hand: 0 mm to 80 mm, 1000 mm/s")
    assert lines[2] == "tool: x -500 to 580 mm, y -300 to 300 mm, z -1000 to 1000 mm, 400 mm/s"


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(
    "value", [None, float("inf"), float("nan"), 0, -1, True, "1", [1, 0], [0, float("inf")]], ids=str
)
def test_no_limit_can_be_left_open(key, value):
    """Nor left out, nor be what only looks like one."""
    for wrong in ({**LIMITS["elbow"], key: value}, {name: LIMITS["elbow"][name] for name in KEYS if name != key}):
        with pytest.raises(ConfigError, match="elbow"):
            read_limits(ENTRIES, {**LIMITS, "elbow": wrong}, has_tool=False)


@pytest.mark.parametrize(
    "written",
    [{"shoulder": LIMITS["shoulder"]}, {**LIMITS, "wrist": LIMITS["elbow"]}, {**LIMITS, "tool": TOOL}],
    ids=["one is missing", "one too many", "a tool that nobody knows"],
)
def test_every_entry_has_limits_and_nothing_else_has(written):
    with pytest.raises(ConfigError, match="elbow"):
        read_limits(ENTRIES, written, has_tool=False)


def test_a_home_that_is_missing_is_proposed():
    limits = read_limits(ENTRIES, LIMITS, has_tool=False)
    with pytest.raises(ConfigError) as error:
        read_home(limits, None)
    proposed = yaml.safe_load(re.search(r"`home: (\{.*\})`", str(error.value))[1])
    np.testing.assert_allclose(read_home(limits, proposed), (limits.low + limits.high) / 2, atol=1e-3)


@pytest.mark.parametrize("home", [None, {}, {"shoulder": 0.0}, {"shoulder": 0.0, "elbow": 0.6}], ids=str)
def test_home_is_a_place_within_the_ranges(home):
    with pytest.raises(ConfigError, match="home: "):
        read_home(read_limits(ENTRIES, LIMITS, has_tool=False), home)


def test_waypoints_name_what_moves_and_ends_to_draw_it_from():
    ends = read_waypoints(
        read_limits(ENTRIES, LIMITS, has_tool=False), {"up": {"elbow": -1}, "aside": {"shoulder": [0, 1]}}
    )
    np.testing.assert_array_equal(ends, [[[np.nan, -1], [np.nan, -1]], [[0, np.nan], [1, np.nan]]])


@pytest.mark.parametrize(
    "pose", [None, {}, 0.1, {"wrist": 0.0}, {"elbow": 0.6}, {"elbow": [0.3, 0.6]}, {"elbow": "up"}]
)
def test_a_waypoint_is_a_place_within_the_ranges(pose):
    with pytest.raises(ConfigError, match=r"waypoints\.up"):
        read_waypoints(read_limits(ENTRIES, LIMITS, has_tool=False), {"up": pose})
