"""Windows never cross an episode, see every durable step, and never a row that is being overwritten."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from serl_client import ConfigError, Feature, Spec
from serl_client.limits import Limits

from serl_launcher.replay.buffer import ReplayBuffer
from serl_launcher.replay.choice import Choice
from serl_launcher.replay.mixture import ReplayMixture
from serl_launcher.store.layout import Layout
from serl_launcher.training import tracing
from serl_launcher.types import Window
from tests.shared.data import changed
from tests.shared.examples import run_example
from tests.store.made import founded

from .made import CHUNK, CHUNK_SAC, SAC, SEQUENCE, STATE, arrays_of, gathered, starts


def test_the_example_of_the_buffer_runs(push, store, spec, make_segment):
    push("A", make_segment("e0", 3, 0, 4, ends="terminated"))
    given = {"Path": Path, "Layout": Layout, "Window": Window, "np": np, "spec": spec, "ReplayBuffer": ReplayBuffer}
    folder, size = ("runs/arm/store/online", f"{store.folder}/online"), ("100_000", "200")
    found = run_example(ReplayBuffer, given, folder=folder, size=size)
    assert found["rows"]["action"].shape == (256, *spec.action.shape)
    assert set(found["rows"]["index"]) == {0, 1, 2, 3}


def test_every_durable_step_is_drawn_and_the_terminal_one_at_once(push, sources, make_segment):
    """hi-ors B5: a buffer that never draws its newest step never sees the reward of a single success."""
    push("A", make_segment("e0", 3, 0, 4, ends="terminated"))
    batch = sources().sample(500, SAC, {"online": 1.0})
    assert starts(batch) == {(3, i) for i in range(4)}
    assert batch.reward.max() == 3.0
    assert (batch.terminated[:, 0] == (batch.reward[:, 0] == 3.0)).all()


def test_an_open_episodes_newest_step_waits_for_the_observation_after_it(push, sources, make_segment):
    push("A", make_segment("e0", 3, 0, 4))
    assert starts(sources().sample(500, SAC, {"online": 1.0})) == {(3, i) for i in range(3)}
    assert sources().sample(500, CHUNK, {"online": 1.0}) is None
    push("A", make_segment("e0", 3, 4, 2))
    assert starts(sources().sample(500, SAC, {"online": 1.0})) == {(3, i) for i in range(5)}


def test_a_chunk_stops_at_the_end_of_its_episode(push, sources, make_segment):
    """hi-ors B1: a terminal step's chunk went on into the next episode, unmasked."""
    push("A", make_segment("e0", 1, 0, 6, ends="terminated"), make_segment("e1", 2, 0, 6, ends="truncated"))
    batch = sources().sample(400, CHUNK_SAC, {"online": 1.0})
    index = batch.observation[STATE][:, 0, 1]
    assert (batch.length == (6 - index).clamp(max=5)).all()
    assert (batch.valid.sum(1) == batch.length).all()
    offsets = torch.arange(5)
    assert (batch.reward == (index[:, None] + offsets) * batch.valid).all()
    assert (batch.action[~batch.valid] == 0).all()
    following = batch.next_observation[STATE][:, 0]
    assert (following[:, 0] == batch.observation[STATE][:, 0, 0]).all()
    assert (following[:, 1] == index + batch.length).all()
    ends = batch.length < 5
    assert (batch.terminated.any(1) | batch.truncated.any(1))[ends].all()


@pytest.mark.parametrize("parts", [(6, 6), (2, 4, 2, 4)])
def test_a_gap_ends_windows_as_the_end_of_an_episode_does(push, sources, make_segment, parts):
    start = 0
    for count in parts:
        push("A", dataclasses.replace(part := make_segment("e0", 1, start, count), gap=part.reward == 6))
        push("B", make_segment("e1", 2, start, count))  # lies between them
        start += count
    chunks = sources().sample(400, CHUNK, {"online": 1.0})
    own = chunks.observation[STATE][:, 0, 0] == 1
    index = chunks.observation[STATE][own, 0, 1]
    assert set(index.tolist()) == {*range(8)}, "the last steps wait for those after them"
    assert (chunks.length[own] == torch.where(index < 6, (6 - index).clamp(max=5), 5)).all()
    assert starts(sources().sample(400, SAC, {"online": 1.0})) >= {(1, i) for i in (4, 6)}
    assert (1, 5) not in starts(sources().sample(400, SAC, {"online": 1.0})), "nobody saw what followed it"
    before = sources().sample(400, SEQUENCE, {"online": 1.0}).observation[STATE]
    at = before[(before[:, 2, 0] == 1) & (before[:, 2, 1] == 6)]
    assert (at[:, :2, 1] == 6).all(), "what came before the gap is no history"


