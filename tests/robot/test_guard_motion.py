"""What a guard lets through: limits, targets, holding, silence, the way home. No process, and a clock of the test's."""

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from serl_client.errors import ConfigError

from robot_infra.guard.limits import KEYS, Limiter, read_home, read_limits, template
from robot_infra.guard.motion import FOLLOW, HOLD, HOME, SETTLING, SILENT_PERIODS, TRACKING_TICKS, Motion

ENTRIES = {"shoulder": "rad", "elbow": "rad"}
LIMITS = {
    "shoulder": {"range": [-1.0, 1.0], "speed": 2.0, "jump": 0.3, "tracking": 0.5},
    "elbow": {"range": [-2.0, 0.5], "speed": 1.0, "jump": 0.05, "tracking": 0.5},
}
TOOL = {"x": [-0.5, 0.58], "y": [-0.3, 0.3], "z": [-1.0, 1.0], "speed": 0.4}
TICK, PERIOD = 0.01, 0.1
A_BIT = 1e-9


def tool(positions):
    """Two links of 0.3 m in a plane."""
    first, second = positions[0], positions[0] + positions[1]
    return 0.3 * np.array([np.cos(first) + np.cos(second), np.sin(first) + np.sin(second), 0.0])


class Bench:
    """A Motion over an arm that follows its set points with a lag, and the ticks of a clock."""

    def __init__(self, at=(0.0, -0.5), *, has_tool=False, home=(0.3, -0.2), lag=0.5, **changes):
        written = {**LIMITS, "tool": TOOL} if has_tool else LIMITS
        self.limits = read_limits(ENTRIES, written, has_tool=has_tool)
        self.now, self.lag, self.measured = 50.0, lag, np.array(at, float)
        arguments = {"tick": TICK, "period": PERIOD, "home_speed": 0.25, "is_ready": True, "measured": self.measured}
        self.motion = Motion(Limiter(self.limits, tool), np.array(home, float), **(arguments | changes))

    def follow(self, *wanted, late=0.0):
        self.motion.follow(np.array(wanted, float), self.now - late, self.now)

    def go(self, ticks=10):
        """The set points of so many ticks, [ticks, J]."""
        points = []
        for _ in range(ticks):
            points.append(self.motion.advance(self.now))
            self.measured = self.measured + self.lag * (points[-1] - self.measured)
            self.motion.observe(self.measured)
            self.now += TICK
        return np.array(points)


# -- targets


def test_a_target_is_reached_within_one_period_in_equal_parts_and_then_held():
    bench = Bench()
    bench.follow(0.1, -0.45)
    points = bench.go(15)
    np.testing.assert_allclose(np.diff(points[:10, 0], prepend=0.0), 0.01)
    np.testing.assert_array_equal(points[9:], np.tile([0.1, -0.45], (6, 1)))


@pytest.mark.parametrize(
    ("wanted", "accepted"),
    [((0.5, -0.5), (0.2, -0.5)), ((0.1, -5), (0.1, -0.55)), ((-9, 9), (-0.2, -0.45)), ((0.2, -0.45), (0.2, -0.45))],
    ids=["speed", "jump", "both", "allowed"],
)
def test_a_target_that_is_too_far_becomes_a_limited_step_that_is_counted(wanted, accepted):
    bench = Bench()
    bench.follow(*wanted)
    np.testing.assert_allclose(bench.motion.target, accepted)
    assert bench.motion.limited == (wanted != accepted)


def test_the_jump_counts_from_the_accepted_target_also_after_the_way_home():
    bench = Bench()
    bench.follow(0.0, -9.0)
    bench.follow(0.0, -9.0)
    np.testing.assert_allclose(bench.motion.target, [0, -0.6])
    bench.motion.go_home(bench.now)
    while not bench.motion.is_home:
        bench.go(1)
        bench.motion.hear(bench.now)
    bench.follow(0.3, 9.0)
    np.testing.assert_allclose(bench.motion.target, [0.3, -0.15])


def test_an_arm_outside_of_its_range_is_only_led_back_and_no_faster():
    bench = Bench(at=(1.5, -0.5))
    bench.follow(9.0, -0.5)
    np.testing.assert_array_equal(bench.motion.target, [1.5, -0.5])
    bench.follow(0.0, -0.5)
    np.testing.assert_allclose(bench.motion.target, [1.3, -0.5])


@pytest.mark.parametrize("wanted", [(np.nan, 0.0), (0.0, -np.inf), (0.1,), ()], ids=str)
def test_what_is_no_target_holds_and_is_counted(wanted):
    bench = Bench()
    bench.follow(0.2, -0.5)
    half = bench.go(5)[-1]
    bench.follow(*wanted)
    assert (bench.motion.mode, bench.motion.refused, bench.motion.fault) == (HOLD, 1, None)
    np.testing.assert_array_equal(bench.go(20), np.tile(half, (20, 1)))


A_NUMBER = st.floats(allow_nan=True, allow_infinity=True) | st.floats(-3, 3)
DOINGS = st.lists(
    st.one_of(
        st.tuples(st.just("follow"), st.lists(A_NUMBER, min_size=2, max_size=2) | st.lists(A_NUMBER, max_size=3)),
        st.tuples(st.sampled_from(["hold", "home", "recover", "push"]), st.integers(0, 2**32)),
    ),
    max_size=30,
)


def keeps_its_limits(bench, doings):
    """Do it all; every tick between two doings keeps every limit, and nothing moves while a fault is there."""
    motion, limits = bench.motion, bench.limits
    reach = {tuple(each) for each in ()}
    for number, (what, more) in enumerate(doings):
        before, target = motion.point, motion.target
        if what == "follow":
            bench.follow(*more)
            jumped = np.abs(motion.target - target) - limits.jump
            assert motion.mode == HOLD or (jumped <= A_BIT).all()
        elif what == "push":
            bench.measured = bench.measured + np.random.default_rng(more).normal(0, 0.3, 2)
        else:
            {"hold": motion.hold, "home": lambda: motion.go_home(bench.now),
             "recover": lambda: motion.recover(bench.measured)}[what]()  # fmt: skip
        led_back = np.abs(motion.point - motion.measured) <= np.abs(before - motion.measured) + A_BIT
        assert what == "recover" or led_back.all()
        outside = [max(limits.low[i] - motion.point[i], motion.point[i] - limits.high[i], 0.0) for i in (0, 1)]
        far, point, had = Limiter(limits, tool)._outside(tool(motion.point)), motion.point, motion.fault
        for each in bench.go(1 + number % 12):
            if had is None and motion.fault and np.abs(each - point).max() > 0:
                break  # it held in this tick: near the measurement
            assert (np.abs(each - point) <= limits.speed * TICK + A_BIT).all()
            assert ((limits.low - each <= np.array(outside) + A_BIT) & (each - limits.high <= np.array(outside) + A_BIT)).all()
            if limits.box is not None:
                assert np.linalg.norm(tool(each) - tool(point)) <= limits.tool_speed * TICK + A_BIT
                assert Limiter(limits, tool)._outside(tool(each)) <= far + A_BIT
            assert had is None or (each == point).all()
            point = each
    return reach


@settings(max_examples=60, deadline=None)
@given(DOINGS, st.booleans(), st.sampled_from([0.1, 0.5, 1.0]))
def test_whatever_is_asked_for_no_set_point_leaves_the_limits(doings, has_tool, lag):
    keeps_its_limits(Bench(has_tool=has_tool, lag=lag), doings)
