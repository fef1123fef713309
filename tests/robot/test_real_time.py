"""The whole loop of an actor on a virtual clock: when commands go out, whatever policy and person take their time."""

import numpy as np
import pytest
from serl_client.chunks import RULES
from serl_client.controller import RandomPolicy
from serl_client.status import ActorStatus

from tests.shared.actors import Chunks, Keys, WaitingClient, run
from tests.shared.robots import TimedRobot, build, point

ROWS, EXECUTED = 50, 8


class LateSource(Chunks):
    """Answers with ROWS actions, each question after so many seconds as the next latency says."""

    def __init__(self, clock, latencies):
        super().__init__(ROWS, scale=0.0)
        self.clock, self.latencies, self.due = clock, iter(latencies), 0.0

    def ask(self, observation, **question):
        super().ask(observation, **question)
        self.due = self.clock.now + next(self.latencies)

    def wait_answer(self, step, timeout):
        waits = self.due - self.clock.now
        if self.answer is None or waits > timeout:
            self.clock.now += max(timeout, 0.0)
            return None
        self.clock.now += max(waits, 0.0)
        return super().wait_answer(step, timeout)


@pytest.mark.parametrize("rule", sorted(RULES.keys() - {"wait"}))
@pytest.mark.parametrize("fps", [10, 30, 50])
def test_commands_keep_their_distance_whatever_the_policy_and_the_person_take(clock, rule, fps):
    """Answers take 0 to 150 ms, the first one 2 s; the person pauses in the second episode and on its way home."""
    random, robot, status = np.random.default_rng(fps), point(TimedRobot, fps), ActorStatus()
    env = build(robot, clock="real", fps=fps, max_steps=100)
    controller = RULES[rule](
        LateSource(clock, [2.0, *random.uniform(0, 0.15, 500)]), deadline=0.5 / fps, n_action_steps=EXECUTED
    )
    client = WaitingClient(env.spec, clock)
    reports = run(env, client, controller, operator=Keys({190: ["pause"], 200: ["pause"]}, clock), status=status)
    assert [report["steps"] for report in reports] == [100, 100]
    gaps = np.concatenate([episode.gap for episode in client.episodes])
    spaced = np.diff(robot.sent) * fps
    assert (spaced > 0.5 - 1e-6).all()
    assert (spaced[~gaps[1:]] < 1.5 + 1e-6).all()
    where = set(np.flatnonzero(gaps).tolist())
    assert 0 in where, "the first answer was late"
    assert len(where - {0, 100}) == 1, "the person paused once, and the first answer of the next episode may be late"
    assert status.late == 0
    seen = np.array(robot.looked)
    after = seen[np.searchsorted(seen, np.array(robot.sent) + 1e-9)] - robot.sent
    assert (after * fps > 0.5 - 1e-6).all()


def test_a_row_before_which_the_loop_stood_still_is_a_gap(clock):
    class Stalled(RandomPolicy):
        def act(self, observation, *, step, **rest):
            clock.now += {4: 0.15, 7: 0.25}.get(step, 0.0)
            return super().act(observation, step=step, **rest)

    env = build(clock="real", fps=10, max_steps=10)
    client, status = WaitingClient(env.spec, clock), ActorStatus()
    run(env, client, Stalled(env.spec, 0), episodes=1, status=status)
    assert np.flatnonzero(client.episodes[0].gap).tolist() == [7]
    assert status.late == 2
