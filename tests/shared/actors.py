"""What surrounds an actor's loop, without a robot and without a learner: environment, client, operator, policy."""

import time
from types import SimpleNamespace

import numpy as np
from serl_client import Outcome
from serl_client.controller import RandomPolicy
from serl_client.driving import Drive
from serl_client.env import Step
from serl_client.episode import join
from serl_client.network import Answer
from serl_client.runner import run_actor

from .common import STATE


class CountingEnv:
    """Episodes of `length` steps whose observation counts the steps; `human` rows are driven by somebody else."""

    task, fails_at, success = "count", None, True
    is_home = True

    def __init__(self, spec, length=13, *, clock="simulated", has_operator=False, human=()):
        self.spec, self.length, self.clock, self.has_operator, self.human = spec, length, clock, has_operator, human
        self.seeds, self.teleops, self.actions, self.stops, self.homes, self.recovered = [], [], [], 0, 0, 0
        self.row = 0

    def home(self, seed):
        self.homes += 1

    def reset(self, seed, *, teleop=False, intervene=False):
        self.row = 0
        self.seeds.append(seed)
        self.teleops.append(teleop)
        return self.observe()

    def step(self, action):
        if self.row == self.fails_at:
            raise OSError("the robot is gone")
        self.actions.append(action)
        human = self.row in self.human
        executed = np.full(2, 0.5 if human or action is None else action, np.float32)
        self.row += 1
        ended = self.row == self.length
        success = self.success if ended else None
        return Step(self.observe(), float(self.row), executed, human or self.teleops[-1], ended, False, success)

    def look(self):
        return self.row in self.human

    def stop(self):
        self.stops += 1

    def recover(self):
        self.recovered += 1

    def observe(self):
        self.observed = time.monotonic()
        return {STATE: np.full(8, self.row, np.float32)}


class FakeClient:
    """A client whose learner takes everything; `script` holds functions that run after so many records, or waits."""

    actor, session = "robot", "0123456789abcdef"
    has_room, fault, error, drained, pending, history = True, "", None, True, (0, 0), 1
    remote, connected, over = None, True, ""  # whether the learner is there; `next` or `stop`, as said by the operator

    def __init__(self, spec, mode="collect", **directive):
        self.spec, self.waited, self.state = spec, 0, SimpleNamespace(step_limit=None, ordinal=3)
        self.records, self.commands, self.script, self.said = [], [], {}, []
        self.direct(mode, **directive)

    def direct(self, mode, number=1, **directive):
        self.state.directive = {
            "number": number, "phase": "practise", "mode": mode, "into": "online", "explore": True,
            "episodes": None, "weights": None, "boundary": "episode", **directive,
        }  # fmt: skip

    def report(self, numbers):
        self.reported = numbers

    def push(self, record):
        self.records.append(record)
        self._next(len(self.records))

    def wait(self, timeout):
        self.waited += 1
        self._next(f"wait {self.waited}")
        assert self.waited < 10_000, "it waits for ever"

    def _next(self, event):
        self.script.pop(event, lambda: None)()
        if self.error:
            raise self.error

    def command(self, name, argument="", *, seen=None):
        self.commands.append(name)
        self.seen = seen

    def words(self):
        while self.said:
            yield self.said.pop(0)

    def drain(self, timeout, *, patient=True):
        return self.drained

    @property
    def segments(self):
        return [record for record in self.records if not isinstance(record, Outcome)]

    @property
    def outcomes(self):
        return [record for record in self.records if isinstance(record, Outcome)]

    @property
    def episodes(self):
        """The segments of each episode, joined."""
        ids = dict.fromkeys(segment.episode for segment in self.segments)
        return [join([segment for segment in self.segments if segment.episode == id]) for id in ids]

    @property
    def lengths(self):
        return [len(episode) for episode in self.episodes]


