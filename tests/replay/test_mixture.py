"""What is drawn of which source: views and their sizes, shares, the seed, and the beginnings of episodes."""

import dataclasses
from dataclasses import asdict, dataclass

import numpy as np
import pytest
import torch
from serl_client import ConfigError, Outcome

from serl_launcher.replay.choice import Choice
from serl_launcher.replay.mixture import ReplayMixture
from serl_launcher.replay.views import EpisodeInfo, View
from serl_launcher.store import layout
from serl_launcher.training.counters import value_error
from serl_launcher.types import IdleFilter, Window
from tests.shared.models import assert_same
from tests.store.made import founded

from .made import CHUNK, CHUNK_SAC, SAC, SEQUENCE, STATE, starts


def test_an_episode_that_goes_on_after_its_beginning_was_evicted_is_joined_to_nobody_elses(
    store, push, whole, sources, make_segment
):
    """The slot of its newest step is another episode's by then."""
    push("A", make_segment("long", 1, 0, 4))
    sources()
    whole(range(2, 21), session="B")
    store.stage("B", store.expected("B"), make_segment("b19", 21, 0, 10, ends="terminated"))
    push("A", make_segment("long", 1, 4, 4, ends="terminated"))  # in one group, which evicts its beginning
    found = sources()
    buffer = found.buffers["online"]
    assert buffer.tail > 3
    assert buffer.head - 4 > 3 + 200, "step 3 is gone, and its slot in use"
    batch = found.sample(2000, SEQUENCE, {"online": 1.0})
    assert (batch.observation[STATE][..., 0] == batch.observation[STATE][:, 2:3, 0]).all()
    assert 1 not in batch.observation[STATE][..., 0]
    assert (batch.valid.sum(1) == (10 - batch.observation[STATE][:, 2, 1]).clamp(max=3)).all()


