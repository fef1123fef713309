"""Nothing moves an arm but through the limiter, whatever its sensors say and its driver does: drawn histories."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from itertools import count

import numpy as np
import pytest
from serl_client.errors import RobotFault

from robot_infra.drivers import dobot
from robot_infra.guard.channel import Request, Start
from robot_infra.guard.guard import OLD, Guard
from tests.shared import dobots, memory, rude
from tests.shared.rude import PLANE, SIX, SIX_HOME, Call, Lives, Rude

FPS = 10.0
ASKED = ("target",) * 4 + ("hold", "home", "state", "observe", "close") + ("recover",) * 3
PERCENT = {
    f"{name}.pos": {"range": [1.0 if name == "gripper" else -90.0, 90.0], "speed": 60.0, "jump": 10.0, "tracking": 20.0}
    for name in memory.MOTORS
}
KINDS = {  # kind: its limits, where its episodes start, set points per second, and what the device rounds
    "point": (PLANE, dict.fromkeys("xy", 0), 100, rude.A_BIT),
    "six joints": (SIX, SIX_HOME, 100, rude.A_BIT),
    "six joints that tell nothing": (SIX, SIX_HOME, 100, rude.A_BIT),
    "SO-101": (PERCENT, dict.fromkeys(PERCENT, 20.0), 50, 0.09),  # a step of 4096
    "Dobot V3": (dobots.LIMITS, dobots.HOME, 33, 1e-6),
    "Dobot V4": (dobots.LIMITS, dobots.HOME, 33, 1e-6),
}
SHORT = "point", "six joints", "Dobot V4"  # the others are tried in ./test.sh all


@pytest.fixture
def make(monkeypatch, tmp_path):
    """make(kind) -> an arm of this kind, with nothing but memory between driver and device."""

    def make(kind):
        if kind == "point":
            return rude.Point()
        if kind.startswith("six"):
            return rude.SixJoints(tells="nothing" not in kind)
        if kind == "SO-101":
            sdk = pytest.importorskip("scservo_sdk", reason="the extra `robots` is not installed")
            bus = memory.MemoryBus()
            monkeypatch.setattr(sdk, "PortHandler", bus.port)
            (tmp_path / "me.json").write_text(json.dumps(bus.calibration()))
            return memory.SO101(bus, str(tmp_path))
        version = kind.split()[1]
        served = memory.MemoryController(version)
        monkeypatch.setattr(dobot.socket, "create_connection", served.connect)
        return memory.Dobot(served, version)

    return make


@pytest.fixture
def naps(clock, monkeypatch):
    """The driver of a Dobot arm waits by the clock of the test."""
    monkeypatch.setattr(dobot.select, "select", lambda *words: clock.sleep(words[3]))


class Actor:
    """Asks the guard of one arm for anything, at any tick, and looks at what it answers."""

    def __init__(self, arm, kind, seed, clock):
        self.limits, home, hz, slack = KINDS[kind]
        self.low, self.high = np.array([limit["range"] for limit in self.limits.values()]).T
        self.start = Start("", "", {}, self.limits, home, FPS, float(hz), 0.25)
        self.arm, self.clock, self.random, self.number = arm, clock, np.random.default_rng([seed, 1]), 0
        self.lives = Lives(
            self.limits, 1 / hz, is_simulated=arm.is_simulated, slack=slack,
            tells=kind != "point" and "nothing" not in kind,
        )  # fmt: skip
        self.rude = Rude(arm, seed, self.lives.calls.append)
        self.guard = None

    def live(self, requests):
        """So many requests, with some ticks between two; return the promise that is broken first."""
        for _ in range(requests):
            if self.guard is None:
                self._begin()
            for _ in range(self.random.integers(1, 9)):
                self.clock.advance(self.start.servo_hz**-1)
                self._do(Guard.servo)
            request = self._request()
            self._do(Guard.hear, request)
        with suppress(Exception):
            self.guard.leave()
        return self.lives.rule()

    def _begin(self):
        """What an actor does whose guard has ended: another one begins, and makes the driver anew. After many tries in
        vain somebody looks at the arm."""
        for tries in count():
            led = self.arm.led()
            self.lives.calls.append(Call("made", led, led, self.arm.at, 0, failed=False))
            with suppress(RobotFault, OSError, ValueError):
                self.arm.begin_anew()
                self.guard = Guard(self.rude, self.start, sleep=self.clock.sleep)
                return
            assert tries < 20_000, "no guard begins any more"
            if tries > 50:
                self.clock.advance(1.0)
                self.arm.upset(self.random, mends=True)

    def _request(self):
        random = self.random
        wanted = random.uniform(2 * self.low - self.high, 2 * self.high - self.low)
        if random.random() < 0.15:
            wanted = [wanted * np.nan, wanted + np.inf, wanted * 0 + 1e300, wanted[:1], wanted[:0]][random.integers(5)]
        age = 0.0 if random.random() < 0.95 else random.uniform(0, 10)
        self.number += 1
        kind = "recover" if self.number == 1 else str(random.choice(ASKED))
        return Request(kind, self.number, self.clock.now - age, wanted.tolist(), self.number)

    def _do(self, what, *request):
        """One tick, or one request. A guard that fails leaves; with a fault the arm may only go to where it holds."""
        if self.guard is None:
            return
        before, led, self.asked_at = self._reply(), self.arm.led(), self.clock.now
        try:
            what(self.guard, *request)
        except Exception:  # as in its process: whatever a driver raises ends it
            with suppress(Exception):
                self.guard.leave()
            self.guard = None
            return
        after = self._reply()
        assert after.fault or not request or self.asked_at - request[0].sent <= OLD.get(request[0].kind, np.inf)
        target = np.array(after.target)
        assert after.fault or ((target >= self.low) & (target <= self.high)).all(), f"{target} is out of range"
        if before.fault and after.fault and not (request and request[0].kind == "recover"):
            assert after.target == before.target, f"after {before.fault} its target has moved"
            far, farther = np.abs(led - target), np.abs(self.arm.led() - target)
            stands = np.abs(self.arm.led() - self.arm.at) <= self.lives.slack  # as its own controller has stopped it
            assert not (~stands & (farther > far + self.lives.slack)).any(), f"after {before.fault} it moves"

    def _reply(self):
        return self.guard.reply(Request("state", 0, 0.0, [], 0))


def check(kind, seeds, clock, make):
    wrote = moved = 0
    for seed in seeds:
        arm = make(kind)
        actor = Actor(arm, kind, seed, clock)
        assert not (broken := actor.live(12)), f"{kind} {seed}: {broken}"
        wrote += arm.got > 0
        moved += sum((np.abs(call.after - call.before) > rude.A_BIT).any() for call in actor.lives.calls)
        arm.close()
        if kind == "SO-101":
            arm.bus.close()
    assert wrote > len(seeds) / 2
    assert moved > 3 * len(seeds), "the arms were moved, too"


@pytest.mark.parametrize("kind", ["target", "follow", "home", "recover"])
def test_what_is_taken_long_after_it_was_sent_moves_nothing_and_switches_nothing_on(kind, clock):
    """The guard was stopped, and goes on: who asked for it has given this guard up."""
    actor = Actor(rude.SixJoints(), "six joints", 0, clock)
    guard = Guard(actor.arm, actor.start, sleep=clock.sleep)
    if kind != "recover":
        guard.hear(Request("recover", 1, clock.now, [], 0))
    led, target = actor.arm.led(), [low + 0.1 for low in actor.low]
    guard.hear(Request(kind, 2, clock.now - OLD[kind] - 0.01, target, 0))
    assert kind in guard.reply(Request("state", 3, clock.now, [], 0)).fault[1] or kind == "recover"
    for _ in range(50):
        guard.servo()
    np.testing.assert_array_equal(actor.arm.led(), led)


@pytest.mark.usefixtures("naps")
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind not in SHORT)) for kind in KINDS])
def test_no_history_leads_an_arm_but_through_the_limiter(kind, clock, make):
    check(kind, range(100), clock, make)


@pytest.mark.nightly
@pytest.mark.timeout(3600)  # a minute; beside other work many
@pytest.mark.usefixtures("naps")
@pytest.mark.parametrize("first", range(0, 10_000, 1000))
@pytest.mark.parametrize("kind", KINDS)
def test_nor_do_ten_thousand(kind, first, clock, make):
    check(kind, range(first, first + 1000), clock, make)


def disturbed(kind, seed, folder, requests):
    """Let actors ask for so much in all, while actor and guard are stopped, go on, and are killed."""
    random, asked = np.random.default_rng(seed), 0
    while asked < requests:
        words = [sys.executable, "-m", rude.__name__, kind, str(seed), str(folder), str(requests - asked)]
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as actor:
            try:
                for line in actor.stdout:
                    asked += 1
                    if random.random() < 0.04:
                        _disturb(random, [actor.pid, int(line)][random.integers(2)])
            finally:
                actor.kill()


def _disturb(random, process):
    """Stop this process for a while, or end it; 0: it has ended."""
    with suppress(ProcessLookupError):
        if process and random.random() < 0.3:
            os.kill(process, signal.SIGKILL)
        elif process:
            os.kill(process, signal.SIGSTOP)
            time.sleep(random.choice([0.02, 0.3, 1.5]))
            os.kill(process, signal.SIGCONT)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", ["point", "six joints"])
def test_nor_does_any_through_a_guards_own_process_that_is_stopped_or_killed_like_its_actor(kind, seed, tmp_path):
    """Ten histories of ten requests, since to start a process takes longer; more, of another arm, if none was led: it
    may have fallen out of its range, or the machine is busy."""
    limits, _, hz, slack = KINDS[kind]
    for more in range(0, 100, 10):
        folder = tmp_path / str(more)
        folder.mkdir()
        disturbed(kind, seed + more, folder, 100)
        lives = Lives(limits, 1 / hz, is_simulated=kind == "point", tells=kind != "point", slack=slack)
        lives.calls += rude.noted(folder)
        assert not lives.rule()
        if sum(call.call == "write" and call.got for call in lives.calls) > 10:
            return
    pytest.fail("the arm was never led")
