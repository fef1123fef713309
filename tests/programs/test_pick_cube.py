"""gym-hil's cube, picked up by a person at the keys: demonstrations and practice with takeovers, by words alone."""

import os
import time

import pytest

from tests.programs.people import Person

pytest.importorskip("gym_hil", reason="the extra `hil` is not installed: uv sync --inexact --extra hil")
pytestmark = pytest.mark.slow

WORDS = ["task=pick_cube", "task.env.fps=20", "task.env.options.random_block_position=false", "deadline_s=0.04"]
HOLDS = 0.05  # seconds between two repeats of a held key


class Keys(Person):
    """Picks up the cube, which lies below the hand: down, close, up, as often as it takes; the task says success."""

    def drive(self, phase):
        while self.count(phase, "NOT closed"):
            for key, times in ((b"o", 14), (b"g", 10), (b"u", 40)):
                for _ in range(times):
                    if self.count(phase, "NOT closed"):
                        self.press(key)
                        time.sleep(HOLDS)

    def succeed(self):
        """The task has said it."""


def test_gym_hils_cube_is_demonstrated_with_and_practised_with_and_says_itself_what_was_a_success(tmp_path):
    person = Keys(tmp_path, {"MUJOCO_GL": os.environ.get("MUJOCO_GL", "egl")})
    try:
        person.practised(WORDS)
    finally:
        person.end()
    judged = [info for info in person.catalog() if info.success is not None]
    assert {info.judged_by for info in judged} == {"judge"}
    assert any(info.source == "demo" and info.success for info in judged)
    practised = [info for info in judged if info.source == "online"]
    assert sum(info.success and info.terminated for info in practised) >= 3
    assert any(info.success and info.intervened for info in practised), "on a busy machine the policy may need no help"