def test_no_window_starts_in_an_episode_whose_beginning_was_evicted(push, whole, sources, make_segment):
    push("A", make_segment("long", 1, 0, 4))
    whole(range(2, 7), session="B")
    push("A", make_segment("long", 1, 4, 46, ends="terminated"))
    whole(range(7, 19), session="B")
    found = sources()
    buffer = found.buffers["online"]
    assert 4 <= buffer.tail < 54, "its beginning is gone, and most of it is there"
    whole_ones = range(2 + (buffer.tail - 4) // 10, 19)
    assert {key for key, _ in starts(found.sample(1000, SEQUENCE, {"online": 1.0}))} == {*whole_ones}


def test_a_step_has_one_id_in_every_batch_and_no_other_step_has_it(push, sources, make_segment):
    push("A", make_segment("won", 1, ends="terminated"), Outcome("won", True))
    push("B", make_segment("shown", 2, ends="terminated", directive=2, phase="demonstrate"), Outcome("shown", True))
    ids = {}
    for shares in ({"success": 1.0}, {"online": 0.5, "demo": 0.5}):
        batch = sources().sample(400, SAC, shares)
        for start, step in zip(batch.observation[STATE][:, 0, :2].tolist(), batch.step_id.tolist(), strict=True):
            assert ids.setdefault(step, start) == start
    assert len(ids) == 8


def test_each_window_has_the_task_of_its_episode(push, sources, make_segment):
    for key, task in enumerate(("reach", "push")):
        push("A", dataclasses.replace(make_segment(f"e{key}", key, 0, 3, ends="terminated"), task=task))
    batch = sources().sample(40, SAC, {"online": 1.0})
    assert batch.task == tuple("push" if key else "reach" for key in batch.observation[STATE][:, 0, 0].tolist())
    assert {*batch.task} == {"reach", "push"}


def test_views_hold_what_their_filter_says_and_follow_a_corrected_outcome(push, sources, make_segment):
    push("A", make_segment("win", 1, ends="terminated"), Outcome("win", True))
    push("A", make_segment("loss", 2, ends="terminated"), Outcome("loss", False))
    shown = make_segment("shown", 3, 0, 8, ends="terminated", directive=2, phase="demonstrate")
    push("B", shown, Outcome("shown", True))
    found = sources()
    assert {key for key, _ in starts(found.sample(400, SAC, {"success": 1.0}))} == {1, 3}
    assert (found.size("success"), found.size("online"), found.size("long")) == ((12, 2), (8, 2), (0, 0))
    push("A", Outcome("win", False, judged_by="operator"), Outcome("loss", True, judged_by="operator"))
    assert {key for key, _ in starts(sources().sample(400, SAC, {"success": 1.0}))} == {2, 3}
    push("A", Outcome("loss", True, discard=True, judged_by="operator"))
    found = sources()
    assert {key for key, _ in starts(found.sample(400, SAC, {"success": 1.0}))} == {3}
    assert {key for key, _ in starts(found.sample(400, SAC, {"online": 1.0}))} == {1}


def test_a_choice_of_steps_is_the_set_that_was_put_in_and_every_one_of_them_is_found():
    generator, choice, expected, capacity = np.random.default_rng(0), Choice(1000), {}, 1000
    for _ in range(200):
        new = np.arange(choice.head, choice.head + generator.integers(200))
        choice.evict(max(choice.tail, new[-1] + 1 - capacity + generator.integers(20)) if len(new) else choice.tail)
        choice.put(new, generator.random(len(new)) < 0.3)
        choice.head += len(new)
        some = np.arange(choice.tail, choice.head)[generator.random(choice.head - choice.tail) < 0.1]
        which = generator.random(len(some)) < 0.5
        choice.put(some, which)
        flat = choice._chosen.reshape(-1)
        expected = {number for number in range(choice.tail, choice.head) if flat[number % capacity]}
        assert set(some[which].tolist()) <= expected
        assert not set(some[~which].tolist()) & expected
        assert len(choice) == len(expected)
        assert set(choice.nth(np.arange(len(choice))).tolist()) == expected


@pytest.mark.slow
def test_views_follow_every_change_of_interleaved_episodes_as_a_look_at_all_of_them_would(
    push, store, mixture, make_segment
):
    """Random actors, verdicts and discards, and a ring that is overwritten many times."""
    views = {
        "won": View(("online",), ("successful",)), "long": View(("online",), min_length=12),
        "human": View(("online",), start_steps="intervened"),
        "decisions": View(("online",), ("successful",), start_steps="decisions"),
    }  # fmt: skip
    sources, at = mixture(views), {"A": 0, "B": 0}
    generator, ids, started = np.random.default_rng(1), [], 0
    for turn in range(150):
        session = "AB"[generator.integers(2)]
        started += at[session] == 0
        ids += [f"{session}{started}"] * (at[session] == 0)
        name = next(id for id in reversed(ids) if id[0] == session)
        ends = "terminated" if at[session] > 5 and generator.random() < 0.5 else ""
        segment = make_segment(name, 1, at[session], 4, ends=ends)
        segment.intervened[:], segment.chunk_start[:] = generator.random((2, 4)) < 0.5
        push(session, segment)
        at[session] = 0 if ends else at[session] + 4
        if generator.random() < 0.5:
            word = Outcome(ids[generator.integers(max(0, len(ids) - 9), len(ids))], bool(generator.integers(2)),
                           discard=bool(generator.random() < 0.2), judged_by="operator")  # fmt: skip
            push(session, word)
        if turn % 3 == 0:
            _same_as_a_look_at_all(store, sources(), views | {"online": View(("online",))})


def _same_as_a_look_at_all(store, sources, views):
    buffer = sources.buffers["online"]
    infos = {info.number: info for info in (EpisodeInfo(*row) for row in store.index.catalog(0, 10_000)[1])}
    numbers = np.arange(buffer.tail, buffer.head)
    records = buffer._steps[numbers % 200]
    whole = [r for r in records if infos[int(r["episode"])].first >= buffer.tail]
    flags = {"intervened": layout.INTERVENED, "decisions": layout.INTERVENED | layout.CHUNK_START}
    for name, view in views.items():
        for begin in ("chunk_start", "any"):
            expected = {
                int(r["number"]) for r in whole
                if view.holds(infos[int(r["episode"])])
                and (view.start_steps == "all" or r["flags"] & flags[view.start_steps])
                and (begin == "any" or r["flags"] & layout.CHUNK_START)
            }  # fmt: skip
            choice = sources._choice(name, "online", begin)
            chosen = numbers if choice is None else choice.nth(np.arange(len(choice)))
            usable = {int(n) for n in chosen if buffer._first[n % 200] >= buffer.tail}
            assert usable == expected
        alive = [info for info in infos.values() if info.first >= buffer.tail and view.holds(info)]
        assert sources.size(name) == (len(expected), sum(bool(info.closed) for info in alive))


@pytest.mark.slow
def test_a_discard_and_a_verdict_look_at_no_steps_but_their_episodes_and_the_new_ones(tmp_path, spec, make_segment):
    made = founded(tmp_path, online=6000)
    views = {"won": View(("online",), ("successful",))}
    found, cursor, looked = ReplayMixture(made.folder, spec, {"online": 6000}, views, seed=0), 0, []
    buffer = found.buffers["online"]
    episodes = buffer.episodes
    buffer.episodes = lambda numbers: looked.append(len(numbers)) or episodes(numbers)
    decisions = Window(CHUNK.offsets, starts="chunk_start")
    for i in range(500):
        made.stage("A", made.expected("A"), make_segment(f"e{i}", 1, 0, 10, ends="terminated"))
        if i >= 450:
            word = Outcome(f"e{i - 300}", bool(i % 2), discard=i % 3 == 0, judged_by="operator")
            made.stage("A", made.expected("A"), word)
        made.commit()
        if i >= 449:
            looked.clear()
            cursor, rows = made.index.catalog(cursor, 10_000)
            found.update(rows)
            for shares in ({"online": 1.0}, {"won": 1.0}):
                for window in (CHUNK, decisions):
                    found.sample(64, window, shares)
            assert i < 452 or sum(looked) <= 4 * (10 + 1024), "each of four choices looks at what is new or changed"
    made.close()


def test_beginnings_that_are_overwritten_while_they_are_read_are_left_out(push, whole, sources, make_segment):
    whole((1, 2), 50)
    found = sources()
    episodes = list(found.held["online"].values())
    push("A", *(make_segment(f"later{i}", 9, 0, n, ends="terminated") for i, n in enumerate((50, 50, 25))))
    batch, returns = found.beginnings(episodes, CHUNK, 1.0)
    assert (starts(batch), returns.tolist()) == ({(2, 0)}, [1225.0])


def test_a_batch_is_shared_out_exactly_and_an_empty_source_gives_none(push, sources, make_segment):
    push("A", make_segment("e0", 1, 0, 20, ends="terminated"))
    assert sources().sample(64, SAC, {"online": 0.5, "demo": 0.5}) is None
    push("B", make_segment("d0", 2, 0, 10, ends="terminated", directive=2, phase="demonstrate"))
    batch = sources().sample(65, SAC, {"online": 0.5, "demo": 0.5})
    keys = batch.observation[STATE][:, 0, 0]
    assert sorted([(keys == 1).sum().item(), (keys == 2).sum().item()]) == [32, 33]
    assert batch.task == ("reach",) * 65
    keys = sources().sample(11, SAC, {"online": 0.6, "demo": 0.4}).observation[STATE][:, 0, 0]
    assert (keys == 1).sum() == 7, "6.6 is nearer to 7"
    assert sources().sample(11, SAC, {"online": 0.99, "success": 0.01}), "no row is of the empty view"


def test_the_same_generator_draws_the_same_batch_again(push, sources, make_segment):
    push("A", make_segment("e0", 1, 0, 40, ends="terminated"))
    found = sources()
    state = found.state_dict()
    first = found.sample(32, SAC, {"online": 1.0}).step_id.clone()
    assert not (found.sample(32, SAC, {"online": 1.0}).step_id == first).all()
    found.load_state_dict(state)
    assert (found.sample(32, SAC, {"online": 1.0}).step_id == first).all()


class SlowGpu:
    """A GPU's stream that a CPU plays. Copies are made only when its event is waited for."""

    def __init__(self, monkeypatch):
        self.begun = []
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self)
        monkeypatch.setattr(torch.Tensor, "to", lambda *source, non_blocking: self._copied(*source, non_blocking))
        empty = torch.empty  # pinned memory needs a GPU
        monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory, **more: empty(*shape, **more))

    def _copied(self, source, device, non_blocking):
        assert non_blocking, "the trainer waits for all updates before"
        self.begun.append((torch.full_like(source, 7), source))
        return self.begun[-1][0]

    def record_event(self):
        return self

    def synchronize(self):
        for made, source in self.begun:
            made.copy_(source)
        self.begun.clear()


