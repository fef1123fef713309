"""A run that a person directs: a learner, and an actor in a terminal that a test types into."""

import os
import re
import subprocess
import sys
import time

from tests.programs.hiors import Run
from tests.shared.common import ROOT, TRAIN

PATIENCE = 120.0
TINY = [
    "plan=hiors", "policy.network.hidden=[32,32]", "policy.horizon=4", "policy.head.steps=2", "batch_size=16", "utd=1",
    'plan.phases.demonstrate.until=["demo.episodes >= 2"]', 'plan.phases.clone.until=["updates >= 20"]',
    "~plan.phases.baseline", 'plan.phases.practise.start_when="online.episodes >= 1"',
    'plan.phases.practise.until=["online.episodes >= 3"]', "~plan.phases.evaluate",
]  # fmt: skip


class Person(Run):
    """The folder of a run, its learner, and its actor in a terminal."""

    def __init__(self, folder, environment=None):
        super().__init__(folder)
        self.environment = {**os.environ, **(environment or {})}
        self.keys, self._program = os.openpty()

    def act(self, *words):
        port, inference_port = self.ports
        command = [
            sys.executable, TRAIN, "actor=true", f"run_dir={self.run_dir}", f"port={port}",
            f"inference_port={inference_port}", *words,
        ]  # fmt: skip
        with open(self.log, "a") as log:
            actor = subprocess.Popen(
                command, stdin=self._program, stdout=log, stderr=log, cwd=ROOT, start_new_session=True,
                env=self.environment,
            )  # fmt: skip
        self._started.append(actor)
        return actor

    def press(self, keys):
        os.write(self.keys, keys)

    def episode(self, *, first=False, takeover=False):
        """Let an episode go on for a while, with a takeover in its midst, and call it a success."""
        before, said = 0 if first else len(self.facts().episodes), self.said()
        self.until(lambda: len(self.facts().episodes) > before, PATIENCE)
        if takeover:
            for words in ("takes over", "hands back"):
                self.press(b"t")
                self.until(lambda words=words: self.said().count(words) > said.count(words))
                time.sleep(1.0)
        time.sleep(0.5)
        self.press(b"s")

    def practised(self, words):
        """Let a person demonstrate twice and take over in three episodes of practice; the actor's maps of memory."""
        self.start("learner", *words, *TINY)
        actor = self.act(*words)
        self.until(lambda: "says when it may move" in self.said() or actor.poll() is not None, PATIENCE)
        assert actor.poll() is None, self.said()
        self.until(lambda: self.press(b"r") or self.facts().episodes, PATIENCE)
        self.episode(first=True)
        self.episode()
        self.until(lambda: re.search(r"directive \d+: practise ", self.said()), PATIENCE)
        for _ in range(3):
            self.episode(takeover=True)
        with open(f"/proc/{actor.pid}/maps") as maps:
            loaded = maps.read()
        assert self.status(actor, PATIENCE) == 0, self.said()[-3000:]
        return loaded

    def end(self):
        super().end()
        os.close(self.keys)
        os.close(self._program)
