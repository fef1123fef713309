"""A policy in the actor's own process: its thread computes, and the control thread waits only where it says so."""

import numpy as np
import pytest
from serl_client.chunks import RULES

from serl_launcher.acting.host import PolicyHost
from serl_launcher.acting.local import LocalSource
from serl_launcher.types import Decision
from tests.shared.common import PATIENCE, STATE, until

from .toy import Counting

LENGTH = 6


class Chunked(Counting):
    """Chunks of LENGTH actions, each of them as Counting's; a call waits for `gate`."""

    def __init__(self):
        super().__init__()
        self.memory.continues, self.memory.horizon = "trained", LENGTH

    def act(self, observation, previous_action, carry, prefix=None, **options):
        decision, carry = super().act(observation, previous_action, carry, **options)
        return Decision(decision.action.repeat(1, LENGTH, 1)), carry


class Broken(Counting):
    def act(self, *arguments, **options):
        raise RuntimeError("the policy is broken")


class Client:
    """A client whose newest weights are `there`."""

    there = None

    def weights(self, newer_than):
        return self.there if self.there and self.there[0] > newer_than else None

    def check(self):
        pass


@pytest.fixture
def local(spec, closes):
    """local(algorithm) -> a LocalSource with weights 1."""

    def make(algorithm):
        host = PolicyHost(algorithm, spec, "cpu")
        host.version = 1
        return closes(LocalSource(Client(), host))

    return make


def policy(source, rule, **options):
    made = RULES[rule](source, **{"deadline": PATIENCE, "n_action_steps": 2, **options})
    made.begin("e0", {"explore": True, "weights": None}, "count")

    def act(step, reset=False):
        observation = {STATE: np.full(8, step, np.float32)}
        action = made.act(observation, step=step, previous_action=None, reset=reset or step == 0)
        return None if action is None else float(action[0])

    return made, act


@pytest.mark.parametrize("rule", sorted(RULES.keys() - {"wait"}))
def test_a_tick_never_waits_for_the_computation_while_actions_remain(local, rule):
    """A wait would last for ever here: the gate is opened by this thread."""
    algorithm = Chunked()
    controller, act = policy(local(algorithm), rule)
    assert act(0) == 1
    algorithm.gate.clear()
    assert [act(step) for step in range(1, 5)] == [1] * 4
    until(lambda: len(algorithm.batches) == 2, why="the question of row 2 is being answered")
    algorithm.gate.set()
    until(lambda: controller._source._answer)
    assert (act(5), controller.chunk_start, controller.chunk_delay) == (2, True, 3)


def test_a_tick_never_waits_for_new_weights_while_actions_remain(local, monkeypatch, tmp_path):
    source = local(Chunked())
    gate = source.host.algorithm.gate
    monkeypatch.setattr(source.host, "read", lambda file: {})
    monkeypatch.setattr(
        source.host, "swap", lambda version, _: gate.wait(PATIENCE) and setattr(source.host, "version", 2)
    )
    controller, act = policy(source, "async")
    assert act(0) == 1
    gate.clear()
    source.client.there = (2, tmp_path / "weights")
    assert [act(step) for step in range(1, 5)] == [1] * 4
    gate.set()
    until(lambda: controller._source._answer)
    assert (act(5), controller.version) == (2, 2)


def test_an_answer_that_was_begun_in_the_episode_before_is_dropped(local):
    algorithm = Chunked()
    controller, act = policy(local(algorithm), "async")
    act(0)
    algorithm.gate.clear()
    assert act(2) == 1
    until(lambda: len(algorithm.batches) == 2)
    controller.begin("e1", {"explore": True, "weights": None}, "count")
    controller._deadline = 0.0
    assert act(0) is None
    algorithm.gate.set()
    controller._deadline = PATIENCE
    assert (act(0), controller.chunk_delay) == (1, 0), "and the policy began anew"
    assert len(algorithm.batches) == 3


def test_what_ends_the_thread_is_raised_in_the_control_thread(local):
    _, act = policy(local(Broken()), "async")
    with pytest.raises(RuntimeError, match="the policy is broken"):
        act(0)