def test_a_batch_is_drawn_over_the_last_one_only_when_a_gpu_has_copied_that(push, read, make_segment, monkeypatch):
    push("A", make_segment("e0", 1, 0, 40, ends="terminated"))
    windows = (SAC, CHUNK, SAC, SAC, CHUNK)
    here = read()
    expected = [asdict(here.sample(16, window, {"online": 1.0})) for window in windows]
    gpu = SlowGpu(monkeypatch)
    there = read(device="cuda")
    copies = [there.sample(16, window, {"online": 1.0}) for window in windows]
    assert gpu.begun, "the trainer goes on while the last batch is copied"
    gpu.synchronize()
    assert_same([asdict(batch) for batch in copies], expected)


def test_windows_start_where_the_rows_of_a_view_say_and_go_on_over_the_others(push, mixture, make_segment):
    segment = make_segment("e0", 1, 0, 12, ends="terminated")
    segment.intervened[4:8] = True
    push("A", segment, make_segment("e1", 2, 0, 4, ends="terminated"))
    views = {"human": View(("online",), start_steps="intervened"), "alone": View(("online",), start_steps="autonomous")}
    sources = mixture(views)()
    human = sources.sample(300, CHUNK, {"human": 1.0})
    assert starts(human) == {(1, i) for i in range(4, 8)}
    assert human.valid.all()
    assert not human.intervened.all()
    assert starts(sources.sample(300, CHUNK, {"alone": 1.0})) == {
        *((1, i) for i in range(12) if not 4 <= i < 8), *((2, i) for i in range(4))
    }  # fmt: skip
    assert (sources.size("human"), sources.size("alone")) == ((4, 2), (12, 2))


