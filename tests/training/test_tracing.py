"""A run whose store an older version has filled: the trainer finds the episodes that no gradient survives, has them set
aside, and goes on."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from serl_client.errors import RetakeError

from serl_launcher.store.store import Store
from serl_launcher.training import learner, monitor, tracing
from serl_launcher.training.tracing import Tracer
from tests.shared.common import STATE
from tests.shared.data import changed, make_episode, tiny_spec
from tests.shared.models import batch
from tests.shared.tools import called

from .life import LEARNING, Life, finite, found, phase, plan_of


def add(run_dir, name, column, value, source):
    """An episode that the store takes as it comes, as it did before it had a limit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("serl_client.limits.Limits.broken", lambda *_: "")
        store = Store(run_dir / "store")
        store.lives.hello(name, f"outbox {name}", name, [])
        number, body = next(item for item in store.directives.items() if item[1]["into"] == source)
        for record in make_episode(name, 1, steps=20, directive=number, phase=body["phase"], success=True):
            record = changed(record, column, value) if hasattr(record, "reward") else record
            store.stage(name, store.expected(name), record)
        store.commit()
        store.close()


@pytest.mark.slow
@pytest.mark.parametrize("is_sifted", [True, False])
def test_a_store_that_holds_what_cannot_be_is_trained_on_without_it_and_resumes(
    tmp_path, spec, serve, live, monkeypatch, is_sifted
):
    """It is found at the start; if it were not, the updates would tell."""
    if not is_sifted:
        monkeypatch.setattr(learner, "sift", lambda *_: None)
    monkeypatch.setattr(monitor, "METRICS_S", 0.0)
    run_dir, plan = found(tmp_path / "run", spec), plan_of(**LEARNING)
    bad = {"online": (STATE, np.full(8, 3e38)), "demo": ("reward", 3e38)}
    for source, (column, value) in bad.items():
        add(run_dir, f"bad-{source}", column, value, source)
    server = serve(run_dir)
    first = live(server, plan, batch_size=64, dies_after=20).run()
    assert {id for id, row in server.episodes().items() if row["discard"]} == {"bad-online", "bad-demo"}
    refused = first.learner.ranks.steps()["critic_optimizer"][1]
    assert (refused == 0) == is_sifted
    assert refused < 20
    second = live(server, plan, batch_size=64, seed=1).run()
    assert second.updates == 30
    assert second.learner.ranks.steps()["critic_optimizer"][1] == 0
    assert finite(second.learner.keeper.checkpoints.load()["algorithm"])
    said = called("store", "show", server.run_dir)[1]
    for source, (column, _) in bad.items():
        assert f"set aside bad-{source}, 20 steps in {source}: {column}" in said
    assert server.report()["set_aside"] == 2


class Ranks:
    """Refuses each update whose batch `is_bad`."""

    def __init__(self, is_bad):
        self._is_bad, self._steps, self._refused = is_bad, 0, 0

    def update(self, name, batch):
        self._steps, self._refused = self._steps + 1, self._refused + self._is_bad(batch)

    def steps(self):
        return {"optimizer": (self._steps, self._refused)}


def batch_of(state, reward):
    """A batch of single steps; each step is of the episode with its number."""
    seen = {STATE: state[:, None]}
    return batch(tiny_spec(), len(state), observation=seen, reward=reward[:, None], next_observation=None)


def traced(is_bad, state, reward):
    """The episodes that are set aside after three updates of this batch."""
    ranks, found = Ranks(is_bad), {}
    sources = SimpleNamespace(episode_of=lambda step: (SimpleNamespace(id=step, discard=step in found), 7))
    tracer, batch = Tracer(ranks, sources, found.__setitem__), batch_of(state, reward)
    ranks.update("update", batch)
    tracer.look(1)
    for updates in range(2, 4):
        ranks.update("update", batch)
        tracer.updated("update", batch, updates)
    return found


def overflows(batch, column=STATE, most=1e5):
    return bool((batch.observation[STATE] if column == STATE else batch.reward).abs().max() > most)


def test_the_rows_that_stand_out_are_blamed_if_the_update_goes_without_them(monkeypatch):
    """Also when they are most of the batch, and when their values are within the limit. A reward that is rare and right
    is blamed for nothing."""
    state, reward = torch.randn(64, 8), torch.zeros(64)
    reward[3] = 5000.0
    assert not traced(lambda batch: False, state, reward)
    within, many = state.clone(), state.clone()
    within[5, 2], many[:40] = -4e5, 3e38
    assert traced(overflows, within, torch.zeros(64)).keys() == {5}
    assert traced(overflows, many, reward).keys() == set(range(40))
    assert not traced(overflows, torch.full((64, 8), 3e38), reward), "nothing is left to try"
    other = batch_of(state, torch.full((64,), 5e6))
    assert traced(overflows, within, other.reward[:, 0]).keys() == {5}, "a large column that is not the reason"
    assert "observation.state is 4e+05 in size at or near step 7" in traced(overflows, within, torch.zeros(64))[5]
    monkeypatch.setattr("serl_launcher.training.finite.MOST_IN_A_ROW", 1000)
    assert not traced(lambda batch: True, state, reward), "the update fails without that reward, too"


def test_while_all_that_a_source_has_is_set_aside_the_learner_waits_for_more_or_for_a_command():
    for sizes, is_interrupted, waits in (([0, 0, 0, 5], False, 3), ([0], True, 0), ([5], False, 0)):
        told, left = [], iter(sizes)
        sources = SimpleNamespace(size=lambda name, left=left: (next(left), 0), may_fill=lambda name: True)
        tracing.await_rows(sources, "demo", lambda told=told: told.append(1), lambda is_so=is_interrupted: is_so)
        assert len(told) == waits


def test_updates_are_watched_for_a_while_and_no_longer(monkeypatch):
    """Whoever reads the count of refused steps waits for the device."""
    monkeypatch.setattr(tracing, "WATCHED", 3)
    ranks, looks = Ranks(lambda batch: False), []
    tracer = Tracer(ranks, SimpleNamespace(), lambda *_: None)
    steps = ranks.steps
    ranks.steps = lambda: (looks.append(1), steps())[1]
    batch = batch_of(torch.zeros(4, 8), torch.zeros(4))
    tracer.updated("update", batch, 1)
    assert not looks
    ranks._steps, ranks._refused = 5, 2
    assert tracer.look(5) == 2
    for updates in range(6, 20):
        tracer.updated("update", batch, updates)
    assert len(looks) == 1 + 3
    monkeypatch.setattr("serl_launcher.training.finite.MOST_IN_A_ROW", 4)
    ranks._is_bad = lambda batch: True
    for updates in range(20, 23):
        ranks.update("update", batch)
        tracer.look(updates)
    ranks.update("update", batch)
    with pytest.raises(RetakeError, match="optimizer: the gradients of the last 4 steps up to update 23 were"):
        tracer.updated("update", batch, 23)


def test_a_normaliser_that_a_stop_leaves_unfitted_lets_no_update_begin(tmp_path, spec):
    plan = plan_of(practise=phase(data={"demo": 1.0}, until="operator", on_begin=[{"fit_normalizer": "good"}]))
    learner = Life(found(tmp_path / "run", spec), None, spec, plan).learner
    learner.server.commands = [(1, "stop", "")]
    assert not learner._update()
    assert (learner.state.updates, learner.state.at.begun) == (0, False)
