"""One life of a trainer after another in the same run, each with objects of its own."""

import copy
import io
import threading
from contextlib import closing

import numpy as np
import torch
from serl_client import messages as m
from serl_client.connection import Connection
from serl_client.console import Console

from serl_launcher.acting.host import PolicyHost, Question
from serl_launcher.optim.distributed import World
from serl_launcher.replay.mixture import ReplayMixture
from serl_launcher.store.store import Store
from serl_launcher.training.checkpoint import Checkpoints
from serl_launcher.training.learner import Learner
from serl_launcher.training.metrics import MetricsLog
from serl_launcher.training.plan_reader import load_plan
from serl_launcher.training.ranks import Ranks
from tests.shared.clients import push_episodes
from tests.shared.common import PATIENCE, STATE, until
from tests.shared.data import make_episode
from tests.shared.inference import rlpd
from tests.shared.models import leaves

STEPS = 8  # of every episode
CAPACITIES = {"online": 2000, "demo": 500, "eval": 20_000}


class Stopped(Exception):
    """The trainer's death, at the point that a test chose."""


# -- a run


def phase(*, updates=("update",), data=None, mode="collect", into="online", **more):
    """A phase of a plan, in the words of the yaml."""
    learning = {"updates": list(updates), "data": data or {"online": 1.0}} if updates else {}
    return {"actors": {"mode": mode, "into": into}, **learning, **more}


def plan_of(**phases):
    sources = {"online": {"capacity": 2000}, "demo": {"capacity": 500}, "good": {"of": "online", "keep": "successful"}}
    plan = {"sources": sources, "phases": phases}
    return load_plan(plan, methods={"update", "update_critic"}, has_operator=True)


def found(run_dir, spec, *, practise=12, demo=4):
    """A run's store as a server would have left it: episodes of practice and demonstrations, each with its outcome."""
    store, phases = Store.create(run_dir / "store", spec, CAPACITIES), {"demo": "teach", "online": "practise"}
    directives = {source: store.direct({"into": source, "phase": phases[source]}) for source in phases}
    store.lives.hello("arm", "outbox", "A", [])
    for number, source in enumerate(["demo"] * demo + ["online"] * practise):
        for record in make_episode(f"e{number}", number, directive=directives[source], phase=phases[source]):
            store.stage("A", store.expected("A"), record)
    store.close_session("A")
    store.commit()
    store.close()
    return run_dir


