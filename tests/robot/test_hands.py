"""A person at their devices: who drives, and that nothing jumps when the driver changes."""

import numpy as np
import pytest
from serl_client import Feature
from serl_client.driving import BACK, TAKE
from serl_client.errors import ConfigError
from serl_client.person import Person
from serl_client.status import ActorStatus

from robot_infra.guard.lead import LIMP
from robot_infra.interfaces import Hand
from robot_infra.intervention import Intervention
from robot_infra.stages import StageKeys
from robot_infra.teleop.hands import Hands, make_devices
from robot_infra.teleop.leader import Leader
from robot_infra.teleop.page import BESIDE, PageDevice
from tests.shared.actors import Desk, FakeClient
from tests.shared.robots import Scripted

AXES = Feature((4,), names=("x", "y", "z", "gripper"), low=np.array(-1), high=np.array(1))
STATE = Feature((2,), names=("x", "gripper"), low=np.array([-1, 0]), high=np.array([1, 1]))  # the gripper's by state
HOLD = np.zeros(4, np.float32)


def at_policy(*devices, action=AXES, space="ee_delta", **options):
    """The hands of an episode that its policy begins."""
    hands = Hands(devices, action, space, **options)
    hands.reset(0, demonstrate=False)
    return hands


def driven(hands, clock, steps, hold=HOLD, period=0.1):
    """What is wanted in each step."""
    found = []
    for _ in range(steps):
        wanted = hands.read(hold)
        found.append(None if wanted is None else wanted.tolist())
        clock.sleep(period)
    return found


PUSH, TOGGLE = Hand({"x": 1.0}), Hand(words=["toggle"])
FORWARD, STILL = [0.5, 0, 0, 0], [0, 0, 0, 0]


def test_a_touch_takes_over_and_hands_back_half_a_second_after_it(clock):
    hands = at_policy(Scripted(Hand(), PUSH, PUSH))
    assert driven(hands, clock, 9) == [None, FORWARD, FORWARD, *[STILL] * 5, None]


def test_what_was_touched_in_a_pause_takes_nothing_over_afterwards(clock):
    """While nobody drives the devices are read for their words alone."""
    wish = Hand({"x": 1.0}, words=["take over"])
    hands = at_policy(Scripted(wish, PUSH, Hand()))
    for _ in range(2):
        assert hands.poll() == ["moved"]
    clock.sleep(1.0)
    assert driven(hands, clock, 1) == [None]
    pressed = at_policy(Scripted(wish, Hand()))
    assert (pressed.poll(), pressed.poll()) == (["moved"], [])
    clock.sleep(0.1)
    assert driven(pressed, clock, 9) == [STILL] * 9, "a key pressed between two steps takes over until the toggle"


def test_a_toggle_takes_over_until_the_next_one_also_after_a_touch(clock):
    hands = at_policy(Scripted(TOGGLE, PUSH, *[Hand()] * 9, TOGGLE))
    assert driven(hands, clock, 13) == [STILL, FORWARD, *[STILL] * 9, None, None]
    touched = at_policy(Scripted(PUSH, TOGGLE, *[Hand()] * 9, TOGGLE))
    assert driven(touched, clock, 12) == [FORWARD, *[STILL] * 10, None], "the first toggle makes it last"


def test_where_only_a_toggle_takes_over_a_touch_does_not(clock):
    hands = at_policy(Scripted(PUSH, TOGGLE, PUSH), takeover="toggle")
    assert driven(hands, clock, 9) == [None, STILL, FORWARD, *[STILL] * 6]


def test_two_devices_are_one_person(clock):
    one, two = Scripted(PUSH, Hand(words=["success"])), Scripted(Hand({"z": -1.0}, words=["pause"]))
    hands = at_policy(one, two)
    assert driven(hands, clock, 2) == [[0.5, 0, -0.5, 0], STILL]
    assert (hands.poll(), hands.poll()) == (["pause", "success", "moved"], [])
    hands.close()
    assert one.closed
    assert two.closed


@pytest.mark.parametrize("gripped", [0.0, 1.0])
def test_a_gripper_by_state_stays_as_it_is_until_it_is_told_otherwise(clock, gripped):
    """A takeover would otherwise drop what the robot holds."""
    device = Scripted(
        TOGGLE, PUSH, Hand(gripper=-1), Hand(), Hand(gripper=1), TOGGLE, TOGGLE, moves=frozenset(STATE.names)
    )
    hands = at_policy(device, action=STATE)
    hold = np.array([0, gripped], np.float32)
    wanted = driven(hands, clock, 7, hold)
    assert wanted == [[0, gripped], [0.5, gripped], [0, 0], [0, 0], [0, 1], None, [0, gripped]]


class Follower:
    """A robot with a leader arm beside it, as its driver observes both."""

    action = Feature((2,), names=("shoulder.pos", "elbow.pos"), low=np.array(-100), high=np.array(100))
    features, space, leader = {"leader": Feature((2,))}, "joint_position", LIMP

    def lead(self, *, follows):
        pass

    def hold_leader(self, holds):
        pass

    def __init__(self):
        self.seen = {"leader": np.array([50, 0], np.float32)}