@pytest.mark.parametrize(
    "idle_filter",
    [IdleFilter(0.1, STATE, entries=(1, 3)), IdleFilter(0.1, "action")],  # the other entries are a sensor's noise
)
def test_no_window_starts_where_the_robot_stays_still_and_no_row_is_lost(push, sources, make_segment, idle_filter):
    segment = make_segment("e0", 1, 0, 20, ends="truncated")
    segment.observation[STATE][5:15] = segment.observation[STATE][5]
    segment.observation[STATE][:, [0, 2, 4, 5, 6, 7]] += np.random.default_rng(0).normal(size=(21, 6))
    segment.action[:, 1] = segment.observation[STATE][:20, 1]
    push("A", segment)
    every = set(range(20))
    for still, drawn in ((idle_filter, every - set(range(5, 11))), (IdleFilter(0.1, STATE), every), (None, every)):
        batch = sources().sample(400, Window(CHUNK.offsets, idle_filter=still), {"online": 1.0})
        assert set(batch.step_id.tolist()) == drawn


@pytest.mark.parametrize(
    ("idle_filter", "named"),
    [
        (IdleFilter(0.1, "observation.joints"), rf"idle_filter.column='observation.joints': .*'action', '{STATE}'"),
        (IdleFilter(0.1, STATE, (0, 8)), r"idle_filter.entries=\[0, 8\]: observation.state has the entries 0 to 7"),
        (IdleFilter(0.1, "action", ()), r"idle_filter.entries=\[\]: action has the entries 0 to 1"),
    ],
)
def test_stillness_of_what_no_row_has_is_refused_with_what_there_is(push, sources, make_segment, idle_filter, named):
    push("A", make_segment("e0", ends="terminated"))
    with pytest.raises(ConfigError, match=named):
        sources().sample(4, Window(CHUNK.offsets, idle_filter=idle_filter), {"online": 1.0})


