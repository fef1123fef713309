"""Cameras: what those of the embedded arm show, how old an image is, and a machine that cannot draw."""

import logging
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf
from serl_client.controller import RandomPolicy
from serl_client.episode import Segment, Stamp, join
from serl_client.errors import ConfigError
from serl_client.recorder import SEGMENT_BYTES, Recorder, segment_rows
from serl_client.runner import run_actor
from serl_client.spec import Feature

from robot_infra.cameras import gl
from robot_infra.env import RobotEnv
from robot_infra.interfaces import Frame, Verdict
from robot_infra.robots.fake import FakeRobot
from robot_infra.robots.sim_arm import make

TASKS = Path(__file__).parents[2] / "config" / "task"
CAMERAS = ["cam_high", "cam_wrist"]
IMAGES = [f"observation.images.{name}" for name in CAMERAS]
HOLD = np.zeros(4, np.float32)


class Clock:
    """Stands in for the module time."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now


class LateCamera:
    """A camera whose frames are as old as its `delays` say, in seconds; each image holds its number."""

    feature = Feature((4, 6, 3), "uint8")

    def __init__(self, clock, delays):
        self._clock, self._delays, self._number = clock, delays, 0

    def latest(self):
        image = np.full((4, 6, 3), self._number, np.uint8)
        self._number += 1
        return Frame(image, self._clock.now - self._delays[self._number - 1])

    def close(self):
        pass


class Client:
    """Keeps what a Recorder pushes, and asks an actor for episodes until one has ended."""

    actor, session, ordinal, has_room, step_limit, fault = "robot", "0123456789abcdef", 0, True, None, ""
    pending = 0, 0

    def __init__(self, spec):
        self.spec, self.segments = spec, []

    @property
    def directive(self):
        ended = bool(self.segments) and self.segments[-1].ends
        return {"number": 1 + ended, "phase": "practise", "mode": "stop" if ended else "collect"}

    def push(self, record):
        if isinstance(record, Segment):
            self.segments.append(record)

    def drain(self, timeout):
        return True


@pytest.fixture
def unprobed(monkeypatch):
    """No answer is kept from other tests, or for them."""
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    gl.backend.cache_clear()
    yield
    gl.backend.cache_clear()


@pytest.fixture
def python(tmp_path, monkeypatch, unprobed):
    """Puts a shell script in the place of the interpreter that tries OpenGL."""

    def replace(script):
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))

    return replace


@pytest.fixture
def arm():
    """Makes the arm as an Env with its cameras, closed in the end."""
    pytest.importorskip("mujoco")
    if not gl.backend():
        pytest.skip("no OpenGL: apt-get install libegl1 libosmesa6")
    envs = []

    def build(**changes):
        arguments = {"max_steps": 60, "noise": 0.0, "clock": "simulated", "cameras": True}
        envs.append(make(**(arguments | changes)))
        return envs[-1]

    yield build
    for env in envs:
        env.close()


def never(observation):
    return Verdict(0.0, False, False)


# -- what the arm's cameras show


def test_the_arm_has_two_cameras_whose_images_the_spec_describes(arm):
    env = arm()
    assert sorted(env.spec.observation) == [*IMAGES, "observation.state"]
    assert {"age.cam_high", "age.cam_wrist"} < set(env.spec.extras)
    for observation in (env.reset(0), env.step(HOLD).observation):
        for name in IMAGES:
            assert env.spec.observation[name].shape == (128, 128, 3)
            env.spec.observation[name].check(name, observation[name])
            assert observation[name].flags.c_contiguous


def test_the_cameras_are_off_unless_they_are_asked_for(monkeypatch):
    pytest.importorskip("mujoco")
    monkeypatch.setattr(gl, "backend", lambda: pytest.fail("nobody asked for cameras"))
    config = OmegaConf.create({"task": OmegaConf.load(TASKS / "sim_arm.yaml")})
    with instantiate(config.task.env)() as env:
        assert sorted(env.spec.observation) == ["observation.state"]
        assert sorted(env.spec.extras) == ["policy_action"]


def test_the_task_yaml_turns_them_on_and_names_their_size(arm):
    arm()
    task = OmegaConf.merge(OmegaConf.load(TASKS / "sim_arm.yaml"), {"cameras": True, "image_size": 64})
    with instantiate(OmegaConf.create({"task": task}).task.env)() as env:
        assert [env.reset(0)[name].shape for name in IMAGES] == [(64, 64, 3)] * 2


@pytest.mark.parametrize("size", [0, 4000])
def test_an_image_size_that_no_policy_wants_is_refused(arm, size):
    with pytest.raises(ConfigError, match="image_size"):
        arm(image_size=size)


@pytest.mark.parametrize("name", IMAGES)
def test_the_block_is_seen_and_where_it_lies(arm, name):
    env = arm()
    seen = []
    for seed in range(8):
        image = env.reset(seed)[name].astype(int)
        red = (image[..., 0] > 100) & (image[..., 1:].max(-1) < 60)
        assert red.sum() >= 15, f"start {seed} hides the block from {name}"
        seen.append(np.argwhere(red).mean(0))
    assert np.ptp(np.stack(seen), axis=0).min() > 3, "pixels"


def test_both_cameras_see_the_fingers_close(arm):
    env = arm()
    before = env.reset(1)
    for _ in range(3):
        after = env.step(np.array([0, 0, 0, 1], np.float32)).observation
    for name in IMAGES:
        assert (np.abs(before[name].astype(int) - after[name]).max(-1) > 30).sum() > 5


def test_a_seed_names_its_images_whoever_drew_in_between(arm):
    env, other = arm(), arm(image_size=32)
    first = [env.reset(3)] + [env.step(HOLD).observation for _ in range(2)]
    other.reset(4)
    env.reset(5)
    again = [env.reset(3)] + [env.step(HOLD).observation for _ in range(2)]
    for name in IMAGES:
        np.testing.assert_array_equal([row[name] for row in first], [row[name] for row in again])
        assert (first[0][name] != env.reset(5)[name]).any()


def test_rows_keep_their_images(arm):
    env = arm()
    kept = env.reset(0)
    copies = {name: kept[name].copy() for name in IMAGES}
    env.reset(1)
    for name in IMAGES:
        np.testing.assert_array_equal(kept[name], copies[name])


def test_the_block_can_be_left_to_the_cameras(arm):
    env = arm(block_in_state=False)
    feature = env.spec.observation["observation.state"]
    assert not [name for name in feature.names if name.startswith(("block", "way"))]
    feature.check("observation.state", env.reset(0)["observation.state"])
    whole = arm()
    kept = [name in feature.names for name in whole.spec.observation["observation.state"].names]
    np.testing.assert_array_equal(whole.reset(0)["observation.state"][kept], env.reset(0)["observation.state"])


def test_a_block_that_nothing_shows_is_refused():
    pytest.importorskip("mujoco")
    with pytest.raises(ConfigError, match=r"task\.cameras=true"):
        make(max_steps=60, noise=0.0, clock="simulated", block_in_state=False)


def test_closing_frees_the_context_and_others_go_on(arm):
    one, two = arm(), arm()
    image = two.reset(0)[IMAGES[0]]
    renderer = one.cameras[IMAGES[0]]._renderer
    one.close()
    one.close()
    assert renderer._context is None
    np.testing.assert_array_equal(two.reset(0)[IMAGES[0]], image)
    for _ in range(20):
        arm(image_size=16).close()


@pytest.mark.parametrize("backend", gl.BACKENDS)
def test_each_backend_draws_the_scene_and_leaves_without_a_word(backend, monkeypatch):
    pytest.importorskip("mujoco")
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    if not gl._draws(backend):
        pytest.skip(f"no {backend}: apt-get install libegl1 libosmesa6")
    code = (
        "import mujoco, numpy as np\n"
        "from robot_infra.robots.sim_arm import SimArm\n"
        f"cameras = SimArm().cameras({backend!r}, size=64)\n"
        "assert all(camera.latest().image.std() > 20 for camera in cameras.values())\n"
        "[camera.close() for camera in cameras.values()]\n"
    )
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


# -- a machine that cannot draw


@pytest.mark.parametrize("script", ["exit 1", "kill -ABRT $$", "exec sleep 60"], ids=["fails", "aborts", "hangs"])
def test_a_backend_that_fails_in_the_child_counts_as_absent(python, monkeypatch, script):
    monkeypatch.setattr(gl, "PATIENCE", 0.2)
    python(script)
    assert gl.backend() == ""


def test_the_first_backend_that_draws_is_taken(python):
    python("exit 0")
    assert gl.backend() == "egl"


def test_osmesa_is_taken_where_egl_does_not_draw(python):
    python('case "$2" in *osmesa*) exit 0;; esac\nexit 1')
    assert gl.backend() == "osmesa"


def test_where_mujoco_was_told_its_backend_no_other_is_tried(python, monkeypatch):
    python('case "$2" in *osmesa*) exit 0;; esac\nexit 1')
    monkeypatch.setenv("MUJOCO_GL", "egl")
    assert gl.backend() == ""
    gl.backend.cache_clear()
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    assert gl.backend() == "osmesa"


def test_required_cameras_that_cannot_be_are_one_sentence(python):
    pytest.importorskip("mujoco")
    python("exit 1")
    with pytest.raises(ConfigError, match="apt-get install libegl1 libosmesa6"):
        make(max_steps=5, noise=0.0, clock="simulated", cameras=True)


def test_optional_cameras_that_cannot_be_are_one_sentence_and_the_run_goes_on(python, caplog):
    pytest.importorskip("mujoco")
    python("exit 1")
    with caplog.at_level(logging.WARNING), make(max_steps=5, noise=0.0, clock="simulated", cameras="auto") as env:
        assert sorted(env.reset(0)) == ["observation.state"]
    (record,) = caplog.records
    assert "apt-get install libegl1 libosmesa6" in record.getMessage()


def test_an_unknown_word_for_cameras_is_refused():
    with pytest.raises(ConfigError, match="true, false or auto"):
        gl.chosen("yes please")


# -- ages and rows


def test_each_row_holds_the_age_of_its_own_images(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("robot_infra.env.time", clock)
    cameras = {"a": LateCamera(clock, [0.01, 0.02, 0.5]), "b": LateCamera(clock, [0.0, 0.1, 0.2])}
    env = RobotEnv(FakeRobot(), judge=never, task="test", fps=10, max_steps=9, clock="simulated", cameras=cameras)
    client = Client(env.spec)
    recorder = Recorder(client, "e", "test")
    observation, stamp = env.reset(0), Stamp(1, "practise", 0)
    for _ in range(2):
        observed, clock.now = clock.now, clock.now + 0.1
        step = env.step(np.zeros(2, np.float32))
        recorder.add(stamp, observation, observed, step, step.extras, chunk_start=False, chunk_delay=0, gap=False)
        observation = step.observation
    recorder.end(terminated=False)
    (segment,) = client.segments
    segment.check(env.spec)
    assert segment.observation["observation.images.a"][:, 0, 0, 0].tolist() == [0, 1, 2]
    np.testing.assert_allclose(segment.extras["age.a"], [0.01, 0.02], rtol=1e-4)
    np.testing.assert_allclose(segment.extras["age.b"], [0.0, 0.1], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(segment.time, [100.0, 100.1])


def test_an_image_was_taken_its_age_before_the_time_of_its_row():
    taken = []

    class Camera:
        feature = Feature((4, 6, 3), "uint8")

        def latest(self):
            taken.append(time.monotonic() - 0.03)
            return Frame(np.full((4, 6, 3), len(taken) - 1, np.uint8), taken[-1])

        def close(self):
            pass

    with RobotEnv(FakeRobot(), judge=never, task="test", fps=10, max_steps=4, cameras={"a": Camera()}) as env:
        client = Client(env.spec)
        run_actor(env, RandomPolicy(env.spec, 0), client, seed=0)
    episode = join(client.segments)
    numbers = episode.observation["observation.images.a"][:, 0, 0, 0]
    assert numbers.tolist() == [0, 1, 2, 3, 4]
    np.testing.assert_allclose(episode.time - episode.extras["age.a"], taken[:4], rtol=0, atol=0.04)
    assert (episode.extras["age.a"] >= 0.03).all()


def test_images_that_are_drawn_on_demand_are_new(arm):
    env = arm()
    env.reset(0)
    step = env.step(HOLD)
    for name in CAMERAS:
        age = step.extras[f"age.{name}"]
        env.spec.extras[f"age.{name}"].check(name, age)
        assert 0 <= age < 0.5


def test_an_episode_with_images_comes_in_segments_and_whole(arm):
    env = arm()
    rows = segment_rows(env.spec)
    assert rows == 5, "half a second"
    assert rows * sum(feature.nbytes for feature in env.spec.observation.values()) < SEGMENT_BYTES
    client, seen = Client(env.spec), []
    recorder, stamp = Recorder(client, "e", env.task), Stamp(1, "demonstrate", 0)
    observation = env.reset(0, teleop=True)
    while not recorder.ended:
        seen.append(observation)
        step = env.step(None)
        recorder.add(stamp, observation, 0.0, step, step.extras, chunk_start=False, chunk_delay=0, gap=False)
        observation = step.observation
        if step.terminated or step.truncated:
            recorder.end(terminated=step.terminated)
        elif recorder.is_full:
            recorder.flush()
    for segment in client.segments:
        segment.check(env.spec)
    whole = join(client.segments)
    assert step.success
    assert len(client.segments) > 1
    for name in IMAGES:
        np.testing.assert_array_equal(
            whole.observation[name], np.stack([*(row[name] for row in seen), observation[name]])
        )
