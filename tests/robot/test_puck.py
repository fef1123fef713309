"""The puck: what its picture shows and what not, and that one who knows its speed stops it where another cannot."""

import numpy as np

from robot_infra.tasks.puck import CAMERA, IMAGES, SIZE, make


def played(policy, seeds=range(5)):
    """The mean return of a policy [position, velocity] -> action."""
    env, total = make(max_steps=40, clock="simulated"), 0.0
    puck = env.robot
    for seed in seeds:
        env.reset(seed)
        for step in range(40):
            made = env.step(np.clip(policy(puck.position, puck.velocity), -1, 1))
            total += made.reward
            assert made.truncated == (step == 39)
    return total / len(seeds)


def test_a_picture_shows_where_the_puck_is_and_not_how_fast_it_moves():
    env = make(max_steps=40, clock="simulated")
    seen = env.reset(3)[IMAGES + CAMERA]
    puck = env.robot
    assert (seen.shape, seen.dtype) == ((SIZE, SIZE, 3), np.uint8)
    row, column = np.unravel_index(seen[..., 0].argmax(), (SIZE, SIZE))
    np.testing.assert_allclose(puck.position, (np.array([column, row]) + 0.5) / SIZE * 2 - 1, atol=1.5 / SIZE)
    puck.velocity = -puck.velocity
    np.testing.assert_array_equal(puck.picture(), seen)


def test_a_cushion_takes_the_speed_and_an_action_pushes():
    env = make(max_steps=40, clock="simulated")
    env.reset(0)
    puck = env.robot
    puck.position, puck.velocity = np.array([0.95, 0.0]), np.array([1.0, 0.5])
    env.step(np.array([0.0, 1.0], np.float32))
    np.testing.assert_allclose(puck.position, [1.0, 0.08])
    np.testing.assert_allclose(puck.velocity, [0.0, 0.8])


def test_who_knows_the_speed_stops_it_and_who_sees_the_place_alone_does_not():
    both = played(lambda position, velocity: -2 * position - 1.5 * velocity)
    alone = [played(lambda position, velocity, gain=gain: -gain * position) for gain in (-1, 0, 0.3, 1, 3)]
    assert both > -8
    assert max(alone) < -16
