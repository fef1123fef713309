"""Images that do not belong to their row: a camera that is frozen, late, blocking or gone; the first row."""

import re
import threading
from functools import partial

import numpy as np
import pytest
from serl_client.errors import ConfigError, RobotFault

from robot_infra.cameras import threaded
from robot_infra.cameras.threaded import ThreadedCamera
from tests.shared.actors import FakeClient, run
from tests.shared.common import until
from tests.shared.robots import RIGHT, build

FPS = 20.0
BOUND = 2 / FPS


class Sensor:
    """A camera's driver: `noise` in each image, one whenever the clock passes, and what a test makes it do."""

    def __init__(self, clock, shape=(6, 8, 3)):
        self.clock, self.shape, self.opened, self.closed = clock, shape, 0, 0
        self.state, self._random, self._taken = "well", np.random.default_rng(0), -1.0
        self._image = self._random.integers(0, 255, shape, np.uint8)
        self._changed, self._waits = threading.Condition(), False

    def open(self):
        if self.state == "gone":
            raise OSError("no such device")
        self.opened, self._taken = self.opened + 1, -1.0
        return self

    def read(self):
        with self._changed:
            self._waits = True
            self._changed.wait_for(self._goes_on)
            self._waits, self._taken = False, self.clock.now
        if self.state in ("gone", "dying"):
            raise OSError("the device was unplugged")
        if self.state != "frozen":
            self._image = self._random.integers(0, 255, self.shape, np.uint8)
        return self._image

    def _goes_on(self):
        return self.state in ("gone", "dying") or (self.state != "blocking" and self.clock.now > self._taken)

    def close(self):
        self.closed += 1

    def become(self, state):
        with self._changed:
            self.state = state
            self._changed.notify_all()

    def keep_up(self, camera):
        """Wait until the camera has an image of now, unless there is none."""
        with self._changed:
            self._changed.notify_all()
        until(lambda: camera.trouble or (self._waits and not self._goes_on()))


@pytest.fixture
def sensor(monkeypatch, clock):
    monkeypatch.setattr(threaded, "AGAIN", 0.01)
    monkeypatch.setattr(threaded, "ENDING", 0.01)
    made = Sensor(clock)
    yield made
    made.become("gone")


@pytest.fixture
def camera(sensor, clock):
    made = ThreadedCamera("wrist", sensor.open)
    clock.passed = partial(sensor.keep_up, made)
    yield made
    sensor.become("gone")
    made.close()


@pytest.fixture
def env(camera, closes):
    return closes(build(cameras={"wrist": camera}, clock="real", fps=FPS, max_steps=10_000))


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        ("frozen", r"camera wrist: its image has not changed for 1\.0 s, so it is frozen"),
        ("blocking", r"camera wrist: its newest image is 0\.1[05] s old"),
        ("dying", r"camera wrist: its newest image is 0\.1[05] s old \(OSError: the device was unplugged\)"),
    ],
)
def test_a_camera_that_fails_cuts_the_episode_off_before_a_row_is_late(env, sensor, caplog, clock, state, sentence):
    client, sent = FakeClient(env.spec), []
    command = env.robot.command

    def commanded(action):
        sent.append(clock.now)
        if len(sent) == 8:
            sensor.become(state)
        return command(action)

    env.robot.command = commanded
    run(env, client, episodes=1)
    (episode,) = client.episodes
    assert episode.truncated
    assert 6 <= len(episode) < 30
    assert episode.extras["age.wrist"].max() <= BOUND + 1e-6
    warned = [record.getMessage() for record in caplog.records if "is cut off before row" in record.getMessage()]
    assert len(warned) == 1
    assert re.search(sentence, warned[0]), warned
    assert np.diff(sent[: len(episode) + 1]) == pytest.approx(1 / FPS), "a camera that blocks delays no step"


def test_the_first_row_waits_for_an_image_that_was_taken_after_the_way_home(env, camera, sensor, clock):
    sensor.become("blocking")
    clock.advance(0.05)
    old, begun = camera.latest(), clock.now

    def heals():
        if clock.now > begun + 0.2:
            sensor.become("well")
        sensor.keep_up(camera)

    clock.passed = heals
    observation = env.reset(0)
    assert camera.latest().time > begun + 0.2
    assert not np.array_equal(observation["observation.images.wrist"], old.image)


def test_an_episode_without_any_new_image_does_not_begin_and_says_why(env, camera, sensor):
    sensor.become("gone")
    until(lambda: camera.trouble)
    with pytest.raises(
        RobotFault, match=r"camera wrist gives no image \(OSError: (the device|no such).*look at its"
    ) as error:
        env.reset(0)
    assert error.value.kind == "camera"


