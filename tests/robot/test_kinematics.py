"""Kinematics: poses, Jacobians, the way back to the joints, and what happens where an arm loses a direction."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from robot_infra.kinematics import NOVA2, Chain, at, jacobian_of, moved, twist

MOST = 0.1
ANGLE = st.floats(-3, 3)
SINGULAR = {"wrist": [4], "elbow": [2], "both": [2, 4], "upright": [*range(6)]}  # joints at 0: a direction is lost


def test_with_all_joints_at_zero_the_arm_stands_upright():
    pose = Chain(NOVA2, base=at(x=1.0), tool=at(z=0.13)).pose(np.zeros(6))
    np.testing.assert_allclose(pose[:3, 3], [1, -0.3355, 0.8484], atol=1e-9)
    np.testing.assert_allclose(pose[:3, 2], [0, -1, 0], atol=1e-9)


def test_joints_come_back_from_five_thousand_poses_to_a_tenth_of_a_millimetre():
    chain, random = Chain(NOVA2, tool=at(z=0.13)), np.random.default_rng(0)
    joints = random.uniform(-np.pi, np.pi, (5_000, 6))
    goals, start = chain.pose(joints), joints + random.uniform(-MOST, MOST, joints.shape)
    found = chain.toward(start, goals)
    assert np.abs(twist(chain.pose(found), goals)).max() < 1e-4
    assert np.abs(twist(chain.pose(start), goals))[:, :3].max() > 0.05, "there was a way to go"


@settings(max_examples=50)
@given(st.tuples(*[ANGLE] * 6), st.integers(0, 5))
def test_the_jacobian_is_what_a_small_turn_does(joints, which):
    chain, joints, small = Chain(NOVA2, tool=at(z=0.13)), np.array(joints), np.eye(6)[which] * 1e-5
    turned = twist(chain.pose(joints - small), chain.pose(joints + small)) / 2e-5
    np.testing.assert_allclose(jacobian_of(chain.frames(joints))[:, which], turned, atol=1e-6)


@settings(max_examples=50)
@given(st.tuples(*[ANGLE] * 6), st.tuples(*[st.floats(-1, 1)] * 6))
def test_a_twist_leads_where_it_says(joints, way):
    pose = Chain(NOVA2).pose(np.array(joints))
    np.testing.assert_allclose(twist(pose, moved(pose, np.array(way))), way, atol=1e-9)


@pytest.mark.parametrize("name", SINGULAR)
def test_where_a_direction_is_lost_the_arm_slows_down_and_never_jumps(name):
    """Steps along straight lines, from 200 poses that are singular, or nearly so."""
    chain, random = Chain(NOVA2, tool=at(z=0.13)), np.random.default_rng(0)
    joints = random.uniform(-3, 3, (200, 6))
    joints[:, SINGULAR[name]] = random.choice([0, 1e-9, 1e-4], (200, 1))
    way = random.uniform(-0.03, 0.03, (200, 6))
    for _ in range(5):
        here = chain.pose(joints)
        goal = moved(here, way)
        found = chain.toward(joints, goal, MOST)
        assert np.abs(found - joints).max() <= MOST + 1e-12
        left = np.linalg.norm(twist(chain.pose(found), goal), axis=-1)
        assert (left <= np.linalg.norm(way, axis=-1) + 1e-9).all()
        joints = found
    assert (left > 1e-3).any(), "some of them could not follow"