def test_a_leader_arm_drives_by_a_toggle_alone_and_within_the_bounds(clock):
    robot = Follower()
    hands = at_policy(Leader(robot), Scripted(Hand(), TOGGLE), action=robot.action, space=robot.space)
    hold = np.array([10, 10], np.float32)
    assert driven(hands, clock, 2, hold) == [None, [50, 0]]
    robot.seen = {"leader": np.array([-120, 3], np.float32)}
    assert driven(hands, clock, 1, hold) == [[-100, 3]]


def test_a_robot_without_a_leader_and_a_robot_that_no_device_moves_are_refused():
    robot = Follower()
    with pytest.raises(ConfigError, match=r"this robot takes shoulder.pos, elbow.pos as .*; the device moves "):
        Hands([Scripted()], robot.action, robot.space)
    robot.features = {}
    with pytest.raises(ConfigError, match="no leader arm"):
        Leader(robot)
    with pytest.raises(ConfigError, match="touch or toggle"):
        Hands([Scripted()], AXES, "ee_delta", takeover="maybe")


# -- somebody at the page, beside these devices

LEFT, SILENCE = {"y": 1.0}, ()  # what somebody at the page says in a step: (press, motion)
DRIVE, LEFTWARDS, UPWARDS, RAISE = ("", LEFT), [0, 0.5, 0, 0], [0, 0, 0.5, 0], Hand({"z": 1.0})
NOTHING = Hand()


@pytest.mark.parametrize(
    ("takeover", "beside", "says", "wanted"),
    [
        ("toggle", [], [DRIVE, (TAKE,), DRIVE, *[SILENCE] * 9, (TAKE,), DRIVE, (BACK,)],
         [None, STILL, *[LEFTWARDS] * 4, *[STILL] * 7, LEFTWARDS, None]),
        ("touch", [NOTHING] * 2 + [RAISE], [(TAKE,), DRIVE, DRIVE, DRIVE, (TAKE,), DRIVE],
         [STILL, LEFTWARDS, UPWARDS, *[STILL] * 3]),
        ("toggle", [NOTHING] * 2 + [TOGGLE, NOTHING, TOGGLE], [(TAKE,), DRIVE, DRIVE, (TAKE,), DRIVE, (TAKE,), DRIVE],
         [STILL, LEFTWARDS, STILL, STILL, None, STILL, LEFTWARDS]),
        ("touch", [PUSH, *[NOTHING] * 7], [(TAKE,)] * 7 + [DRIVE], [FORWARD, *[STILL] * 5, None, None]),
    ],
    ids=["a press begins and ends it, silence holds", "a touch beside the robot wins", "a toggle there takes the robot",
         "and whoever touched it first has it"],
)  # fmt: skip
def test_the_page_is_one_device_more_and_whoever_is_beside_the_robot_wins(
    clock, takeover, beside, says, wanted
):  # fmt: skip
    hands = at_policy(page := PageDevice(), Scripted(*beside), takeover=takeover)
    desk, found = Desk(page.remote), []
    for said in says:
        if said:
            desk.say(*said)
        action = hands.read(HOLD)
        found.append(None if action is None else action.tolist())
        told = [update.text for update in desk.told()]
        assert (BESIDE in told) <= bool(beside)
        clock.sleep(0.1)
    assert found == wanted


@pytest.mark.parametrize("begins", [(TAKE,), DRIVE])
def test_a_demonstration_begins_with_a_press_or_a_motion_at_the_page_and_lasts(clock, begins):
    hands = Hands([page := PageDevice()], AXES, "ee_delta")
    desk = Desk(page.remote)
    desk.say(TAKE)  # at the controls, before the episode
    assert hands.poll() == ["moved"]
    desk.told()
    hands.reset(0, demonstrate=True)
    assert hands.read(HOLD) is None
    desk.say(*begins)
    assert hands.read(HOLD).tolist() == STILL
    desk.say(*DRIVE)
    assert hands.read(HOLD).tolist() == LEFTWARDS
    clock.advance(60.0)
    assert hands.read(HOLD).tolist() == STILL


@pytest.mark.parametrize(
    ("operator", "real", "says"), [("page", "simulated", "clock=real"), ("page+leader", "real", "say one")]
)
def test_where_nobody_at_the_page_can_drive_that_is_said(operator, real, says):
    with pytest.raises(ConfigError, match=says):
        make_devices(operator, None, Follower(), clock=real)


# -- hand-over


def led(*devices, ramp, demonstrate=False, robot=None):
    """The intervention of a person with a leader arm and these devices."""
    robot = robot or Follower()
    intervention = Intervention(Hands([Leader(robot), *devices], robot.action, robot.space), ramp=ramp)
    intervention.reset(0, demonstrate=demonstrate, intervene=not demonstrate)
    return intervention


