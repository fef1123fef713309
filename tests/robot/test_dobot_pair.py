"""Two Dobot arms behind one guard: whoever is killed, stopped or cut off, both stand, and a new start moves neither.

The controllers, V3 on the left and V4 on the right, are threads of the test; guard and actor are processes.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack

import numpy as np
import pytest
from serl_client.errors import RobotFault

from robot_infra.drivers import dobot_protocol as p
from tests.shared.common import ROOT, until
from tests.shared.dobots import BOTH, controller, guarded

STILL = 0.2  # seconds of the controller's time, until an arm that nobody drives any more stands


@pytest.fixture
def arms():
    with ExitStack() as stack:
        yield [stack.enter_context(controller(version, power_s=0.1)) for version in ("V3", "V4")]


def are_fast(arms):
    """Whether both arms move at nearly their full speed; 0.5 rad/s is 28.6 degrees a second."""
    return all(len(served.machine.speeds) > 0 and served.machine.speeds[-1][1] > 25 for served in arms)


def move_on(robot):
    """Give targets, as a control loop does that has noticed nothing."""
    while True:
        robot.command(BOTH + 0.5)
        time.sleep(0.05)


def check_stand(arms, since, more=2):
    """After this moment of its own time at most so many set points differ, and STILL after the last each arm stands.

    A guard that gets no time for a while learns of the end of its actor later, and sends nothing meanwhile.
    """
    until(lambda: all(served.machine.time > begun + 1 for served, begun in zip(arms, since, strict=True)))
    for served, begun in zip(arms, since, strict=True):
        with served.lock:
            targets, speeds = list(served.machine.targets), list(served.machine.speeds)
        new = [at for (at, target), (_, before) in zip(targets[1:], targets, strict=False) if (target != before).any()]
        assert sum(at > begun for at in new) <= more
        late = [speed for at, speed in speeds if at > max(begun, new[-1]) + STILL]
        assert len(late) > 50
        assert max(late) == 0


WAYS = {  # what happens to guard or arms, and what the actor is told
    "kill": (lambda robot, arms: os.kill(robot.guard.process, signal.SIGKILL), "SIGKILL"),
    "stop": (lambda robot, arms: os.kill(robot.guard.process, signal.SIGSTOP), "has not answered"),
    "cut": (lambda robot, arms: robot.guard._socket.shutdown(socket.SHUT_RDWR), "was cut|actor has gone"),
    "link": (lambda robot, arms: arms[0].cut(), "left arm: the connection to .* is lost"),
    "collision": (lambda robot, arms: arms[1].machine.alarm(p.COLLIDED), "right arm: alarm 117"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", ["kill", "link", "collision", *(pytest.param(way, marks=pytest.mark.slow) for way in ("stop", "cut"))]
)
def test_when_their_guard_or_one_arm_fails_both_stand_and_a_new_start_moves_neither(arms, way):
    happen, said = WAYS[way]
    robot = guarded(*(served.address for served in arms))
    try:
        robot.recover()
        while not are_fast(arms):
            robot.command(BOTH + 0.5)
            time.sleep(0.05)
        happen(robot, arms)
        since = [served.machine.time for served in arms]
        with pytest.raises(RobotFault, match=said):
            move_on(robot)
        check_stand(arms, since)
        at = np.array([served.machine.q for served in arms])
        robot.recover()
        until(lambda: all(served._clients.keys() >= {p.DASHBOARD, p.FEEDBACK} for served in arms))
        time.sleep(0.2)
        np.testing.assert_allclose([served.machine.q for served in arms], at, atol=1e-3)
        np.testing.assert_allclose(robot.observe().values["observation.state"], np.deg2rad(at).ravel(), atol=1e-4)
    finally:
        robot.close()


@pytest.mark.parametrize(
    ("number", "more"), [(signal.SIGKILL, 2), pytest.param(signal.SIGSTOP, 5, marks=pytest.mark.slow)]
)
def test_when_their_actor_is_killed_or_stopped_both_stand(arms, number, more):
    """The guard of one that is stopped still goes on to the newest target, for a step of a tenth of a second."""
    words = [sys.executable, "-m", "tests.shared.dobots", *(served.address for served in arms)]
    with subprocess.Popen(words, cwd=ROOT) as actor:
        try:
            until(lambda: are_fast(arms))
            actor.send_signal(number)
            if number == signal.SIGKILL:
                actor.wait()  # only then is its connection closed
            since = [served.machine.time for served in arms]
            check_stand(arms, since, more)
        finally:
            actor.kill()
    until(lambda: not any(served._clients for served in arms))  # their guard has ended
