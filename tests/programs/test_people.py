"""A person with a gamepad: what its bytes say is in the store and in the LeRobot export, row by row."""

import os
import struct
import time

import numpy as np
import pytest

from serl_launcher.datasets import shards
from tests.programs.hiors import assert_shards_hold_what_the_store_holds
from tests.programs.people import Person

pytestmark = [
    pytest.mark.slow, pytest.mark.skipif(bool(shards.missing()), reason="needs the extra `data`"),
]  # fmt: skip

HORIZON, FPS, SHARE = 4, 20, 0.8
WORDS = ["task=fake", "task.env.clock=real", f"task.env.fps={FPS}", "task.env.max_steps=600", "task.env.guard=true",
         "task.env.verdict_by=operator", "task.env.operator=gamepad"]  # fmt: skip
STICK, SUCCESS = (2, 1), (1, 0)  # (type, number) of a joystick's event: left stick to and fro, button A


class Pad(Person):
    """Speaks by a gamepad alone."""

    def __init__(self, folder):
        super().__init__(folder)
        self.path = folder / "js0"
        os.mkfifo(self.path)
        self._pad = os.open(self.path, os.O_RDWR)

    def tell(self, event, value):
        os.write(self._pad, struct.pack("<IhBB", 0, value, *event))

    def drive(self, phase):
        """Push the stick for 0.7 s, and let go of it for a second."""
        time.sleep(0.33)
        self.tell(STICK, round(-32767 * SHARE))
        time.sleep(0.7)
        self.tell(STICK, 0)
        time.sleep(1.0)

    def succeed(self):
        self.tell(SUCCESS, 1)
        self.tell(SUCCESS, 0)

    def end(self):
        super().end()
        os.close(self._pad)


def test_a_takeover_by_touch_in_mid_chunk_is_right_in_every_row(tmp_path):
    run = Pad(tmp_path)
    try:
        run.practised(
            [*WORDS, f"task.devices.gamepad={run.path}"],
            [f"policy.horizon={HORIZON}", "export.sources=all", "export.episodes=5"],
            [f"n_action_steps={HORIZON}", "chunks=wait", "deadline_s=0.04"],
        )
    finally:
        run.end()
    pushed = np.array([0.5 * SHARE, 0], np.float32)  # half of the bounds at full deflection
    practised = [
        episode
        for episode in run.episodes(source="online")
        # on a loaded machine a fault may end an episode before the stick is pushed, or while it is
        if episode.info.success and episode.takeovers and episode.takeovers[0][0]
    ]
    assert practised
    for episode in practised:
        ((begin, end),) = episode.takeovers
        assert begin % HORIZON or end % HORIZON or len(episode.steps) > end
        free = np.abs(episode.state[:, :2]).max(axis=1) < 0.9  # elsewhere the limits shorten each step
        touched = np.isclose(episode.action[begin:end], pushed, atol=1e-3).all(axis=1) | ~free[begin:end]
        still = np.isclose(episode.action[begin:end], 0, atol=1e-6).all(axis=1)
        if free[begin:end].all():
            count = int(np.argmax(still))  # rows until the stick was let go
            assert count >= 0.5 * FPS, "for 0.7 s the stick was pushed"
            assert touched[: count - 2].all(), "as far as it was pushed"
            assert still[count + 2 :].all()
            assert abs(end - begin - count - 0.5 * FPS) <= 2, "and half a second after it the policy drives again"
        assert episode.chunk_start[end : end + FPS].any(), "with a chunk of its own"
        assert not episode.chunk_start[begin:end].any()
        policys = free & ~episode.human
        np.testing.assert_allclose(episode.proposed[policys], episode.action[policys], atol=1e-5)
    for episode in run.episodes(source="demo"):
        assert episode.human.all()
    assert len(run.manifests()) == 2
    assert_shards_hold_what_the_store_holds(run)