def test_the_way_from_one_driver_to_the_other_has_equal_parts_and_is_flagged(clock):
    """The policy stands at -50, the leader at 50: without a ramp the arm would jump by 100."""
    intervention = led(Scripted(Hand(), Hand(), TOGGLE, *[Hand()] * 6, TOGGLE), ramp=5)
    policy, before, rows = np.array([-50, 0], np.float32), None, []
    for _ in range(16):
        hold = policy if before is None else before
        before, is_theirs = intervention.drive(policy, hold, before)
        rows.append((before[0], is_theirs, intervention.is_handover))
    at, theirs, handover = (list(column) for column in zip(*rows, strict=True))
    assert at == pytest.approx([-50, -50, -30, -10, 10, 30, 50, 50, 50, 30, 10, -10, -30, -50, -50, -50])
    assert np.abs(np.diff(at)).max() <= 20 + 1e-4
    assert theirs == [False] * 2 + [True] * 7 + [False] * 7
    assert handover == [False] * 2 + [True] * 4 + [False] * 3 + [True] * 4 + [False] * 3


def test_a_demonstration_begins_where_the_robot_is_and_once_the_leader_has_moved():
    robot = Follower()
    intervention = led(ramp=4, demonstrate=True, robot=robot)
    hold, before, at, driven = np.array([10, 0], np.float32), None, [], []
    for place in (46, 46.5, 47.5, 50, 50, 50, 50, 50):
        robot.seen = {"leader": np.array([place, 0], np.float32)}
        before, is_theirs = intervention.drive(None, hold, before)
        assert is_theirs
        at.append(before[0])
        driven.append(intervention.is_driven)
    assert at == pytest.approx([10, 10, 10, 20, 30, 40, 50, 50])
    assert driven == [False] * 3 + [True] * 5, "a leader that trembles by less than a hundredth of its range is at rest"


def test_what_ends_in_a_demonstration_is_not_begun_again_by_a_leader_that_has_moved(clock):
    robot = Follower()
    hands = Hands([Leader(robot), Scripted(*[Hand()] * 4, TOGGLE)], robot.action, robot.space)
    hands.reset(0, demonstrate=True)
    hold, seen = np.zeros(2, np.float32), []
    for place in (0, 9, 9, 9, 5):
        robot.seen = {"leader": np.array([place, 0], np.float32)}
        seen.append(hands.read(hold))
        assert hands.poll() == (["moved"] if place else [])
    assert [wanted is not None for wanted in seen] == [False, True, False, False, False]


def test_a_gripper_key_that_was_pressed_in_a_pause_acts_at_no_later_takeover(clock):
    words = ["take over"]
    hands = at_policy(Scripted(Hand(gripper=-1, words=words), Hand(), Hand({"x": 1.0}, words=words)))
    hands.poll()
    clock.sleep(30)
    assert hands.read(HOLD) is None
    clock.sleep(30)
    assert hands.read(np.array([0, 0, 0, 1], np.float32)).tolist() == [0.5, 0, 0, 1]


def test_a_leader_comes_where_a_question_begins_and_stays_in_the_hand_that_took_it(monkeypatch):
    robot, led = Follower(), []
    monkeypatch.setattr(robot, "lead", lambda *, follows: led.append("follow" if follows else "let go"))
    monkeypatch.setattr(robot, "hold_leader", lambda holds: led.append("stay" if holds else "come"))
    hands = Hands([Leader(robot), Scripted(Hand(words=["toggle"]))], robot.action, robot.space)
    hands.forget()
    hands.look()
    hands.forget(hands_back=False)  # somebody has paused meanwhile
    hands.reset(0, demonstrate=True)
    assert led == ["follow", "come", "let go", "stay", "stay"]
    hands.forget()
    hands.reset(0, demonstrate=False)
    assert led[5:] == ["follow", "come", "follow", "come"]


def test_each_demonstration_waits_until_the_leader_moves_wherever_it_stands(spec):
    robot = Follower()
    hands = Hands([Leader(robot), Scripted(*[Hand()] * 20)], robot.action, robot.space)
    person, moved = Person(StageKeys(hands, 1), FakeClient(spec), ActorStatus()), []
    hands.reset(0, demonstrate=True)
    for places in ((0, 40), (40, 40, 43)):  # a demonstration, after which it stands elsewhere; and the next one
        for place in places:
            robot.seen = {"leader": np.array([place, 0], np.float32)}
            person.listen()
            moved.append(person.has_moved)
        person.ask()
    assert moved == [False, True, False, False, True]


def test_a_policy_that_is_silent_at_a_hand_back_holds_and_is_led_over_once_it_speaks():
    intervention = led(Scripted(TOGGLE, Hand(), TOGGLE), ramp=2)
    policy, before, at = np.array([0, 0], np.float32), np.array([50, 0], np.float32), []
    for proposed in (policy, policy, None, None, policy, policy):
        before, _ = intervention.drive(proposed, before, before)
        at.append(before[0])
    assert at == pytest.approx([50, 50, 50, 50, 25, 0])