def test_a_camera_that_was_unplugged_goes_on_once_it_is_back(env, camera, sensor):
    sensor.become("gone")
    until(lambda: camera.trouble)
    sensor.become("well")
    until(lambda: not camera.trouble)
    env.reset(0)
    assert not env.step(RIGHT).stale
    assert sensor.opened == sensor.closed + 1


def test_a_camera_that_changes_its_size_or_gives_no_image_is_in_trouble(camera, sensor, clock):
    sensor.shape = (12, 16, 3)
    clock.advance(0.1)
    until(lambda: camera.trouble)
    assert camera.trouble == "ValueError: it gives images of [12, 16], and first gave [6, 8]"
    assert camera.latest().image.shape == (6, 8, 3)
    sensor.shape = (6, 8)
    until(lambda: "uint8 [6, 8], and an image is" in camera.trouble)
    sensor.shape = (6, 8, 3)
    until(lambda: not camera.trouble)


def test_an_image_in_simulated_time_is_never_late(camera, sensor, clock):
    env = build(cameras={"wrist": camera}, fps=FPS)
    sensor.become("blocking")
    clock.advance(3 * BOUND)
    env.reset(0)
    assert not env.step(RIGHT).stale
    env.close()


def test_a_rows_time_is_that_of_its_state_and_the_age_counts_from_there(env, monkeypatch, clock):
    observe, measured = env.robot.observe, []

    def late():
        reading = observe()
        measured.append(reading.time)
        clock.sleep(0.02)
        return reading

    monkeypatch.setattr(env.robot, "observe", late)
    client = FakeClient(env.spec)
    env._max_steps = 5
    run(env, client, episodes=1)
    (episode,) = client.episodes
    assert episode.time.tolist() == measured[:5]
    assert (episode.extras["age.wrist"] < 0.01).all(), "the images came while the state was under way"


def halved(image):
    return image.reshape(len(image) // 2, 2, -1, 2, 3).mean(axis=(1, 3))


@pytest.mark.parametrize(
    ("cut", "expected", "name"),
    [
        ({}, lambda whole: whole, ""),
        ({"crop": [1, 2, 4, 5]}, lambda whole: whole[1:5, 2:7], "crop [1, 2, 4, 5]"),
        ({"size": [3, 4]}, halved, "whole image"),
        ({"crop": [0, 0, 4, 4], "size": [2, 2]}, lambda whole: halved(whole[:4, :4]), "crop [0, 0, 4, 4]"),
    ],
)
def test_a_crop_is_the_part_that_it_names_a_size_averages_and_both_stand_in_the_spec(sensor, cut, expected, name):
    sensor.state = "frozen"
    camera = ThreadedCamera("front", sensor.open, **cut)
    feature, image, expected = camera.feature, camera.latest().image, expected(sensor._image)
    camera.close()
    names = ("height", "width", "channel", name) if name else ()
    assert (feature.shape, feature.dtype, feature.names) == (expected.shape, "uint8", names)
    feature.check("image", image)
    assert image.flags.c_contiguous
    np.testing.assert_allclose(image, expected, atol=0.51)


@pytest.mark.parametrize(
    ("cut", "said"),
    [
        ({"crop": [0, 0, 7, 8]}, r"crop \[0, 0, 7, 8\] lies outside of an image of \[6, 8\]"),
        ({"crop": [0, 0, 4, 9]}, r"crop \[0, 0, 4, 9\] lies outside of an image of \[6, 8\]"),
        ({"crop": [0, 0, 4]}, "crop of a camera should be 4 whole numbers"),
        ({"size": [2.5, 4]}, "size of a camera should be 2 whole numbers"),
    ],
)
def test_a_cut_that_cannot_be_is_one_sentence(sensor, cut, said):
    with pytest.raises(ConfigError, match=said):
        ThreadedCamera("front", sensor.open, **cut)


def test_a_camera_that_never_answers_is_one_sentence(sensor, monkeypatch):
    sensor.become("blocking")
    with monkeypatch.context() as patch:
        patch.setattr(threaded, "OPENING", 0.01)
        with pytest.raises(ConfigError, match="camera front gives no image: it does not answer"):
            ThreadedCamera("front", sensor.open)
    sensor.become("gone")
    with pytest.raises(ConfigError, match="camera front gives no image: OSError: no such device"):
        ThreadedCamera("front", sensor.open)
