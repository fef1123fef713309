"""What the learner counts of evaluated episodes, also of those that have left the store."""

import pytest
from serl_client import Outcome
from serl_client import messages as m
from serl_client.names import MAX_NAME

from serl_launcher.replay.mixture import ReplayMixture
from serl_launcher.service.server import page_of
from serl_launcher.store.index import Index
from serl_launcher.store.schema import Episode
from serl_launcher.store.store import Store
from serl_launcher.training.counters import RunCounters, curve, evaluation
from serl_launcher.training.plan import EVAL
from tests.shared.data import make_segment

CAPACITY, STEPS, STARTS = 100, 20, 12


class Counted:
    """A store that one actor writes into, and counters that hear of it."""

    def __init__(self, folder, spec, into, phase):
        self.spec, self.revision = spec, 0
        self.store = Store.create(folder / "store", spec, {EVAL: CAPACITY, "online": CAPACITY})
        self.store.direct({"into": into, "phase": phase})
        for session in "AB":
            self.store.lives.hello(f"arm {session}", f"outbox {session}", session, [])
        self.counters = self.another()

    def another(self):
        """Counters that have heard of nothing."""
        capacities = {EVAL: CAPACITY, "online": CAPACITY}
        return RunCounters(ReplayMixture(self.store.folder, self.spec, capacities, {}, seed=0))

    def take(self, *records, session="A"):
        for record in records:
            self.store.stage(session, self.store.expected(session), record)
        self.store.commit()
        self.revision, rows = self.store.index.catalog(self.revision, 1000)
        self.counters.update(self.counters.sources.update(rows))

    def all_at_once(self):
        """Counters that hear of everything in one go."""
        made = self.another()
        made.update(made.sources.update(self.store.index.catalog(0, 1000)[1]))
        return made


@pytest.fixture
def counted(request, tmp_path, spec):
    made = Counted(tmp_path, spec, *getattr(request, "param", (EVAL, "evaluate")))
    yield made
    made.store.close()


def play(counted, count):
    for number in range(count):
        counted.take(make_segment(f"e{number}", number % STARTS, 0, STEPS, ends="terminated", phase="evaluate"))


def test_starts_are_counted_when_they_are_seen_and_not_when_most_of_them_are_evicted(counted):
    play(counted, 2 * STARTS)
    assert counted.counters.sources.buffers[EVAL].tail > STEPS * STARTS, "the store holds a fifth of them"
    result = evaluation(counted.counters, [1], 0, None)
    assert (result["episodes"], result["distinct_starts"]) == (2 * STARTS, STARTS)
    assert evaluation(counted.counters, [1], 0, 5)["distinct_starts"] == 5


def test_after_a_restart_the_checkpoint_knows_the_starts_that_the_store_has_lost(counted):
    play(counted, STARTS)
    counted.take(*(Outcome(f"e{number}", number > 1, judged_by="operator") for number in range(STARTS)))
    after = counted.all_at_once()
    assert evaluation(after, [1], 0, None)["distinct_starts"] < STARTS, "what is gone is not invented"
    after.starts |= counted.counters.starts
    assert evaluation(after, [1], 0, None)["distinct_starts"] == STARTS
    first = evaluation(after, [1], 0, 3)
    assert first == evaluation(counted.counters, [1], 0, 3)
    assert (first["episodes"], first["successes"]) == (3, 1)


def test_the_steps_of_an_episode_are_finished_with_its_end(counted):
    found = []
    for start, ends in ((0, ""), (4, "terminated")):
        counted.take(make_segment("e0", 0, start, 4, ends=ends, phase="evaluate"))
        counts = counted.counters.progress(0.0).phases["evaluate"]
        found.append((counts.env_steps, counts.finished_steps))
    assert found == [(4, 0), (8, 8)]


def test_an_episode_that_a_crash_cut_is_no_trial_whatever_is_said_of_it(counted):
    counted.take(make_segment("e0", phase="evaluate"))
    counted.store.close_session("A")
    counted.take(Outcome("e0", True, judged_by="operator"), session="B")
    assert counted.counters.sources.held[EVAL][1].success
    assert evaluation(counted.counters, [1], 0, None)["episodes"] == 0