class WaitingClient(FakeClient):
    """A client whose waiting makes the test's clock pass."""

    def __init__(self, spec, clock, mode="collect", **directive):
        super().__init__(spec, mode, **directive)
        self._clock = clock

    def wait(self, timeout):
        self._clock.advance(timeout)
        super().wait(timeout)


class Asked(RandomPolicy):
    """A policy that keeps what it was asked, and answers none of the `silent` calls."""

    silent = ()

    def __init__(self, spec):
        super().__init__(spec, 0)
        self.asked, self.begun = [], []

    def begin(self, episode, directive, task):
        self.begun.append(episode)
        super().begin(episode, directive, task)

    def act(self, observation, *, step, previous_action, reset):
        self.asked.append((step, reset))
        action = super().act(observation, step=step, previous_action=previous_action, reset=reset)
        return None if len(self.asked) in self.silent else action


class Keys:
    """A person: {look: what was pressed before it}; there is a look after each reset and after each row.

    clock: of whoever resumes after a pause: it passes before they do.
    """

    has_terminal, demonstrates = True, False

    def __init__(self, presses, clock=None):
        self.presses, self.looks, self.clock, self.pauses, self.asked = presses, -1, clock, 0, []

    def poll(self):
        self.looks += 1
        said = self.presses.get(self.looks, [])
        if "pause" in said and self.clock:
            self.clock.advance(1.1 * self.pauses)
            self.pauses += 1
        return said

    def forget(self, *, hands_back=True):
        self.asked.append(hands_back)


class Desk:
    """One person at a page: inputs with growing numbers, which have seen all updates so far, or those that one says."""

    def __init__(self, remote, name="page/anna"):
        self.remote, self.name, self.number, self.seen = remote, name, 0, 0

    def say(self, press="", motion=None, gripper=0, *, seen=None, number=None):
        self.number += 1
        seen = self.seen if seen is None else seen
        self.remote.hear(Drive("arm", self.name, number or self.number, seen, press, motion or {}, gripper))

    def told(self, observation=None):
        """What has been sent to them since the last call."""
        self.remote.show(observation)
        mine = [update for update in self.remote.updates() if update.driver == self.name]
        self.seen = max([self.seen, *(update.number for update in mine)])
        return mine


class Chunks:
    """Answers with `length` actions after `delay` looks in vain; action [i] of the chunk of row s is s + i / 100, times
    `scale`. `decides`: names of its extras."""

    def __init__(self, length=1, delay=0, version=1, scale=1.0, decides=()):
        self.length, self.delay, self.version, self.scale, self.decides = length, delay, version, scale, decides
        self.questions, self.previous, self.answer, self.patience = [], [], None, 0  # questions: (row, reset)

    def ask(self, observation, *, step, seed, previous_action, reset, explore, task, prefix=None, committed=0):
        self.questions.append((step, reset))
        self.previous.append(None if previous_action is None else previous_action.tolist())
        self.seed, self.explore, self.task = seed, explore, task
        self.prefix, self.committed = prefix, committed
        action = step + np.arange(self.length, dtype=np.float32)[:, None] / 100 + np.zeros(2, np.float32)
        extras = dict.fromkeys(self.decides, np.full(2, step + 1, np.float32))
        self.answer, self.patience = Answer(step, self.version, action * self.scale, extras), self.delay

    def wait_answer(self, step, timeout):
        if self.answer is None or self.patience:
            self.patience = max(0, self.patience - 1)
            return None
        answer, self.answer = self.answer, None
        return answer

    def forget(self):
        self.answer = None


def run(env, client, controller=None, *, episodes=2, **options):
    """Run an actor until so many episodes were reported, then stop it; their reports."""
    reports = []

    def on_episode(report):
        reports.append(report)
        if len(reports) == episodes:
            client.direct("stop", number=99)

    options = {"seed": 0, "on_episode": on_episode, **options}
    run_actor(env, controller or RandomPolicy(env.spec, 0), client, **options)
    return reports