def test_chunks_of_interleaved_actors_follow_their_own_episode(push, sources, make_segment):
    for start in range(0, 12, 2):
        last = start == 10
        push("A", make_segment("a", 1, start, 2, ends="terminated" if last else ""))
        push("B", make_segment("b", 2, start, 2, ends="truncated" if last else ""))
    batch = sources().sample(500, SEQUENCE, {"online": 1.0})
    states = batch.observation[STATE]  # [B, 6, 8]
    index = states[:, 2, 1]
    assert (states[:, :, 0] == states[:, :1, 0]).all()
    expected = (index[:, None] + torch.tensor([-2, -1, 0, 1, 2, 3])).clamp(0, 12)
    assert (states[:, :, 1] == expected).all()


def test_after_the_ring_has_wrapped_observation_and_action_still_belong_together(push, sources, make_segment):
    """hi-ors B3: after a wrap all samples were mismatched."""
    for i in range(60):
        segment = make_segment(f"e{i}", i, 0, 9, ends="terminated")
        segment.action[:] = (segment.reward / 10)[:, None]
        push("A", segment)
    batch = sources().sample(2000, SAC, {"online": 1.0})
    assert batch.observation[STATE][:, 0, 0].min() >= 60 - 200 // 9 - 3
    assert np.allclose(batch.action[:, 0, 0] * 10, batch.observation[STATE][:, 0, 1], atol=1e-5)
    assert (batch.next_observation[STATE][:, 0, 1] == batch.observation[STATE][:, 0, 1] + 1).all()
    assert (batch.next_observation[STATE][:, 0, 0] == batch.observation[STATE][:, 0, 0]).all()


def test_an_episode_that_a_crash_cut_gives_chunks_but_no_last_value_target(store, push, sources, make_segment):
    push("A", make_segment("e0", 1, 0, 6))
    store.close_session("A")
    store.commit()
    assert starts(sources().sample(400, SAC, {"online": 1.0})) == {(1, i) for i in range(5)}
    batch = sources().sample(400, CHUNK, {"online": 1.0})
    assert starts(batch) == {(1, i) for i in range(6)}
    assert (batch.length == (6 - batch.observation[STATE][:, 0, 1]).clamp(max=5)).all()


def test_what_the_writer_overwrites_while_it_is_copied_is_not_used(whole, reader):
    whole((1,), 50)
    reader = reader()
    reader.refresh()
    drawn = reader.draw(64, SAC, np.random.default_rng(0), None)
    into = arrays_of(reader, 64, SAC)
    assert reader.gather(drawn, SAC, into)
    copy = reader._take

    def copy_while_the_writer_goes_round(name, rows, out):
        whole(range(2, 10), 50, key=9)
        reader._take = copy
        copy(name, rows, out)

    reader._take = copy_while_the_writer_goes_round
    assert not reader.gather(drawn, SAC, into)
    assert (into[STATE] == 9).any(), "the test must have overwritten what was drawn"


def test_steps_that_are_overwritten_while_the_reader_takes_them_in_are_not_drawn(whole, reader):
    """Each record that the reader copies has its old number and its new content."""

    def torn(slots):
        reader._records = copied
        numbers = copied(slots)["number"]
        whole(range(2, 10), 50, key=9)
        records = copied(slots)
        assert (records["number"] != numbers).all(), "the test must have overwritten what is read"
        records["number"] = numbers
        return records

    whole((1,), 50)
    reader = reader()
    copied, reader._records = reader._records, torn
    reader.refresh()
    assert reader.draw(64, CHUNK, np.random.default_rng(0), None) is None
    reader.refresh()
    drawn = reader.draw(64, CHUNK, np.random.default_rng(0), None)
    assert drawn.steps.min() >= reader.tail > 50


def test_what_is_overwritten_while_observations_are_read_is_left_out(whole, reader):
    whole((1, 2), 50)
    reader = reader()
    reader.refresh()
    assert reader.observed(STATE, None).shape == (100, 8)
    whole(range(3, 8), 25, key=9)  # over all of the first
    assert reader.observed(STATE, None)[:, 0].tolist() == [2.0] * 50
    assert reader.observed(STATE, np.array([0, 50]))[:, 0].tolist() == [2.0]


