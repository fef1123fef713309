"""What a guard lets through: limits, targets, holding, silence, the way home. No process and no clock."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serl_client.errors import RobotFault

from robot_infra.guard.limits import Limiter, read_limits, squares_outside
from robot_infra.guard.motion import HOLD, HOME, SETTLING, SILENT_PERIODS, TRACK, TRACKING_TICKS, Motion

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
    """A Motion over an arm that follows its set points with a lag."""

    def __init__(self, at=(0.0, -0.5), *, has_tool=False, home=(0.3, -0.2), lag=0.5, **changes):
        written = {**LIMITS, "tool": TOOL} if has_tool else LIMITS
        self.limits = read_limits(ENTRIES, written, has_tool=has_tool)
        self.lag, self.measured = lag, np.array(at, float)
        arguments = {"tick": TICK, "period": PERIOD, "home_speed": 0.25, "is_ready": True, "measured": self.measured}
        self.motion = Motion(Limiter(self.limits, tool), np.array(home, float), **(arguments | changes))

    def track(self, *wanted):
        self.motion.track(np.array(wanted, float))

    def go(self, ticks=10):
        """The set points of so many ticks, [ticks, J]."""
        points = []
        for _ in range(ticks):
            points.append(self.motion.advance())
            self.measured = self.measured + self.lag * (points[-1] - self.measured)
            self.motion.observe(self.measured)
        return np.array(points)


# -- targets


def test_a_single_wrong_measurement_does_not_become_the_set_point():
    """A bus gives a finite number that is no position; the policy is silent in the next moment, and the arm holds."""
    bench = Bench()
    bench.track(0.2, -0.5)
    before = bench.go(10)[-1]
    bench.motion.observe(np.array([-3.0, 2.0]))
    bench.motion.hold()
    np.testing.assert_allclose(bench.motion.advance(), before, atol=1e-6)


def test_a_target_is_reached_within_one_period_in_equal_parts_and_then_held():
    bench = Bench()
    bench.track(0.1, -0.45)
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
    bench.track(*wanted)
    np.testing.assert_allclose(bench.motion.target, accepted)
    assert bench.motion.limited == (wanted != accepted)


def test_the_jump_counts_from_the_accepted_target_also_after_the_way_home():
    bench = Bench()
    bench.track(0.0, -9.0)
    bench.track(0.0, -9.0)
    np.testing.assert_allclose(bench.motion.target, [0, -0.6])
    bench.motion.go_home()
    while not bench.motion.is_home:
        bench.go(1)
        bench.motion.hear()
    bench.track(0.3, 9.0)
    np.testing.assert_allclose(bench.motion.target, [0.3, -0.15])


def test_an_arm_begins_within_its_range_or_not_at_all():
    bench = Bench(at=(1.01, -0.5))  # its first step could bring it back
    np.testing.assert_array_equal(bench.go(3), np.tile([1.0, -0.5], (3, 1)))
    with pytest.raises(RobotFault, match=r"shoulder is measured at 85.94°, and its range is -57.3° to 57.3°, so"):
        Bench(at=(1.5, -0.5))


@pytest.mark.parametrize("wanted", [(np.nan, 0.0), (0.0, -np.inf), (0.1,), ()], ids=str)
def test_what_is_no_target_holds_and_is_counted(wanted):
    bench = Bench()
    bench.track(0.2, -0.5)
    half = bench.go(5)[-1]
    bench.track(*wanted)
    assert (bench.motion.mode, bench.motion.refused, bench.motion.fault) == (HOLD, 1, None)
    np.testing.assert_array_equal(bench.go(20), np.tile(half, (20, 1)))


A_NUMBER = st.floats(allow_nan=True, allow_infinity=True) | st.floats(-3, 3)
DOINGS = st.lists(
    st.one_of(
        st.tuples(st.just("track"), st.lists(A_NUMBER, min_size=2, max_size=2) | st.lists(A_NUMBER, max_size=3)),
        st.tuples(st.sampled_from(["hold", "home", "recover", "power", "push"]), st.integers(0, 2**32)),
    ),
    max_size=30,
)


def do(bench, what, more):
    """One of DOINGS. None of them moves the set point at once, but motors that come on: then it is where the arm is."""
    motion, before, target = bench.motion, bench.motion.point, bench.motion.target
    if what == "track":
        bench.track(*more)
        assert motion.mode == HOLD or (np.abs(motion.target - target) <= bench.limits.jump + A_BIT).all()
    elif what == "push":
        bench.measured = bench.measured + np.random.default_rng(more).normal(0, 0.3, 2)
    elif what == "hold":
        motion.hold()
    elif what == "home":
        motion.go_home([np.array([np.nan, -1.0])] * (more % 2))
    else:
        motion.suspend()
        motion.recover([bench.measured], held=bench.measured if what == "power" else before)
        if motion.fault is None:
            np.testing.assert_allclose(motion.point, bench.measured if what == "power" else before, atol=0.02)
        return
    assert (motion.point == before).all()


def check(bench, before, after, was_faulty):
    """One tick: no limit is broken, or the box no more than before; with a fault it goes to where it holds."""
    limits = bench.limits
    assert (np.abs(after - before) <= limits.speed * TICK + A_BIT).all()
    assert ((after >= limits.low) & (after <= limits.high)).all()
    assert not was_faulty or (np.abs(after - bench.motion.target) <= np.abs(before - bench.motion.target) + A_BIT).all()
    if limits.box is not None:
        assert np.linalg.norm(tool(after) - tool(before)) <= limits.tool_speed * TICK + A_BIT
        assert squares_outside(tool(after), limits.box) <= squares_outside(tool(before), limits.box) + A_BIT


@settings(max_examples=40)
@given(DOINGS, st.booleans(), st.sampled_from([0.1, 0.5, 1.0]))
def test_whatever_is_asked_for_no_set_point_leaves_the_limits(doings, has_tool, lag):
    bench = Bench(has_tool=has_tool, lag=lag)
    for what, more in doings:
        do(bench, what, more)
        for _ in range(12):
            before, was_faulty = bench.motion.point, bench.motion.fault is not None
            (after,) = bench.go(1)
            check(bench, before, after, was_faulty)


# -- holding, silence, faults


def test_hold_is_clamped_once_near_the_measurement_and_then_repeated_though_the_arm_sinks():
    bench = Bench(lag=0.0)
    bench.track(0.2, -0.5)
    bench.go(10)
    bench.track(0.4, -0.5)
    bench.go(10)
    bench.motion.hold()
    points = bench.go(8)  # from 0.4 to what is measured, 0, and the jump of 0.3, at its speed
    np.testing.assert_allclose(points[:, 0], [0.38, 0.36, 0.34, 0.32, 0.3, 0.3, 0.3, 0.3])
    for _ in range(3):
        bench.measured = bench.measured - [0.01, 0]
        points = bench.go(1)
        bench.motion.hold()
        np.testing.assert_allclose(points[0], [0.3, -0.5])


def test_silence_is_a_fault_while_a_target_is_followed_and_never_after_hold():
    bench = Bench()
    bench.go(1000)
    bench.track(0.2, -0.5)
    bench.go(10)
    bench.motion.hold()
    bench.go(1000)
    assert bench.motion.fault is None
    bench.track(0.1, -0.5)
    bench.go(round(SILENT_PERIODS * PERIOD / TICK) + 2)
    assert bench.motion.fault[0] == "guard"
    still = bench.motion.point
    bench.track(0.0, -0.5)
    bench.motion.go_home()
    np.testing.assert_array_equal(bench.go(50), np.tile(still, (50, 1)))
    assert (bench.motion.mode, bench.motion.target.tolist()) == (HOLD, still.tolist())
    bench.motion.recover([bench.measured], None)
    bench.track(0.0, -0.5)
    assert bench.motion.mode == TRACK


def test_an_arm_that_does_not_follow_is_a_fault_and_goes_on_from_where_its_motors_hold_it():
    bench = Bench(lag=0.0)
    moved = 0
    while bench.motion.fault is None and moved < 1000:
        bench.track(9.0, -0.5)
        moved += len(bench.go(1))
    assert bench.motion.fault[0] == "tracking"
    assert "shoulder" in bench.motion.fault[1]
    assert moved >= 0.5 / 2 / TICK + TRACKING_TICKS - 1
    np.testing.assert_allclose(bench.go(20)[-1], [0.3, -0.5])
    here = bench.measured
    bench.measured = np.array([-0.4, -0.6])  # somebody has moved it, or its sensor is wrong: nobody knows
    for held in (None, bench.motion.point, [0.3, np.nan]):
        bench.motion.recover([bench.measured], held)
        assert bench.motion.fault[1].startswith("shoulder is measured at -22.92°, far from where its motors hold it.")
    bench.motion.recover([here], bench.motion.point)
    assert bench.motion.fault is None
    np.testing.assert_allclose(bench.go(5), np.tile([0.3, -0.5], (5, 1)))
    bench.measured = np.array([-0.4, -0.6])
    bench.motion.recover([bench.measured], bench.measured)  # its motors were off, and came on there
    np.testing.assert_array_equal(bench.go(5), np.tile(bench.measured, (5, 1)))


def test_each_entry_begins_where_its_motor_holds_it_and_is_never_led_to_what_is_measured():
    """One motor was off, the other one on: what a sensor says of the second is no target."""
    bench = Bench(is_ready=False)
    bench.motion.recover([np.array([0.1, -0.3])], [0.1, -0.5])
    np.testing.assert_array_equal(bench.motion.advance(), [0.1, -0.5])
    bench.motion.recover([np.array([0.1, -0.3])], [np.inf, -0.5])
    assert "that is no position" in bench.motion.fault[1]


def test_while_its_motors_come_on_nothing_is_sent_and_afterwards_only_if_all_went_well():
    bench = Bench()
    bench.motion.suspend()
    assert bench.motion.advance() is None
    bench.motion.recover([np.array([np.nan, 0.0])], None)
    assert bench.motion.advance() is None
    bench.motion.recover([np.array([0.0, -0.5])], None)
    np.testing.assert_array_equal(bench.motion.advance(), [0.0, -0.5])


def test_measurements_out_of_range_are_a_fault_that_names_the_joint_if_they_come_one_after_another():
    bench = Bench()
    for _ in range(TRACKING_TICKS + 1):
        bench.motion.observe(np.array([0, 40.0]))
        bench.go(1)
    assert bench.motion.fault is None
    for _ in range(TRACKING_TICKS):
        bench.motion.observe(np.array([0, 40.0]))
    assert bench.motion.fault[1].startswith("elbow is measured at 2292°, and its range is -114.6° to 28.65°: its s")


def test_readings_that_differ_or_are_no_positions_do_not_let_an_arm_go_on():
    bench = Bench(is_ready=False)
    for readings, said in (
        ([[0, -0.5]] * 4 + [[0, 0.2]], r"elbow is measured at -28.65° and 11.46° within a moment"),
        ([[0, -0.5], [np.nan, -0.5]], "a sensor or its driver failed"),
        ([[0, 40.0]], r"elbow is measured at 2292°, and its range is -114.6° to 28.65°, so no set point is sent"),
    ):
        bench.motion.recover([*np.array(readings, float)], None)
        assert re.search(said, bench.motion.fault[1])
        assert bench.motion.advance() is None


def test_positions_that_are_not_finite_are_a_fault_and_the_last_set_point_stays():
    bench = Bench()
    bench.track(0.1, -0.5)
    last = bench.go(5)[-1]
    bench.motion.observe(np.array([np.nan, 0.0]))
    assert bench.motion.fault[0] == "sensor"
    np.testing.assert_array_equal(bench.go(5), np.tile(last, (5, 1)))


# -- the way home


def test_the_way_home_is_slow_straight_and_settles():
    bench, points = Bench(lag=1.0), []
    bench.motion.go_home()
    while not bench.motion.is_home:
        points += [*bench.go(1)]
        bench.motion.hear()
    steps = np.diff(points, axis=0)
    assert np.abs(steps).max(0) == pytest.approx([0.0025, 0.0025])  # a quarter of the elbow's speed: its way is as long
    np.testing.assert_allclose(points[-round(SETTLING / TICK) :], np.tile([0.3, -0.2], (30, 1)), atol=1e-12)
    bench.go(1000)
    assert bench.motion.fault is None


def test_a_way_home_through_waypoints_settles_at_each_and_moves_only_what_they_name():
    bench, points = Bench(lag=1.0), []
    bench.motion.go_home([np.array([-0.2, np.nan]), np.array([np.nan, -0.4])])
    while not bench.motion.is_home:
        before = bench.motion.point
        points += [*bench.go(1)]
        check(bench, before, points[-1], was_faulty=False)
        bench.motion.hear()
    places, first, counts = np.unique(np.round(points, 9), axis=0, return_index=True, return_counts=True)
    settled = counts >= round(SETTLING / TICK)
    in_order = places[settled][np.argsort(first[settled])]
    np.testing.assert_allclose(in_order, [[-0.2, -0.5], [-0.2, -0.4], [0.3, -0.2]])


@pytest.mark.parametrize("stopped_by", ["hold", "silence", "target"])
def test_the_way_home_ends_with_hold_silence_or_a_target(stopped_by):
    bench = Bench()
    bench.motion.go_home()
    bench.go(40)
    if stopped_by == "hold":
        bench.motion.hold()
    elif stopped_by == "target":
        on_its_way = bench.motion.point
        bench.track(*on_its_way)
        np.testing.assert_array_equal(bench.motion.target, on_its_way)
    bench.go(60)
    assert bench.motion.mode != HOME
    assert not bench.motion.is_home
    assert (bench.motion.fault is None) == (stopped_by == "hold")


def test_a_way_home_that_would_leave_the_tools_box_is_a_fault():
    bench = Bench(at=(0.6, -0.5), has_tool=True, home=(-0.6, 0.4))
    bench.motion.go_home()
    for _ in range(500):
        bench.motion.hear()
        before = bench.motion.point
        check(bench, before, bench.go(1)[0], was_faulty=bench.motion.fault is not None)
    assert bench.motion.fault[0] == "limit"
