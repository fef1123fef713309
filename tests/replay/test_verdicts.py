"""An operator's word is the reward and the end of an episode's last step, whenever it comes; what is stored stays."""

from collections import defaultdict
from dataclasses import asdict

import numpy as np
import pytest
from omegaconf import OmegaConf
from serl_client import ConfigError, Outcome

from serl_launcher.replay.verdicts import rewards_of
from serl_launcher.store.layout import TERMINATED, TRUNCATED
from tests.shared.models import assert_same

from .made import CHUNK, CHUNK_SAC, REWARDS, SAC, VIEWS, WORDS, Reader, gathered, said, starts, whole_steps


def ends(sources, window=SAC):
    """{(key, index): (reward, terminated, truncated, valid steps, weight in a critic's loss)} of windows drawn."""
    batch = sources.sample(600, window, {"online": 1.0})
    last = batch.length - 1
    columns = [getattr(batch, name)[range(len(batch)), last] for name in ("reward", "terminated", "truncated")]
    counts = batch.valid.all(1) | batch.terminated.any(1)
    keys = [(int(key), int(i)) for key, i in batch.observation["observation.state"][:, 0, :2].tolist()]
    values = zip(*(column.tolist() for column in columns), batch.length.tolist(), counts.tolist(), strict=True)
    return dict(zip(keys, values, strict=True))


@pytest.mark.parametrize("judge", [None, True, False])
@pytest.mark.parametrize("end", ["terminated", "truncated"])
def test_each_word_in_each_order_gives_the_last_row_its_reward_and_end_and_no_other_row(
    push, heard, make_segment, judge, end
):  # fmt: skip
    records = [] if judge is None else [Outcome("e1", judge)]
    push("A", make_segment("e0", 2, ends="terminated"), *records, make_segment("e1", 1, 0, 4, ends=end))
    stored = (3.0, end == "terminated", end == "truncated", 1, True)
    assert ends(heard())[1, 3] == stored
    for word in ("success", "failure", "success", "discard", "failure", "nothing", "success", "nothing"):
        push("A", said("e1", word))
        if word != "discard":
            found = ends(heard())
            reward = {"success": 5.0, "failure": -2.0}.get(word)
            assert found[1, 3] == (stored if reward is None else (reward, True, False, 1, True))
            assert {found[1, i] for i in range(3)} == {(float(i), False, False, 1, True) for i in range(3)}
            assert found[2, 3] == (3.0, True, False, 1, True)
        else:
            assert {key for key, _ in starts(heard().sample(200, SAC, {"online": 1.0}))} == {2}


def test_a_chunk_that_a_time_limit_cut_short_counts_in_the_critics_loss_once_a_person_has_judged_it(
    push, heard, make_segment
):  # fmt: skip
    push("A", make_segment("e1", 1, 0, 8, ends="truncated"))
    before = ends(heard(), CHUNK_SAC)
    assert [before[1, i] for i in (3, 6)] == [(7.0, False, True, 5, True), (7.0, False, True, 2, False)]
    push("A", said("e1", "success"))
    after = ends(heard(), CHUNK_SAC)
    assert [after[1, i] for i in (2, 3, 6)] == [
        (6.0, False, False, 5, True), (5.0, True, False, 5, True), (5.0, True, False, 2, True),
    ]  # fmt: skip


def test_what_a_dead_actor_left_is_drawn_to_its_last_row_once_a_person_has_judged_it_and_its_next_part_takes_over(
    store, push, heard, make_segment
):  # fmt: skip
    """Without a final observation a step has no successor, which a terminal one needs not."""
    push("A", make_segment("e1", 1, 0, 6))
    store.lives.hello("operator", "desk", "O", [])
    push("O", said("e1", "success"))  # which closes the episode
    assert ends(heard())[1, 5] == (5.0, True, False, 1, True)
    push("O", said("e1", "nothing"))
    assert (1, 5) not in ends(heard())
    push("O", said("e1", "success"))
    assert ends(heard())[1, 5] == (5.0, True, False, 1, True)
    push("A", make_segment("e1", 1, 6, 4))  # the actor was not dead
    found = ends(heard())
    assert (1, 5) not in found
    assert not any(terminated for _, terminated, *_ in found.values())
    push("A", make_segment("e1", 1, 10, 4, ends="truncated"))
    found = ends(heard())
    assert (1, 5) not in found
    assert found[1, 13] == (5.0, True, False, 1, True)
    assert ends(heard(), CHUNK)[1, 5] == (5.0, False, False, 1, False), "as stored: its index"


