"""Nobody is at the keys, or something is pasted there: nothing is demonstrated, judged or stopped by that."""

import os
import time

import pytest
from serl_client.way_home import BEGIN

from tests.programs.people import QUIET, TINY, Person
from tests.shared.common import ROOT
from tests.shared.tools import called

pytestmark = pytest.mark.program

WORDS = ["task=fake", "task.env.operator=keyboard", "task.env.verdict_by=operator", "task.env.clock=real"]
TEXT = (ROOT / "README.md").read_bytes()[:10_000]
NOBODY = "nobody drove: "


class Absent(Person):
    """Knows what the run has heard, and pastes."""

    def heard(self):
        """(verdicts, commands) that the store holds."""
        with self.index() as index:
            return [
                index._db.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in ("outcomes", "commands")
            ]

    def told(self):
        return called("status", "--port", self.ports[0])[1]

    def paste(self, text):
        while text:
            text = text[os.write(self.keys, text) :]


@pytest.mark.slow
def test_without_a_person_nothing_is_demonstrated_and_what_is_pasted_says_nothing(tmp_path):
    with Absent(tmp_path) as person:
        learner = person.start("learner", *WORDS, *TINY)
        actor = person.act(*WORDS, "task.env.max_steps=20")
        person.until(lambda: BEGIN in person.said())
        person.paste(b"\x1b[200~" + TEXT + b"\x1b[201~")
        time.sleep(6.0)  # time for three episodes
        assert (person.count("demonstrate"), f"driver {BEGIN}" in person.told()) == (0, True)

        person.paste(TEXT)
        person.until(lambda: "driver PAUSED" in person.told())
        time.sleep(2.0)
        assert (person.count("demonstrate"), person.heard()) == (0, [0, 0])
        person.press(b"p")
        person.until(lambda: f"driver {BEGIN}" in person.told())
        time.sleep(QUIET)  # two keys in less make a burst, which says nothing

        person.press(b"r")
        person.until(lambda: NOBODY in person.said() and person.count("demonstrate", "closed AND discard"))
        person.until(lambda: NOBODY in person.told())
        assert (person.count("demonstrate"), person.heard()) == (1, [1, 0])

        person.until(lambda: f"driver {BEGIN}" in person.told())
        person.press(b"i")
        person.until(lambda: person.count("demonstrate", "NOT closed"))
        person.press(b"ppp")
        person.until(lambda: "driver PAUSED" in person.told())
        time.sleep(2 * QUIET)
        assert "driver PAUSED" in person.told()
        assert (person.count("demonstrate"), set(person.facts().phases)) == (2, {"demonstrate"})
        person.press(b"q")
        time.sleep(QUIET)
        assert actor.poll() is None
        person.until(lambda: actor.poll() is not None or person.press(b"q") or time.sleep(QUIET))
        person.end_well(actor, learner)
    assert "the robot holds: q again within 2 s ends the run; p resumes" in person.said()
