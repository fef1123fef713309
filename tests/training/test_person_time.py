"""How long a person was needed, over all lives of actors and learner."""

import numpy as np
import pytest

from serl_launcher.training.counters import ENTRY
from serl_launcher.training.person_time import PersonTime


class Nobody:
    """Counters without an episode."""

    def finished(self):
        return np.zeros(0, ENTRY)


def client(actor, resets, reset_s, waiting_s=0.0, role="actor"):
    return {"actor": actor, "role": role, "hand_resets": resets, "reset_s": reset_s, "waiting_s": waiting_s}


def told(person):
    found = person.told(Nobody(), 10)
    return found["hand_resets"], found["resets_min"], found["waiting_min"]


def test_it_adds_up_over_the_lives_of_all_actors():
    person = PersonTime()
    for clients in (
        [client("a", 0, 0.0)], [client("a", 1, 60.0), client("b", 2, 120.0, 30.0)], [client("a", 3, 180.0)],
        [client("a", 0, 0.0), client("b", 2, 120.0, 30.0)], [client("a", 1, 60.0)],
    ):  # fmt: skip
        person.hear(clients)
    assert told(person) == (3 + 1 + 2, (180 + 60 + 120) / 60, 0.5)


def test_a_learner_that_starts_again_counts_what_came_meanwhile_once():
    person, again = PersonTime(), PersonTime()
    person.hear([client("a", 1, 60.0)])
    again.load_state_dict(person.state_dict())
    again.hear([client("a", 2, 90.0)])
    again.hear([client("a", 2, 90.0)])
    assert told(again) == (2, 1.5, 0)


@pytest.mark.parametrize("wrong", ["9", None, -5, float("nan"), float("inf"), 1e300])
def test_what_is_no_number_of_seconds_counts_nothing(wrong):
    person = PersonTime()
    person.hear([client("a", 0, wrong), client("learner", 1, 60.0, role="viewer"), {"actor": "b", "role": "actor"}])
    assert told(person) == (0, 0, 0)