def test_the_first_windows_of_episodes_come_with_the_discounted_returns_that_followed(push, sources, make_segment):
    push("A", make_segment("won", 1, 0, 3))
    push("B", make_segment("lost", 2, 0, 7, ends="truncated"))  # lies between
    push("A", make_segment("won", 1, 3, 3, ends="terminated"))
    push("B", make_segment("shown", 3, 0, 4, ends="terminated", directive=2, phase="demonstrate"))
    found = sources()
    episodes = {e.id: e for held in found.held.values() for e in held.values()}
    batch, returns = found.beginnings([episodes["won"], episodes["lost"]], CHUNK_SAC, 0.5)
    assert starts(batch) == {(1, 0), (2, 0)}
    expected = [sum(0.5**i * i for i in range(steps)) for steps in (6, 7)]  # every reward is its index
    torch.testing.assert_close(returns, torch.tensor(expected))
    assert batch.reward.tolist() == [[0, 1, 2, 3, 4]] * 2
    short, returns = found.beginnings([episodes["shown"]], CHUNK_SAC, 1.0)
    assert (short.length.tolist(), returns.tolist(), short.task) == ([4], [6.0], ("reach",))


@dataclass
class Expects:
    """An algorithm that expects the same everywhere, or nothing at all."""

    expected: float | None
    windows: dict
    discount = 0.5

    def value(self, batch):
        assert batch.action.shape[1] == 5, "the window of `update`, or else of the first update"
        return None if self.expected is None else torch.full((len(batch),), self.expected)


@pytest.mark.parametrize("windows", [{"update_policy": SAC, "update": CHUNK_SAC},
                                     {"update_critic": CHUNK_SAC, "update_policy": SAC}])  # fmt: skip
def test_the_error_of_a_value_is_how_far_it_is_from_the_returns_in_the_mean(push, sources, make_segment, windows):
    push("A", make_segment("short", 1, 0, 2, ends="terminated"), make_segment("long", 2, 0, 3, ends="truncated"))
    found = sources()  # their returns are 0.5 and 1
    episodes = list(found.held["online"].values())
    for expected, error, bias in ((0.75, 0.25, 0.0), (2.0, 1.25, 1.25), (0.0, 0.75, -0.75)):
        told = value_error(found, Expects(expected, windows), episodes, "cpu")
        assert told == {"value_error": error, "value_bias": bias}
    for expected, some in ((None, episodes), (2.0, [])):
        assert value_error(found, Expects(expected, windows), some, "cpu") == {}


def test_episodes_that_left_the_store_have_no_beginning(store, whole, sources):
    whole(range(30))
    episodes = [EpisodeInfo(*row) for row in store.index.catalog(0, 100)[1]]
    found = sources()
    batch, returns = found.beginnings(episodes, CHUNK, 1.0)
    assert len(batch) == len(returns) < 30
    assert (returns == 45).all()
    assert starts(batch) == {(key, 0) for key in range(30 - len(batch), 30)}
    newest = max(range(len(batch)), key=lambda row: int(batch.step_id[row]))
    assert found.episode_of(int(batch.step_id[newest])) == (episodes[-1], 0)
    assert found.episode_of(int(batch.step_id[newest]) + 3) == (episodes[-1], 3)
    assert found.beginnings(episodes[:3], CHUNK, 1.0) is None
    for left_out in ({"closed": False}, {"discard": True}):
        assert found.beginnings([episodes[-1]._replace(**left_out)], CHUNK, 1.0) is None
    assert found.beginnings([], CHUNK, 1.0) is None
