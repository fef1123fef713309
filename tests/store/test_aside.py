"""A value that cannot be: it is acknowledged, stored as it came, and its episode is set aside until an operator has
looked at it."""

from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from serl_client import ConfigError, Outcome

from serl_launcher.replay.mixture import ReplayMixture
from serl_launcher.replay.statistics import statistics
from serl_launcher.replay.views import View
from serl_launcher.store.store import Store
from serl_launcher.types import Window
from tests.shared.common import STATE
from tests.shared.data import changed
from tests.shared.tools import called

from .made import founded

ABSURD = {
    STATE: (np.full(8, -3e38), "observation.state [0] is -3e+38 at step 2, beyond its limit of -1e+06"),
    "reward": (3e38, "reward is 3e+38 at step 2, beyond its limit of 1e+06"),
    "time": (1e308, "time is 1e+308 s at step 2, beyond its limit of 1e+11 s"),
}


@pytest.fixture
def store(tmp_path):
    with closing(founded(tmp_path / "run")) as made:
        made.lives.hello("arm", "outbox B", "B", [])
        yield made


def stage(store, *records, session="A"):
    for record in records:
        assert store.stage(session, store.expected(session), record)
    store.commit()


def aside(store):
    """{id: reason} of the episodes that are set aside, as a reader of the files sees them."""
    return {e.id: e.judged_by.partition(": ")[2] for e in store.index.discarded_by("learner")}


@pytest.mark.parametrize("column", ABSURD)
def test_a_value_that_cannot_be_is_kept_and_its_episode_never_drawn(store, spec, make_segment, column):
    value, reason = ABSURD[column]
    stage(store, make_segment("good", 1, ends="terminated"), changed(make_segment("bad", 2), column, value))
    stage(store, make_segment("bad", 2, 4, ends="terminated"), make_segment("next", 3))
    assert aside(store) == {"bad": reason}
    said = called("store", "show", store.folder.parent)
    assert f"set aside bad, 8 steps in online: {reason}\n" in said[1]
    assert called("store", "verify", store.folder.parent)[0] == 0
    sources = ReplayMixture(store.folder, spec, {"online": 400}, {}, seed=0)
    sources.update(store.index.catalog(0, 100)[1])
    batch = sources.sample(100, Window({STATE: (0,), "action": (0,)}), {"online": 1.0})
    assert set(batch.observation[STATE][:, 0, 0].tolist()) == {1.0, 3.0}
    assert sources.size("online") == (8, 1)
    assert statistics(sources, "online")["high"][STATE][0] == 3
    column = "observations" if column == STATE else column
    stored = sources.buffers["online"]._records(np.array([6]))
    assert column == "observations" or stored[column][0] == np.asarray(value, stored[column].dtype)


def test_a_step_is_drawn_only_once_it_is_known_whether_its_episode_is_set_aside(store, spec, make_segment):
    """The trainer maps files that are ahead of the last answer of the server."""
    stage(store, make_segment("e0", 1))
    told, heads = store.index.catalog(0, 100)[1], {"online": 4}
    stage(store, changed(make_segment("e0", 1, 4, ends="terminated"), STATE, np.full(8, 3e38)))
    sources = ReplayMixture(store.folder, spec, {"online": 400}, {}, seed=0)
    sources.update(told, heads)
    batch = sources.sample(100, Window({STATE: (0,), "action": (0,), "next_observation": (1,)}), {"online": 1.0})
    assert set(batch.step_id.tolist()) == {0, 1, 2}
    sources.update(store.index.catalog(0, 100)[1], {"online": 8})
    assert sources.sample(100, Window({STATE: (0,), "action": (0,)}), {"online": 1.0}) is None


def test_a_large_value_is_a_value(store, make_segment):
    segment = changed(changed(make_segment("e0", ends="truncated"), STATE, np.full(8, 1e6)), "reward", -1e6)
    stage(store, changed(segment, "time", 1.7e9))
    assert not aside(store)


@pytest.mark.parametrize("judge", ["judge", "operator"])
def test_only_an_operator_elsewhere_takes_an_episode_back(store, make_segment, judge):
    """A person who says `success` at the robot has seen the episode, and not its numbers."""
    stage(store, changed(make_segment("bad"), "reward", 3e38), Outcome("bad", True, judged_by=judge))
    store.episodes.cut("A")
    stage(store, make_segment("bad", start=4, ends="terminated"), Outcome("bad", True, judged_by=judge))
    assert aside(store).keys() == {"bad", "bad.part2"}
    again = Store(store.folder)
    assert again.episodes.aside == 2
    again.close()
    stage(store, Outcome("bad", True, judged_by="operator"), session="B")
    assert not aside(store)
    assert store.episodes.aside == 0
    store.set_aside("bad.part2", "updates fail")  # what the trainer says is the latest word, again and again
    store.set_aside("bad.part2", "updates fail")
    assert aside(store) == {"bad.part2": "updates fail"}
    stage(store, Outcome("bad.part2", False, judged_by="operator"), session="B")
    store.set_aside("bad.part2", "updates fail")
    assert aside(store) == {"bad.part2": "updates fail"}
    assert [said.judged_by for said in store.index.outcomes("bad.part2")][1] == "operator"


def test_a_word_may_fill_a_view_whose_episodes_are_set_aside_or_not_judged(store, spec, make_segment):
    sources, seen = (
        ReplayMixture(store.folder, spec, {"online": 400}, {"good": View(("online",), ("successful",))}, seed=0),
        [],
    )
    for record in (
        make_segment("e", ends="terminated"),
        Outcome("e", False),
        changed(make_segment("bad"), "reward", 3e38),
    ):
        seen.append(sources.may_fill("good"))
        stage(store, record)
        sources.update(store.index.catalog(0, 100)[1])
    assert (seen, sources.may_fill("good")) == ([False, True, False], True)


def test_a_session_of_the_learners_own_name_does_not_stop_its_word(store, make_segment):
    store.lives.hello("arm", "outbox C", "learner", [])
    for episode in ("one", "two"):
        stage(store, Outcome(episode, True), session="learner")
        stage(store, changed(make_segment(episode, 1, ends="terminated"), "reward", 3e38))
    assert aside(store).keys() == {"one", "two"}


def test_statistics_need_rows_and_take_what_an_operator_has_taken_back(store, spec, make_segment):
    large = make_segment("large", 1, ends="terminated")
    stage(store, replace(large, observation={STATE: np.full_like(large.observation[STATE], 2e6)}))
    sources = ReplayMixture(store.folder, spec, {"online": 400}, {}, seed=0)
    sources.update(store.index.catalog(0, 100)[1])
    with pytest.raises(ConfigError, match="'online' holds no steps yet"):
        statistics(sources, "online")
    assert sources.may_fill("online")
    stage(store, Outcome("large", True, judged_by="operator"), session="B")
    sources.update(store.index.catalog(0, 100)[1])
    assert statistics(sources, "online")["high"][STATE][0] == 2e6