def test_an_evaluation_has_the_episodes_of_its_own_directives_and_weights(counted):
    """Late episodes of an earlier evaluation in the same phase are none of it, whatever they would add."""
    for version in "ab":
        counted.store.publish_weights(version * 64, 1, 0)
    for weights, count in ((1, 3), (2, 2)):
        number = counted.store.direct({"into": EVAL, "phase": "evaluate", "weights": weights})
        for i in range(count):
            stamp = {"directive": number, "phase": "evaluate", "weights": weights}
            counted.take(make_segment(f"{number}-{i}", i, 0, STEPS, ends="terminated", **stamp))
    late = make_segment("late", 0, 0, 1, ends="terminated", directive=2, phase="evaluate", weights=1)
    counted.take(Outcome("late", True), late)
    for counters in (counted.counters, counted.all_at_once()):
        phases = counters.progress(0.0).phases
        assert [phases[key].episodes for key in ("evaluate", 2, 3)] == [6, 4, 2]
        found = [evaluation(counters, *which, None)["episodes"] for which in (([3], 2), ([2, 3], 2), ([2], 1))]
        assert found == [2, 2, 4]


@pytest.mark.parametrize(
    ("counted", "judge", "episodes"),
    [
        (("online", "evaluate"), "judge", 0), (("online", "evaluate"), "operator", 1),
        ((EVAL, "evaluate"), "judge", 1), ((EVAL, "evaluate"), "operator", 1),
    ],
    indirect=["counted"],
)  # fmt: skip
def test_what_an_actor_itself_discards_is_no_episode_unless_it_is_evaluated(counted, judge, episodes):
    counted.take(Outcome("e0", None, discard=True, judged_by=judge))
    play(counted, 1)
    for counters in (counted.counters, counted.all_at_once()):
        counts = counters.progress(0.0).phases["evaluate"]
        assert (counts.episodes, counts.successes, counts.env_steps) == (episodes, 0, STEPS)


@pytest.mark.parametrize("name", ["e", "\N{GRINNING FACE}" * (MAX_NAME - 6)])
def test_the_catalog_comes_in_pages_that_fit_into_a_header_and_has_every_episode_once(tmp_path, name):
    index, heard, revision, more = Index(tmp_path / "index.sqlite", writes=True), [], 0, True
    index.put(*(
        Episode(
            i, f"{name}{i:06d}", name, "session", name, name, 1, name, 10 * i, 11 * i, "", revision=i, judged_by=name
        ) for i in range(1, 2501)
    ))  # fmt: skip
    index.commit()
    pages = 0
    while more:
        revision, rows, more = page_of(index, revision)
        told = m.decode([bytes(frame) for frame in m.encode(m.Synced(revision, rows, [], [], more))])
        heard += [row[0] for row in told.episodes]
        pages += 1
    assert heard == list(range(1, 2501))
    assert pages == (3 if name == "e" else 13)
    index.close()


@pytest.mark.parametrize("counted", [("online", "practise")], indirect=True)
def test_the_counts_are_those_of_all_episodes_whatever_the_order_in_which_they_are_heard(counted):
    """As a restart hears them: corrected ones last, also those that left the store long ago; and of two actors the one
    that began last may have ended first."""
    expected = {}
    for number in range(60):
        records = [make_segment(f"e{number}", 1, 0, 10, ends="terminated"), Outcome(f"e{number}", bool(number % 3))]
        expected[f"e{number}"] = bool(number % 3)
        if number % 7 == 6:
            name, discard = f"e{number - 6}", number % 2 == 0
            records.append(Outcome(name, True, discard=discard, judged_by="operator"))
            expected[name] = not discard
        counted.take(*records)
        if number in (56, 58):
            ends = "terminated" if number == 58 else ""
            counted.take(make_segment("long", 1, 0 if number == 56 else 5, 5, ends=ends), session="B")
            expected["long"] = True
        held = counted.counters.sources.held["online"]
        assert len(held) <= CAPACITY // 10, "what has left the store is not kept"
    counted.take(Outcome("long", True))
    for life in (counted.counters, counted.all_at_once()):
        phase = life.progress(0.0).phases["practise"]
        assert (phase.episodes, phase.env_steps, phase.successes) == (61, 610, sum(expected.values()))
        assert phase.finished_steps == 610
        assert list(phase.recent) == [(success, False) for success in expected.values()]
        assert (life.episodes, life.env_steps) == (61, 610)
        assert [e.id for e in life.recent("practise", 5)] == ["e56", "long", "e57", "e58", "e59"]
        assert life.recent("practise", 0) == []
        assert [point["success"] for point in curve(life, ["practise"])] == list(expected.values())
        assert [point["env_steps"] for point in curve(life, ["practise"])] == list(range(10, 620, 10))