def test_a_word_during_the_episode_waits_for_its_end_and_what_left_the_store_is_still_reported_as_judged(
    store, spec, push, whole, make_segment
):  # fmt: skip
    reader = Reader(store, spec, verdict=REWARDS)
    push("A", said("e1", "success"))  # before its first step
    push("A", make_segment("e1", 1, 0, 4))
    assert not any(terminated for _, terminated, *_ in ends(reader.hear()).values())
    push("A", make_segment("e1", 1, 4, 4, ends="truncated"))
    assert ends(reader.hear())[1, 7] == (5.0, True, False, 1, True)
    whole(range(30), session="B")
    reader.hear()
    assert reader.sources.buffers["online"].tail > 8
    push("A", said("e1", "failure"))
    reader.hear()
    info = reader.told["e1"]
    assert (info.reward, info.terminated, info.truncated) == (sum(range(7)) - 2.0, True, False)
    push("A", said("e1", "nothing"))
    reader.hear()
    assert (reader.told["e1"].reward, reader.told["e1"].truncated) == (sum(range(8)), True)


def test_the_first_windows_returns_and_the_filters_by_reward_follow_a_verdict(push, heard, make_segment):
    lost = make_segment("lost", 1, 0, 3, ends="truncated")
    lost.reward[:] = 0
    push("A", lost, make_segment("won", 2, 0, 3, ends="terminated"))
    assert (heard().size("rewarded"), heard().size("unrewarded")) == ((3, 1), (3, 1))
    push("A", said("lost", "success"), said("won", "failure"))
    found = heard()
    episodes = list(found.held["online"].values())
    batch, returns = found.beginnings(episodes, CHUNK_SAC, 0.5)
    assert returns.tolist() == [5.0 * 0.25, 0.5 - 2.0 * 0.25]
    assert [episode.reward for episode in episodes] == [5.0, -1.0]
    assert batch.reward[:, :3].tolist() == [[0, 0, 5], [0, 1, -2]]
    assert starts(found.sample(50, SAC, {"rewarded": 1.0})) == {(1, i) for i in range(3)}


class Model:
    """Random actors, cuts, restarts and words; and what every last row must be, from nothing but what was said."""

    def __init__(self, store, push, make_segment):
        self.store, self.push, self.make_segment = store, push, make_segment
        self.generator, self.started, self.names = np.random.default_rng(3), 0, []
        self.open = dict.fromkeys("AB")  # session: (episode, steps so far)
        self.words = defaultdict(list)  # episode: the operator's words

    def turn(self):
        self.generator.choice([self.grow, self.grow, self.grow, self.say, self.cut])()

    def grow(self):
        session = "AB"[self.generator.integers(2)]
        name, start = self.open[session] or (self.begin(), 0)
        end = ("", "", "terminated", "truncated")[self.generator.integers(4)]
        if end:
            self.maybe_judge(session, name)
        self.push(session, self.make_segment(name, int(name[1:]), start, 3, ends=end))
        self.open[session] = None if end else (name, start + 3)

    def begin(self):
        self.started += 1
        self.names.append(f"e{self.started}")
        return self.names[-1]

    def maybe_judge(self, session, name):
        """The judge's word, and sometimes a key, come just before the last rows."""
        self.push(session, Outcome(name, bool(self.generator.integers(2))))
        if self.generator.random() < 0.3:
            self.say_of(session, name)

    def say(self):
        """About one of the newest episodes, or one that has not begun."""
        names = [*self.names[-12:], f"e{self.started + 1}"]
        self.say_of("O", names[self.generator.integers(len(names))])

    def say_of(self, session, name):
        word = list(WORDS)[self.generator.choice(4, p=[0.4, 0.3, 0.1, 0.2])]
        self.push(session, said(name, word))
        self.words[name].append(word)

    def cut(self):
        """Somebody closes all open episodes; their actors go on with parts of them."""
        if self.generator.random() < 0.3:
            self.store.close_open()

    def expected(self, records):
        """{number of a step: (reward, terminated, truncated, whether anything may follow it)} of whole episodes."""
        episodes = self.store.index.latest(10_000)
        newest = {}
        for episode in reversed(episodes):
            newest[episode.part_of] = episode.number
        last, infos = {}, {episode.number: episode for episode in episodes}
        for record in records:
            last[int(record["episode"])] = int(record["number"])
        found = {}
        for record in records:
            number, info, flags = int(record["number"]), infos[int(record["episode"])], int(record["flags"])
            values = float(record["reward"]), flags & TERMINATED > 0, flags & TRUNCATED > 0
            words = self.words[info.part_of]
            is_last = last[info.number] == number and newest[info.part_of] == info.number and info.closed
            if is_last and words and words[-1] in ("success", "failure"):
                values = {"success": 5.0, "failure": -2.0}[words[-1]], True, False
            found[number] = values
        return found


