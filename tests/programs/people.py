"""A run that a person directs: a learner, and an actor in a terminal that a test types into."""

import os
import time
from contextlib import suppress

from tests.programs.hiors import Run
from tests.shared import here
from tests.shared.common import until

SUCCEEDED = "closed AND success"
QUIET = 0.6  # seconds without another key before one that judges
FAULT = "The robot holds."  # an actor says, whose robot does not answer
TINY = [
    "plan=hiors", "policy.network.hidden=[32,32]", "policy.horizon=4", "policy.head.steps=2", "batch_size=16", "utd=1",
    'plan.phases.demonstrate.until=["successes >= 1"]', 'plan.phases.clone.until=["updates >= 20"]',
    "~plan.phases.baseline", 'plan.phases.practise.start_when="online.episodes >= 1"',
    'plan.phases.practise.until=["successes >= 2"]', "~plan.phases.evaluate",
]  # fmt: skip


class Person(Run):
    """The folder of a run, its learner, and its actor in a terminal."""

    def __init__(self, folder, environment=None):
        super().__init__(folder)
        self.environment = {**os.environ, **(environment or {})}
        self.keys, self._program = os.openpty()

    def act(self, *words):
        return self.start("actor", *words, stdin=self._program)

    def press(self, keys):
        os.write(self.keys, keys)

    def count(self, phase, condition="1"):
        """The number of episodes of a phase that the store knows and that fulfil an SQL condition."""
        with self.index() as index:
            query = f"SELECT count(*) FROM episodes WHERE phase = ? AND {condition}"
            return index._db.execute(query, (phase,)).fetchone()[0]

    def episode(self, phase):
        """Wait until an episode of a phase goes on, let the person act in it, and call it a success.

        Meanwhile they say ready, as before a demonstration and after a fault, and end what an earlier phase has begun.
        """
        successes = self.count(phase, SUCCEEDED)

        def came():
            return self.count(phase, SUCCEEDED) > successes

        def demonstrates():
            return self.count("demonstrate", "NOT closed")

        def begun():
            if came() or self.count(phase, "NOT closed"):
                return True
            if phase == "practise" and demonstrates():
                time.sleep(QUIET)
                self.succeed()
                with suppress(AssertionError):  # it was not heard; said twice it would judge the next episode, too
                    until(lambda: not demonstrates(), 10.0)
            else:
                self.press(b"r")
            return False

        self.until(begun)
        if came():
            return
        if self.drive(phase):
            self.succeed()
            with suppress(AssertionError):  # a fault may have cut it off
                until(came, 5.0)

    def drive(self, phase):
        """Let the episode go on for a while, in practice with a takeover. Returns whether no fault cut it off."""
        said = self.said()
        if phase == "demonstrate":
            self.press(b"i")
        for words in ("takes over", "hands back") if phase == "practise" else ():
            self.press(b"t")
            self.until(lambda words=words: any(self.said().count(each) > said.count(each) for each in (words, FAULT)))
            time.sleep(1.0)
        time.sleep(0.5 if phase == "practise" else 2.5)
        return self.said().count(FAULT) == said.count(FAULT)

    def succeed(self):
        self.press(b"s")

    def practised(self, words, *, has_programs=False, learns=()):
        """Let a person demonstrate once and take over in two episodes of practice; the actor's maps of memory.

        The learner's parts are threads of this process, unless it `has_programs`. learns: more words for it alone.
        """
        if has_programs:
            learner = self.start("learner", *words, *TINY, *learns)
            loaded = self.direct(self.act(*words))
            self.end_well(learner)
            return loaded
        found = []

        def beside(config, local, port):
            self.ports = port, self.ports[1]
            with here.answering(config, local):
                found.append(self.direct(self.act(*words)))

        here.start(self.run_dir, [*words, *TINY, *learns, f"inference_port={self.ports[1]}"], acts=False, beside=beside)
        return found[0]

    def direct(self, actor):
        """Be the person of this actor until the plan's end."""
        for phase, count in (("demonstrate", 1), ("practise", 2)):
            self.until(lambda phase=phase: phase in self.facts().phases)
            while self.count(phase, SUCCEEDED) < count:
                self.episode(phase)
        with open(f"/proc/{actor.pid}/maps") as maps:
            loaded = maps.read()
        self.end_well(actor)
        return loaded

    def end(self):
        super().end()
        os.close(self.keys)
        os.close(self._program)
