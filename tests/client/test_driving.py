"""Who drives from the page, one person at a time, and which of their inputs still count, by the actor's own clock."""

import numpy as np
import pytest
from serl_client import driving
from serl_client.driving import BACK, LEAVE, PAUSED, TAKE, Drive, DriverUpdate, RemoteDriver
from serl_client.errors import MessageError

from tests.shared.actors import STATE, CountingEnv, Desk, FakeClient, run

CAMERA = "observation.images.front"
PUSH, REST = {"x": 1.0}, {}


@pytest.fixture
def remote():
    return RemoteDriver()


@pytest.fixture
def anna(remote, clock):
    """She has taken over, and was told so."""
    anna = Desk(remote)
    anna.say(TAKE)
    assert remote.read() == (REST, 0, [TAKE])
    assert [(update.holder, update.number) for update in anna.told()] == [("page/anna", 1)]
    return anna


def test_an_input_counts_for_300_ms_after_its_receipt_and_then_the_arm_holds(anna, remote, clock):
    anna.say(motion=PUSH, gripper=1)
    clock.advance(driving.INPUT_S)
    assert remote.read() == (PUSH, 1, [])
    clock.advance(0.001)
    assert remote.read() == (REST, 0, [])
    assert remote.holder == "page/anna", "a short silence costs the motion, not the controls"
    clock.advance(driving.SILENT_S)
    assert remote.read() == (REST, 0, [])
    assert remote.holder == ""
    assert [(update.holder, "take over again" in update.text) for update in anna.told()] == [("", True)]
    anna.say(motion=PUSH)
    assert remote.read() == (REST, 0, []), "the policy's turn, or nobody's: only a press begins"


def test_an_input_that_a_link_has_held_up_moves_nothing_and_hands_nothing_back(anna, remote, clock):
    clock.advance(driving.AGE_S + 0.001)
    for press in ("", BACK):
        anna.say(press, PUSH)
        assert remote.read() == (REST, 0, [])
    assert [(update.holder, "too slow" in update.text) for update in anna.told()] == [("page/anna", True)]
    anna.say("", PUSH, seen=99)  # of the future
    assert remote.read() == (REST, 0, [])
    anna.say("", PUSH)
    assert remote.read() == (PUSH, 0, [])


def test_an_older_input_does_not_undo_a_newer_one(anna, remote):
    anna.say("", REST)
    anna.say("", PUSH, number=anna.number - 1)
    assert remote.read() == (REST, 0, [])


@pytest.mark.parametrize("press", [BACK, LEAVE])
def test_whoever_lets_go_drives_no_more(anna, remote, press):
    anna.say("", PUSH)
    anna.say(press, PUSH)
    assert remote.read() == (REST, 0, [press] * (press == BACK))
    assert (remote.holder, [update.holder for update in anna.told()]) == ("", [""])


def test_of_two_people_one_drives_and_the_other_is_told_who(anna, remote):
    bert = Desk(remote, "page/bert")
    for press in (TAKE, "", BACK):
        bert.say(press, PUSH)
    anna.say("", {"y": -1.0})
    assert remote.read() == ({"y": -1.0}, 0, [])
    assert {(update.holder, update.text) for update in bert.told()} == {("page/anna", "somebody else drives")}
    anna.say(LEAVE)
    bert.say(TAKE)
    assert remote.read() == (REST, 0, [TAKE])
    assert remote.holder == "page/bert"


def test_while_something_hinders_them_nobody_takes_over_and_who_drove_takes_over_anew(anna, remote):
    remote.hindrance = PAUSED
    anna.say("", PUSH)
    anna.say(TAKE, PUSH)
    assert remote.read() == (REST, 0, [])
    assert {(update.holder, update.text) for update in anna.told()} == {("", PAUSED)}
    remote.hindrance = ""
    anna.say("", PUSH)
    assert remote.read() == (REST, 0, [])
    anna.say(TAKE)
    assert remote.read("somebody is there") == (REST, 0, [])
    anna.say(TAKE)
    assert remote.read() == (REST, 0, [TAKE])


def test_the_newest_images_go_out_small_and_only_once_those_before_were_seen(anna, remote, clock):
    images = []
    for shade in range(4):
        clock.advance(driving.TELL_S)
        images += [update.arrays for update in anna.told({CAMERA: np.full((480, 640, 3), shade, np.uint8)})]
        if shade == 1:
            anna.say()  # has seen it; what came meanwhile was dropped
            remote.read()
    assert [sorted(each) for each in images] == [[CAMERA], [], [CAMERA], []]
    (image,) = images[2].values()
    assert (image.shape, image.min(), image.max()) == ((160, 214, 3), 2, 2)


def test_what_waits_is_bounded_and_nobody_is_sent_images_unasked(anna, remote, clock):
    for _ in range(1000):
        anna.say("", PUSH)
        Desk(remote, "page/bert").say(TAKE)
    assert remote.read()[0] == PUSH
    assert len(list(remote.updates())) <= 32
    anna.say(LEAVE)
    remote.read()
    clock.advance(driving.TELL_S)
    assert [update.arrays for update in anna.told({CAMERA: np.zeros((4, 4, 3), np.uint8)})] == [{}]


def test_the_control_loop_shows_the_driver_each_observation(spec):
    client, shown = FakeClient(spec), []
    client.remote = RemoteDriver()
    client.remote.show = lambda observation: shown.append(observation and int(observation[STATE][0]))
    run(CountingEnv(spec, length=3), client, episodes=1)
    assert [each for each in shown if each is not None] == [0, 1, 2, 3]
    assert client.reported["remote"] == ""


GOOD = {"actor": "a", "driver": "d", "number": 1, "seen": 0, "press": "", "motion": PUSH, "gripper": 0}


@pytest.mark.parametrize(
    "wrong",
    [{"motion": {"x": 1.01}}, {"motion": {"x": float("nan")}}, {"motion": {"x": True}}, {"motion": {"x": "1"}},
     {"motion": {"gripper": 1.0}}, {"motion": {1: 1.0}}, {"gripper": 2}, {"press": "go"}, {"number": 0}, {"seen": -1},
     {"driver": "a\nb"}, {"actor": "x" * 201}],
    ids=repr,
)  # fmt: skip
def test_what_no_person_could_do_is_refused(wrong):
    driving.check_drive(Drive(**GOOD))
    with pytest.raises(MessageError):
        driving.check_drive(Drive(**{**GOOD, **wrong}))


@pytest.mark.parametrize(
    "arrays",
    [{"a": np.zeros((241, 2, 3), np.uint8)}, {"a": np.zeros((2, 2, 4), np.uint8)}, {"a": np.zeros((2, 2, 3))},
     {"a": np.zeros((0, 2, 3), np.uint8)},
     {"\x1b": np.zeros((2, 2, 3), np.uint8)}, {str(i): np.zeros((2, 2, 3), np.uint8) for i in range(5)}],
)  # fmt: skip
def test_what_is_no_preview_is_refused(arrays):
    with pytest.raises(MessageError):
        driving.check_update(DriverUpdate("d", "", "", 0, 0, arrays))