class Life:
    """One start of a trainer, every object of it new; `seed` is another one each time, so that nothing agrees by luck.

    It dies in the update after `dies_after`, or at once when `dying` is set. `made` lists (update, steps that it was
    trained on).
    """

    def __init__(self, run_dir, server, spec, plan, *, seed=0, dies_after=None, config=None, words=(), **options):
        self.algorithm = rlpd(spec, seed, "critic.hidden=[32,32]", *words)
        self.made, self.dies_after, self.dying = [], dies_after, threading.Event()
        self._within = False
        for name in ("update", "update_critic"):
            setattr(self.algorithm, name, self._watched(name))
        arguments = dict(batch_size=16, checkpoint_s=0.0, accept_plan=False, is_stopped=lambda: False)
        self.learner = Learner(
            run_dir=run_dir, link=Connection(server.local if server else "", m.Hello(m.PROTOCOL, "learner", "trainer")),
            plan=plan, ranks=Ranks(self.algorithm, World(), {}), metrics=MetricsLog(run_dir / "metrics.jsonl"),
            sources=ReplayMixture(run_dir / "store", spec, CAPACITIES, plan.views, seed=seed),
            checkpoints=Checkpoints(run_dir / "checkpoints", spec=spec, config=config or {"algo": "rlpd"}),
            console=Console("learner", io.StringIO()), **{**arguments, **options},
        )  # fmt: skip
        self.learner.server.link.wait = self._waiting(self.learner.server.link.wait)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._error = None

    def _watched(self, name):
        update = getattr(self.algorithm, name)

        def watched(batch):
            if self._within:  # `update` calls `update_critic` itself
                return update(batch)
            if self.dying.is_set() or len(self.made) == self.dies_after:
                raise Stopped
            self.made.append((name, batch.step_id.tolist()))
            self._within = True
            metrics = update(batch)
            self._within = False
            return metrics

        return watched

    def _waiting(self, wait):
        def waiting(seconds):
            if self.dying.is_set():
                raise Stopped
            wait(seconds)

        return waiting

    def _run(self):
        try:
            self.learner.run()
        except Stopped:
            pass
        except Exception as error:
            self._error = error
        finally:
            self.learner.server.link.close()

    def run(self):
        """Until the plan ends, or the trainer dies."""
        return self.begin().end()

    def begin(self):
        self._thread.start()
        return self

    def end(self):
        """Wait for the end of the plan, or of the life; raises what ended it."""
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "the trainer did not come to an end"
        if self._error is not None:
            raise self._error
        return self

    def die(self):
        self.dying.set()
        return self.end()

    @property
    def updates(self):
        return self.learner.state.updates

    @property
    def phase(self):
        return self.learner.state.at.phase

    def everything(self):
        """All that a resumed run must have in common with one that was never stopped; seconds are its own."""
        state, same = self.learner.state.state_dict(), ("phase", "updates", "turn", "held")

        def at(place):
            return {**place, "at": {name: place["at"][name] for name in same}, "wall_s": 0}

        return {
            "algorithm": self.algorithm.state_dict(), "torch": torch.get_rng_state(),
            "sampler": self.learner.sources.generator.bit_generator.state, "windows": windows(self.learner),
            "plan": {**at(state), "ended": {name: at(place) for name, place in state["ended"].items()}},
        }  # fmt: skip

    def act(self):
        """What the algorithm does for one observation, without noise and with the noise of a seed."""
        host = PolicyHost(copy.deepcopy(self.algorithm), self.learner.sources.spec, "cpu")
        observation = {STATE: np.linspace(-1, 1, 8, dtype=np.float32)}
        questions = [
            Question(b"", m.InferenceRequest(0, 7, True, explore, "reach", observation)) for explore in (False, True)
        ]
        return [host.answer([question])[0].arrays["action"].tolist() for question in questions]


def windows(learner):
    """What a plan's conditions look at, by phase."""
    phases = learner.counters.progress(0.0).phases
    return {
        name: (counts.env_steps, counts.episodes, counts.successes, counts.interventions, list(counts.recent))
        for name, counts in phases.items()
    }


# -- bit by bit

LEARNING = dict(
    warm=phase(updates=["update_critic"], data={"demo": 1.0}, until="updates >= 6", on_end=["publish"]),
    practise=phase(
        updates=["update_critic", {"update": {"every": 2}}], data={"online": 0.5, "demo": 0.25, "good": 0.25},
        publish={"every_updates": 5}, until="updates >= 24", on_end=["publish"],
    ),
)  # fmt: skip


def push(client, numbers):
    """Whole episodes of the current directive; on return they are acknowledged."""
    push_episodes(client, numbers, directive=client.state.directive["number"], phase=client.state.directive["phase"])
    assert client.drain(PATIENCE)


def leave(client, life):
    """Go when the plan has ended, as an actor does."""
    until(lambda: life.phase is None)
    client.close()
    life.end()


def commands(run_dir):
    """[number, name, argument] of all that operators have said in a run."""
    with closing(Store(run_dir / "store")) as opened:
        return opened.index.commands(0)


# -- what is not finite


def poisoned(life, name, spoil):
    """`spoil(batch, updates)` is called before each update of that name."""
    update = getattr(life.algorithm, name)

    def spoiled(batch):
        spoil(batch, life.updates)
        return update(batch)

    setattr(life.algorithm, name, spoiled)
    return life


def finite(tree):
    return all(leaf.isfinite().all() for leaf in leaves(tree).values() if isinstance(leaf, torch.Tensor))
