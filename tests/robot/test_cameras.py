"""Cameras: what those of the embedded arm show, how old an image is, and a machine that cannot draw."""

import logging
import subprocess
import sys

import numpy as np
import pytest
from serl_client.errors import ConfigError

from robot_infra.cameras import gl
from robot_infra.tasks.sim_arm import make
from tests.shared.actors import FakeClient, run
from tests.shared.robots import FakeCamera, build, check_rows, from_yaml

IMAGES = ["observation.images.cam_high", "observation.images.cam_wrist"]
HOLD = np.zeros(4, np.float32)


@pytest.fixture
def python(tmp_path, monkeypatch):
    """Puts a shell script in the place of the interpreter that tries OpenGL; no answer is kept for other tests."""
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    gl.backend.cache_clear()

    def replace(script):
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))

    yield replace
    gl.backend.cache_clear()


@pytest.fixture
def arm(closes):
    """Makes the arm as an Env with its cameras, closed in the end."""
    pytest.importorskip("mujoco")
    if not gl.backend():
        pytest.skip("no OpenGL: apt-get install libegl1 libosmesa6")
    return lambda **changes: closes(bare(cameras=True, **changes))


def bare(**changes):
    """The arm as it is without cameras and noise, but for `changes`."""
    pytest.importorskip("mujoco")
    return make(**{"max_steps": 60, "noise": 0.0, "clock": "simulated", **changes})


# -- what the arm's cameras show


def test_the_arm_has_two_cameras_whose_images_the_spec_describes_and_which_are_new(arm):
    env = arm()
    assert sorted(env.spec.observation) == [*IMAGES, "observation.state"]
    assert [env.spec.observation[name].shape for name in IMAGES] == [(128, 128, 3)] * 2
    observation, step = env.reset(0), env.step(HOLD)
    check_rows(env, observation, step.observation)
    assert all(row[name].flags.c_contiguous for row in (observation, step.observation) for name in IMAGES)
    for name in ("age.cam_high", "age.cam_wrist"):
        env.spec.extras[name].check(name, step.extras[name])
        assert -0.5 < step.extras[name] <= 0, "it is drawn after the state was read"


def test_the_cameras_are_off_unless_they_are_asked_for(monkeypatch):
    pytest.importorskip("mujoco")
    monkeypatch.setattr(gl, "backend", lambda: pytest.fail("nobody asked for cameras"))
    with from_yaml("sim_arm") as env:
        assert sorted(env.spec.observation) == ["observation.state"]
        assert sorted(env.spec.extras) == ["policy_action"]


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


def test_the_block_can_be_left_to_the_cameras(arm):
    env = arm(block_in_state=False)
    feature = env.spec.observation["observation.state"]
    assert not [name for name in feature.names if name.startswith(("block", "way"))]
    feature.check("observation.state", env.reset(0)["observation.state"])
    whole = arm()
    kept = [name in feature.names for name in whole.spec.observation["observation.state"].names]
    np.testing.assert_array_equal(whole.reset(0)["observation.state"][kept], env.reset(0)["observation.state"])


def test_a_block_that_nothing_shows_is_refused():
    with pytest.raises(ConfigError, match=r"task\.cameras=true"):
        bare(block_in_state=False)


def test_closing_frees_the_context_and_others_go_on(arm):
    one, two = arm(), arm()
    image = two.reset(0)[IMAGES[0]]
    renderer = one.robot.guard.arm._cameras[IMAGES[0]]._renderer
    one.close()
    one.close()
    assert renderer._context is None
    np.testing.assert_array_equal(two.reset(0)[IMAGES[0]], image)
    for _ in range(20):
        arm(image_size=16).close()


@pytest.mark.slow
@pytest.mark.parametrize("backend", gl.BACKENDS)
def test_each_backend_draws_the_scene_and_leaves_without_a_word(backend, monkeypatch):
    pytest.importorskip("mujoco")
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    if not gl._draws(backend):
        pytest.skip(f"no {backend}: apt-get install libegl1 libosmesa6")
    code = (
        "import mujoco, numpy as np\n"
        "from robot_infra.tasks.sim_arm import SimArm\n"
        f"arm = SimArm('arm', hz=10, backend={backend!r}, image_size=64)\n"
        "assert all(image.std() > 20 for name, image in arm.sense().items() if 'images' in name)\n"
        "arm.close()\n"
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


ONLY_OSMESA = 'case "$2" in *osmesa*) exit 0;; esac\nexit 1'


@pytest.mark.parametrize(
    ("script", "told", "taken"),
    [
        ("exit 0", "", "egl"), (ONLY_OSMESA, "", "osmesa"), (ONLY_OSMESA, "egl", ""), (ONLY_OSMESA, "osmesa", "osmesa"),
    ],
)  # fmt: skip
def test_the_first_backend_that_draws_is_taken_or_what_mujoco_was_told(python, monkeypatch, script, told, taken):
    python(script)
    if told:
        monkeypatch.setenv("MUJOCO_GL", told)
    assert gl.backend() == taken


def test_where_cameras_are_optional_a_robot_without_any_goes_on_with_one_sentence(python, caplog):
    python("exit 1")
    with caplog.at_level(logging.WARNING), bare(cameras="auto") as env:
        assert sorted(env.reset(0)) == ["observation.state"]
    (message,) = caplog.messages
    assert "apt-get install libegl1 libosmesa6" in message


def test_an_unknown_word_for_cameras_is_refused():
    with pytest.raises(ConfigError, match="true, false or auto"):
        gl.choose_backend("yes please")


# -- ages and rows


def test_each_row_holds_the_age_of_its_own_images_which_were_taken_that_long_before(clock):
    ages = {"a": [0.01, 0.02, 0.15, 0.03, 0.0], "b": [0.0, 0.1, 0.19, 0.01, 0.18]}
    cameras = {name: FakeCamera(clock, [0.0, *delays]) for name, delays in ages.items()}  # one look is before the start
    with build(cameras=cameras, max_steps=4, clock="real") as env:
        client = FakeClient(env.spec)
        run(env, client, episodes=1)
    (episode,) = client.episodes
    np.testing.assert_allclose(episode.time, [100.0, 100.1, 100.2, 100.3])
    for name, camera in cameras.items():
        assert episode.observation[f"observation.images.{name}"][:, 0, 0, 0].tolist() == [1, 2, 3, 4, 5]
        np.testing.assert_allclose(episode.extras[f"age.{name}"], ages[name][:4], rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(episode.time - episode.extras[f"age.{name}"], camera.taken[1:5])