def test_windows_of_one_step_are_drawn_and_copied_as_longer_ones_are(push, reader, make_segment):
    """Of two actors at once, over a ring that is overwritten, with ends of each kind and a gap."""
    reader = reader()
    for i in range(30):
        for session, number in (("A", 2 * i), ("B", 2 * i + 1)):
            part = make_segment(f"e{number}", number, 0, 6, ends=("terminated", "truncated", None)[number % 3])
            push(session, dataclasses.replace(part, gap=part.reward == 3) if number % 5 == 0 else part)
        reader.refresh()
    chains, _ = reader._usable(np.arange(reader.tail, reader.head), SAC)
    assert set(reader.draw_steps(5000, SAC, np.random.default_rng(0), None)) == set(chains[:, 0])
    assert reader.draw_steps(5, SAC, np.random.default_rng(0), Choice(100)) is None, "of a view that is empty"
    numbers = np.resize(chains[:, 0], 200)
    one = arrays_of(reader, 200, SAC)
    assert reader.gather_steps(numbers, SAC, one)
    for name, expected in gathered(reader, numbers, SAC).items():
        np.testing.assert_array_equal(one[name], expected, name)


def test_a_column_that_no_row_has_is_named(push, sources, make_segment):
    push("A", make_segment("e0", ends="terminated"))
    window = Window({"observation.images.cam_high": (0,), "action": (0,)})
    with pytest.raises(ConfigError, match=r"cam_high.*they have .*'observation.state'"):
        sources().sample(4, window, {"online": 1.0})


def test_a_reader_that_comes_late_or_falls_behind_sees_what_is_left(whole, reader):
    early = reader()
    whole(range(40))
    for each in (early, reader()):
        each.refresh()
        drawn = each.draw(300, SAC, np.random.default_rng(0), None)
        assert set(each.episodes(drawn.steps[:, 0]).tolist()) == set(range(each.tail // 10 + 1, 41))


def test_rare_decisions_are_found_and_extras_keep_their_own_names(tmp_path, spec, make_segment):
    """A column of Spec.extras may be called like a field of the step record."""
    extras = {"weights": Feature((3,)), "number": Feature((), "int64")}
    spec = Spec(spec.observation, spec.action, 10.0, extras)
    made = founded(tmp_path, spec=spec, online=2000)
    segment = make_segment("e0", 1, 0, 500, ends="terminated")
    segment.chunk_start[:] = np.arange(500) % 50 == 0
    own = {"weights": np.full((500, 3), 7.0, np.float32), "number": np.arange(500)}
    made.stage("A", 0, dataclasses.replace(segment, extras=own))
    made.commit()
    found = ReplayMixture(made.folder, spec, {"online": 2000}, {}, seed=0)
    found.update(made.index.catalog(0, 10)[1])
    offsets = tuple(range(50))
    window = Window({STATE: (0,), "action": offsets, "weights": offsets, "number": offsets}, starts="chunk_start")
    for _ in range(20):
        batch = found.sample(64, window, {"online": 1.0})
        assert {i % 50 for _, i in starts(batch)} == {0}
        assert (batch.extras["weights"] == 7).all()
        assert (batch.extras["number"] == batch.observation[STATE][:, :1, 1] + torch.arange(50)).all()
    made.close()


@pytest.mark.parametrize("name", ["reward", "action", STATE])
def test_extras_that_every_row_has_already_are_refused(spec, name):
    with pytest.raises(ConfigError):
        Spec(spec.observation, spec.action, 10.0, {name: Feature((2,))})


@pytest.mark.parametrize(
    ("column", "row", "value", "said"),
    [
        (STATE, 2, 2e6, "observation.state [0] is 2e+06 at step 2, beyond its limit of 1e+06"),
        (STATE, 4, -3e38, "observation.state [0] is -3e+38 at step 4, beyond its limit of -1e+06"),  # the final one
        ("reward", 1, 2e6, "reward is 2e+06 at step 1, beyond its limit of 1e+06"),
        ("time", 3, 1e308, "time is 1e+308 s at step 3, beyond its limit of 1e+11 s"),
    ],
)
def test_numbers_that_an_older_store_has_taken_are_found(
    push, sources, make_segment, monkeypatch, column, row, value, said
):
    monkeypatch.setattr(tracing, "LOOKED", 7)
    good, bad, later = (make_segment(f"e{key}", key, ends="terminated") for key in range(3))
    with monkeypatch.context() as patch:
        patch.setattr(Limits, "broken", lambda *_: "")
        push("A", good, changed(bad, column, value, row), later)
    found = {}
    tracing.sift(sources(), found.__setitem__)
    assert found == {"e1": said}