@pytest.mark.slow
def test_whatever_is_said_in_whatever_order_every_row_is_what_the_last_word_makes_of_it_also_after_a_restart(
    store, heard, read, push, make_segment
):  # fmt: skip
    store.lives.hello("operator", "desk", "O", [])
    model, judged, parts = Model(store, push, make_segment), 0, 0
    for turn in range(500):
        model.turn()
        if turn % 4 == 0:
            sources = heard()
            buffer = sources.buffers["online"]
            numbers, records = whole_steps(buffer)
            if not len(numbers):
                continue
            expected, arrays = model.expected(records), gathered(buffer, numbers, CHUNK)
            columns = (arrays[name][:, 0].tolist() for name in ("reward", "terminated", "truncated"))
            assert dict(zip(numbers.tolist(), zip(*columns, strict=True), strict=True)) == expected
            drawable = {int(n) for n in buffer._usable(numbers, SAC)[0][:, 0]}
            terminal = {number for number, (_, terminated, _) in expected.items() if terminated}
            assert terminal <= drawable, "a terminal step needs nothing after it"
            judged += sum(reward in (5.0, -2.0) for reward, *_ in expected.values())
            parts += sum(info.continued for info in sources.held["online"].values())
            rewards = {info.number: info.reward for info in sources.held["online"].values()}
            sums = defaultdict(float)
            for record in records:
                sums[int(record["episode"])] += expected[int(record["number"])][0]
            assert sums == rewards
    assert judged > 500
    assert parts > 50
    sources, again = heard(), read(verdict=REWARDS)
    again.load_state_dict(sources.state_dict())
    assert {name: again.size(name) for name in VIEWS} == {name: sources.size(name) for name in VIEWS}
    for window in (SAC, CHUNK_SAC):
        for shares in ({"online": 1.0}, {"rewarded": 0.5, "unrewarded": 0.5}):
            assert_same(*(asdict(each.sample(64, window, shares)) for each in (sources, again)))


@pytest.mark.parametrize(
    ("verdict", "sentence"),
    [
        ("{success: yes please}", r"task.verdict.success=yes please: a reward is a number from -1000000 to 1000000"),
        ("{failure: .nan}", r"task.verdict.failure=nan: a reward is a number from -1000000 to 1000000"),
        ("{failure: -.inf}", r"task.verdict.failure=-inf: a reward is a number from -1000000 to 1000000"),
        ("{success: 1.1e+6}", r"task.verdict.success=1100000.0: a reward is a number from -1000000 to 1000000"),
        ("{success: true}", r"task.verdict.success=True: a reward is a number from -1000000 to 1000000"),
        ("{sucess: 1.0}", r"task.verdict: no verdict is called 'sucess'; did you mean 'success'\?"),
        ("[1.0, 0.0]", r"task.verdict=\[1.0, 0.0\]: write the rewards of both verdicts"),
    ],
)
def test_a_reward_that_is_none_is_refused_in_one_sentence(verdict, sentence):
    with pytest.raises(ConfigError, match=sentence):
        rewards_of(OmegaConf.create(f"{{task: {{verdict: {verdict}}}}}"))
