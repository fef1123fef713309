"""What the learner counts of evaluated episodes, also of those that have left the store."""

import pytest
from serl_client import Outcome
from serl_client import messages as m
from serl_client.episode import MAX_NAME

from serl_launcher.replay.mixture import ReplayMixture
from serl_launcher.store.index import Index
from serl_launcher.store.schema import Episode
from serl_launcher.store.server import page_of
from serl_launcher.store.store import Store
from serl_launcher.training.counters import RunCounters, curve, evaluation
from serl_launcher.training.plan import EVAL

CAPACITY, STEPS, STARTS = 100, 20, 12


@pytest.fixture
def store(tmp_path, spec):
    opened = Store.create(tmp_path / "store", spec, {EVAL: CAPACITY})
    opened.direct({"into": EVAL, "phase": "evaluate"})
    opened.hello("arm", "outbox", "A", [])
    yield opened
    opened.close()


def played(store, make_segment, counters, begin, end):
    """Episodes begin to end, of which the counters hears one after the other."""
    revision = 0
    for number in range(begin, end):
        segment = make_segment(
            f"e{number}", number % STARTS, 0, STEPS, ends="terminated", directive=1, phase="evaluate"
        )  # fmt: skip
        store.stage("A", number, segment)
        store.commit()
        revision, rows = store.index.catalog(revision, 1000)
        counters.take(counters.sources.update(rows))


def opened(tmp_path, spec):
    return RunCounters(ReplayMixture(tmp_path / "store", spec, {EVAL: CAPACITY}, {}, seed=0))


def test_starts_are_counted_when_they_are_seen_and_not_when_most_of_them_are_evicted(
    tmp_path, spec, make_segment, store
):
    counters = opened(tmp_path, spec)
    played(store, make_segment, counters, 0, 2 * STARTS)
    assert counters.sources.buffers[EVAL].tail > STEPS * STARTS, "the store holds a fifth of them"
    result = evaluation(counters, "evaluate", 0, None)
    assert (result["episodes"], result["distinct_starts"]) == (2 * STARTS, STARTS)
    assert evaluation(counters, "evaluate", 2, 5)["distinct_starts"] == 5


def test_after_a_restart_the_checkpoint_knows_the_starts_that_the_store_has_lost(tmp_path, spec, make_segment, store):
    before = opened(tmp_path, spec)
    played(store, make_segment, before, 0, STARTS)
    after = opened(tmp_path, spec)
    after.take(after.sources.update(store.index.catalog(0, 1000)[1]))
    assert evaluation(after, "evaluate", 0, None)["distinct_starts"] < STARTS, "what is gone is not invented"
    after.starts |= before.starts
    assert evaluation(after, "evaluate", 0, None)["distinct_starts"] == STARTS


def test_the_steps_of_an_episode_are_finished_with_its_end(tmp_path, spec, make_segment, store):
    counters, revision = opened(tmp_path, spec), 0
    counted = []
    for number, ends in enumerate(["", "terminated"]):
        segment = make_segment("e0", 0, number * 4, 4, ends=ends, directive=1, phase="evaluate")
        store.stage("A", number, segment)
        store.commit()
        revision, rows = store.index.catalog(revision, 1000)
        counters.take(counters.sources.update(rows))
        counts = counters.progress(0.0).phases["evaluate"]
        counted.append((counts.env_steps, counts.finished_steps))
    assert counted == [(4, 0), (8, 8)]


@pytest.mark.parametrize("name", ["e", "\N{GRINNING FACE}" * (MAX_NAME - 6)])
def test_the_catalog_comes_in_pages_that_fit_into_a_header_and_has_every_episode_once(tmp_path, name):
    index, heard, revision, more = Index(tmp_path / "index.sqlite"), [], 0, True
    index.put_episodes(
        Episode(
            i, f"{name}{i:06d}", name, "session", name, name, 1, name, 10 * i, 11 * i, "", revision=i, judged_by=name
        )
        for i in range(1, 2501)
    )
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


def test_the_counts_are_those_of_all_episodes_whatever_the_order_in_which_they_are_heard(tmp_path, spec, make_segment):
    """As a restart hears them: corrected ones last, also those that left the store long ago."""
    store = Store.create(tmp_path / "store", spec, {EVAL: CAPACITY, "online": CAPACITY})
    store.direct({"into": "online", "phase": "practise"})
    store.hello("arm", "outbox", "A", [])
    lives = [
        RunCounters(ReplayMixture(store.folder, spec, {EVAL: CAPACITY, "online": CAPACITY}, {}, seed=0))
        for _ in range(2)
    ]
    revision = 0
    for number in range(60):
        store.stage("A", store.expected("A"), make_segment(f"e{number}", 1, 0, 10, ends="terminated"))
        store.stage("A", store.expected("A"), Outcome(f"e{number}", bool(number % 3)))
        if number % 7 == 6:
            store.stage(
                "A", store.expected("A"), Outcome(f"e{number - 6}", True, discard=number % 2 == 0, judged_by="operator")
            )
        store.commit()
        revision, rows = store.index.catalog(revision, 1000)
        lives[0].take(lives[0].sources.update(rows))
        assert len(lives[0].sources.held["online"]) <= CAPACITY // 10, "what has left the store is not kept"
    lives[1].take(lives[1].sources.update(store.index.catalog(0, 1000)[1]))
    expected = {f"e{number}": bool(number % 3) for number in range(60)}
    for number in range(6, 60, 7):
        expected[f"e{number - 6}"] = number % 2 == 1
    for life in lives:
        phase = life.progress(0.0).phases["practise"]
        assert (phase.episodes, phase.env_steps, phase.successes) == (60, 600, sum(expected.values()))
        assert (life.episodes, life.env_steps) == (60, 600)
        assert [e.id for e in life.recent("practise", 5)] == [f"e{number}" for number in range(55, 60)]
        assert [point["success"] for point in curve(life, ["practise"])] == list(expected.values())
        assert [point["env_steps"] for point in curve(life, ["practise"])] == list(range(10, 610, 10))
    store.close()
