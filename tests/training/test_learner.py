"""The trainer stops anywhere and goes on as if it had not: weights, random numbers, plan, pace and orders."""

import copy
import errno
import io
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.torch
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from serl_client import ConfigError, Feature, Outcome, Spec
from serl_client import messages as m
from serl_client.client import TrainerClient
from serl_client.connection import Connection
from serl_client.console import Console
from serl_client.errors import RetakeError, TrainerError

from serl_launcher.acting.host import PolicyHost, Question
from serl_launcher.learner_link import capacities
from serl_launcher.replay.mixture import ReplayMixture, statistics
from serl_launcher.store.store import Store
from serl_launcher.training import learner
from serl_launcher.training.counters import curve, evaluation
from serl_launcher.training.learner import Learner
from serl_launcher.training.plan_reader import load_plan
from serl_launcher.training.ranks import Ranks
from serl_launcher.utils import checkpoint
from serl_launcher.utils.checkpoint import Checkpoints
from serl_launcher.utils.distributed import World
from serl_launcher.utils.logging import MetricsLog
from tests.shared.common import free_port

CONFIG = Path(__file__).parents[2] / "config"
STATE = "observation.state"
STEPS = 8  # of every episode
PATIENCE = 30.0
CAPACITIES = {"online": 2000, "demo": 500, "eval": 20_000}

SERVE = """
import errno, json, os, sys
from pathlib import Path
from serl_launcher.store.server import serve
run_dir, capacities, public, local = Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3], sys.argv[4]
sync = os.fdatasync
def failing(fd):
    if (run_dir / "fail").exists():
        raise OSError(errno.ENOSPC, "No space left on device")
    sync(fd)
os.fdatasync = failing
serve(run_dir, capacities, public=public, local=local, inference="tcp://127.0.0.1:1")
"""


class Stopped(Exception):
    """The trainer's death, at the point that a test chose."""


def until(condition, seconds=PATIENCE):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "this never happened"
        time.sleep(0.005)
    return value


# -- a run


def phase(*, updates=("update",), data=None, mode="collect", into="online", **more):
    """A phase of a plan, in the words of the yaml."""
    learning = {"updates": list(updates), "data": data or {"online": 1.0}} if updates else {}
    return {"actors": {"mode": mode, "into": into}, **learning, **more}


def plan_of(**phases):
    sources = {"online": {"capacity": 2000}, "demo": {"capacity": 500}, "good": {"of": "online", "keep": "successful"}}
    return load_plan(
        {"sources": sources, "phases": phases}, methods={"update", "update_critic"}, has_operator=True
    )  # fmt: skip


def found(run_dir, spec, make_segment, *, practise=12, demo=4):
    """A run's store as a server would have left it: episodes of practice and demonstrations, each with its outcome."""
    store = Store.create(run_dir / "store", spec, CAPACITIES)
    phases = {"demo": "teach", "online": "practise"}
    directives = {source: store.direct({"into": source, "phase": phases[source]}) for source in phases}
    store.hello("arm", "outbox", "A", [])
    sources, seq = ["demo"] * demo + ["online"] * practise, 0
    for number, source in enumerate(sources):
        records = episode(make_segment, f"e{number}", number, directive=directives[source], phase=phases[source])
        for record in records:
            store.stage("A", seq, record)
            seq += 1
    store.close_session("A")
    store.commit()
    store.close()
    return run_dir


def episode(make_segment, name, number, **stamp):
    """The records of one episode; every third is a success."""
    return [
        make_segment(name, number % 5, 0, STEPS, ends="terminated", **stamp),
        Outcome(name, number % 3 == 0),
    ]


class ServerProcess:
    """A server in a process of its own that can be killed and started again."""

    def __init__(self, run_dir):
        self.run_dir, self.port = run_dir, free_port()
        self.address, self.local = f"tcp://127.0.0.1:{self.port}", f"ipc://{run_dir}/server"
        self.start()

    def start(self):
        arguments = [str(self.run_dir), json.dumps(CAPACITIES), self.address, self.local]
        self.process = subprocess.Popen([sys.executable, "-c", SERVE, *arguments])

    def kill(self):
        self.process.kill()
        self.process.wait()

    def status(self):
        with Connection(self.address, m.Hello(m.PROTOCOL, "viewer", "test")) as link:
            while True:
                try:
                    return link.call(m.Status(), PATIENCE).report
                except TrainerError:
                    time.sleep(0.05)


@pytest.fixture
def serve():
    """serve(run_dir) -> a ServerProcess."""
    servers = []

    def make(run_dir):
        servers.append(ServerProcess(run_dir))
        return servers[-1]

    yield make
    for server in servers:
        server.kill()


@pytest.fixture
def live(spec):
    """live(server, plan) -> a Life in the server's run that has not begun."""
    lives = []

    def make(server, plan, **options):
        lives.append(Life(server.run_dir, server, options.pop("spec", spec), plan, **options))
        return lives[-1]

    yield make
    for life in lives:
        life.dying.set()
        if life._thread.ident is not None:
            life._thread.join(PATIENCE)


@pytest.fixture
def connect(spec):
    """connect(server) -> a TrainerClient that has heard a directive."""
    opened = []

    def make(server, name="arm"):
        client = TrainerClient(server.address, actor=name, spec=spec, outbox=server.run_dir / f"outbox-{name}")
        opened.append(client.__enter__())
        until(lambda: client.directive["number"] > 2)  # those two are from before the trainer began
        return client

    yield make
    for client in opened:
        client.close()


def rlpd(spec, seed, *overrides):
    torch.manual_seed(seed)
    with initialize_config_dir(str(CONFIG), version_base="1.3"):
        config = compose(overrides=["+algo=rlpd", "+policy=gaussian", "algo.hidden=[32,32]", *overrides])
    return instantiate(config.algo)(spec)


class Life:
    """One start of a trainer, every object of it new; `seed` is another one each time, so that nothing agrees by luck.

    It dies in the update after `dies_after`, or at once when `dying` is set. `made` lists (update, steps that it was
    trained on).
    """

    def __init__(self, run_dir, server, spec, plan, *, seed=0, dies_after=None, config=None, **options):
        self.algorithm = rlpd(spec, seed)
        self.made, self.dies_after, self.dying = [], dies_after, threading.Event()
        self._within = False
        for name in ("update", "update_critic"):
            setattr(self.algorithm, name, self._watched(name))
        arguments = dict(batch_size=16, checkpoint_s=0.0, accept_plan=False)
        self.learner = Learner(
            run_dir=run_dir, link=Connection(server.local if server else "", m.Hello(m.PROTOCOL, "learner", "trainer")),
            plan=plan, ranks=Ranks(self.algorithm, World(), {}), metrics=MetricsLog(run_dir / "metrics.jsonl"),
            sources=ReplayMixture(run_dir / "store", spec, CAPACITIES, plan.views, seed=seed),
            checkpoints=Checkpoints(run_dir / "checkpoints", spec=spec, config=config or {"algo": "rlpd"}),
            console=Console("learner", io.StringIO()), **{**arguments, **options},
        )  # fmt: skip
        self.learner.link.wait = self._waiting(self.learner.link.wait)
        self._thread = threading.Thread(target=self._run)
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
            self.learner.link.close()

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
        state = self.learner.state.state_dict()
        return {
            "algorithm": self.algorithm.state_dict(), "torch": torch.get_rng_state(),
            "sampler": self.learner.sources.generator.bit_generator.state, "windows": windows(self.learner),
            "plan": {**state, "at": {name: state["at"][name] for name in ("phase", "updates", "turn", "held")}},
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


def leaves(tree):
    if isinstance(tree, dict):
        return {f"{key}.{name}": leaf for key, branch in tree.items() for name, leaf in leaves(branch).items()}
    if isinstance(tree, list | tuple):
        return leaves(dict(enumerate(tree)))
    return {"": tree}


def differences(one, other):
    """Where two trees of tensors and plain data differ, bit by bit."""
    one, other = leaves(one), leaves(other)

    def same(a, b):
        return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b

    return [name for name in sorted({*one, *other}) if not same(one.get(name), other.get(name))]


# -- bit by bit

LEARNING = dict(
    warm=phase(updates=["update_critic"], data={"demo": 1.0}, until="updates >= 6", on_end=["publish"]),
    practise=phase(
        updates=["update_critic", {"update": {"every": 2}}], data={"online": 0.5, "demo": 0.25, "good": 0.25},
        publish={"every_updates": 5}, until="updates >= 24", on_end=["publish"],
    ),
)  # fmt: skip


@pytest.mark.parametrize("dies_after", [0, 4, 6, 17])
def test_a_trainer_that_was_stopped_acts_and_goes_on_bit_by_bit(tmp_path, spec, make_segment, serve, live, dies_after):
    """Stopped after a checkpoint in the first phase, between two, or in the second; the data stay the same."""
    found(tmp_path / "straight", spec, make_segment)
    shutil.copytree(tmp_path / "straight", tmp_path / "stopped")
    plan = plan_of(**LEARNING)
    straight = live(serve(tmp_path / "straight"), plan, seed=0, checkpoint_s=60.0).run()
    expected = straight.everything()

    server = serve(tmp_path / "stopped")
    first = live(server, plan, seed=0, dies_after=dies_after).run()
    before = copy.deepcopy(first.everything())
    second = live(server, plan, seed=1, dies_after=0)
    if dies_after:
        assert second.act() != first.act()
        assert differences(second.everything(), before)
        second.run()
        assert second.act() == first.act()
        assert not differences(second.everything(), before)
    third = live(server, plan, seed=2 if dies_after else 0, checkpoint_s=60.0).run()

    assert first.made + third.made == straight.made
    assert len(straight.made) == 30
    assert not differences(third.everything(), expected)
    assert third.act() == straight.act()
    assert third.learner.version["sha256"] == straight.learner.version["sha256"]
    assert third.learner.wall_s > first.learner.checkpoints.load()["wall_s"] - 60


def test_a_trainer_that_dies_soon_after_each_change_of_phase_goes_on_from_there(
    tmp_path, spec, make_segment, serve, live
):
    """Its checkpoints are an hour apart, and it dies in the first update of each phase."""
    server = serve(found(tmp_path / "run", spec, make_segment))
    plan = plan_of(**LEARNING, last=phase(until="updates >= 3"))
    begun = [live(server, plan, checkpoint_s=3600.0, dies_after=made).run() for made in (6, 24)]
    assert [(life.phase, life.updates) for life in begun] == [("practise", 6), ("last", 30)]
    last = live(server, plan, checkpoint_s=3600.0).run()
    assert [len(life.made) for life in (*begun, last)] == [6, 24, 3]


def test_a_checkpoint_of_another_algorithm_or_robot_is_refused_with_both_values(
    tmp_path, spec, make_segment, serve, live
):
    server = serve(found(tmp_path / "run", spec, make_segment))
    plan = plan_of(**LEARNING)
    live(server, plan, config={"algo": {"discount": 0.97}}, dies_after=3).run()
    with pytest.raises(ConfigError, match=r"another algorithm.*algo\.discount: 0\.99, 0\.97"):
        live(server, plan, config={"algo": {"discount": 0.99}}).run()
    other = Spec({STATE: Feature((8,))}, Feature((2,), low=-2, high=2), fps=10.0)
    with pytest.raises(ConfigError, match=r"another robot.*action\.low: \[-2\.0, -2\.0\], \[-1\.0, -1\.0\]"):
        live(server, plan, spec=other, config={"algo": {"discount": 0.97}}).run()


def test_an_edit_of_the_current_phase_is_refused_unless_it_is_accepted(tmp_path, spec, make_segment, serve, live):
    server = serve(found(tmp_path / "run", spec, make_segment))
    live(server, plan_of(**LEARNING), dies_after=10).run()
    edited = plan_of(**{**LEARNING, "practise": {**LEARNING["practise"], "until": "updates >= 12"}})
    with pytest.raises(ConfigError, match=r"phase 'practise' was edited.*updates >= 24.*updates >= 12"):
        live(server, edited).run()
    assert len(live(server, edited, accept_plan=True).run().made) == 8


def test_another_plan_begins_with_what_was_learned(tmp_path, spec, make_segment, serve, live):
    server = serve(found(tmp_path / "run", spec, make_segment))
    first = live(server, plan_of(**LEARNING), dies_after=20).run()
    look = plan_of(look=phase(updates=(), until="wall_s >= 0.1"))
    second = live(server, look, seed=1).run()
    assert (second.made, second.updates) == ([], 20)
    assert not differences(second.algorithm.state_dict(), first.algorithm.state_dict())
    assert second.act() == first.act()


# -- plan, pace and the operator


def test_a_phase_without_data_says_so_and_leaves_that_behind(tmp_path, spec, make_segment, serve, live, connect):
    server = serve(found(tmp_path / "run", spec, make_segment, demo=0))
    paced = phase(start_when="online.steps >= 10", pace={"updates_per_step": 1, "tolerance": 0}, until="operator")
    plan = plan_of(clone=phase(mode="idle", into=None, data={"demo": 1.0}, until="updates >= 1"), practise=paced)
    life, shown = live(server, plan), []
    life.learner.console.show = shown.append
    life.begin()
    until(lambda: shown and shown[-1]["waits for"] == "data")
    client = connect(server)
    client.command("goto", "practise")
    until(lambda: client.directive["phase"] == "practise" and client.directive["paced"])
    until(lambda: shown[-1]["waits for"] == "env steps: pace")
    assert life.learner._allowed is not None
    client.command("next")
    leave(client, life)


def push(client, make_segment, numbers):
    """Whole episodes of the current directive; on return they are acknowledged."""
    stamp = {"directive": client.directive["number"], "phase": client.directive["phase"]}
    for number in numbers:
        name = f"{client.actor}-{client.session[:8]}-{number:06d}"
        for record in episode(make_segment, name, number, **stamp):
            until(lambda: client.has_room)
            client.push(record)
    assert client.drain(PATIENCE)


def leave(client, life):
    """Go when the plan has ended, as an actor does."""
    until(lambda: life.phase is None)
    client.close()
    life.end()


def test_the_pace_is_kept_over_a_restart(tmp_path, spec, make_segment, serve, live, connect):
    """Steps from before the start pay for nothing, each one after it for one update, also while the trainer is dead."""
    server, tolerance = serve(found(tmp_path / "run", spec, make_segment)), 40  # what is owed never exceeds it
    plan = plan_of(
        practise=phase(
            start_when="online.steps >= 40", pace={"updates_per_step": 1, "tolerance": tolerance}, until="operator"
        )
    )
    first = live(server, plan, dies_after=tolerance + STEPS).begin()
    until(lambda: first.updates == tolerance)
    client = connect(server)
    push(client, make_segment, range(2))
    first.end()
    push(client, make_segment, range(2, 3))
    second = live(server, plan, seed=1).begin()
    until(lambda: second.updates == tolerance + 3 * STEPS)
    push(client, make_segment, range(3, 4))
    until(lambda: second.updates == tolerance + 4 * STEPS)
    client.command("next")
    leave(client, second)
    assert second.updates == tolerance + 4 * STEPS


def test_an_operators_command_is_carried_out_once_over_all_restarts(tmp_path, spec, make_segment, serve, live, connect):
    server = serve(found(tmp_path / "run", spec, make_segment))
    plan = plan_of(**{name: phase(until="operator") for name in ("one", "two", "three")})
    first = live(server, plan).begin()
    client = connect(server)
    client.command("next")
    until(lambda: first.phase == "two" and len(first.made) > 5)
    first.die()
    second = live(server, plan, seed=1).begin()
    until(lambda: len(second.made) > 20)
    assert second.phase == "two", "'next' was for phase one"
    client.command("hold")
    until(lambda: second.learner.state.at.held)
    client.command("resume")
    until(lambda: not second.learner.state.at.held)
    second.die()
    client.command("hold")  # nobody is there to hear it
    until(lambda: [row[1] for row in commands(server.run_dir)] == ["next", "hold", "resume", "hold"])
    third = live(server, plan, seed=2).begin()
    until(lambda: client.directive["mode"] == "idle")
    assert (third.phase, third.made) == ("two", [])
    for command in ("resume", "next"):
        client.command(command)
    until(lambda: third.phase == "three")
    client.command("next")
    leave(client, third)


def commands(run_dir):
    opened = Store(run_dir / "store")
    try:
        return opened.index.commands(0)
    finally:
        opened.close()


def test_the_windows_of_the_metrics_are_the_same_after_a_restart(tmp_path, spec, make_segment, serve, live, connect):
    """Also when a person has judged an old episode late, and of two actors the one that began last ended first."""
    server = serve(found(tmp_path / "run", spec, make_segment, practise=4))
    plan = plan_of(practise=phase(until="operator"))
    first = live(server, plan).begin()
    left, right = connect(server, "left"), connect(server, "right")
    push(left, make_segment, range(5))
    stamp = {"directive": left.directive["number"]}
    left.push(make_segment("long", 0, 0, STEPS, **stamp))
    assert left.drain(PATIENCE)
    push(right, make_segment, range(6, 9))
    left.push(make_segment("long", 0, STEPS, STEPS, ends="terminated", **stamp))
    left.push(Outcome("long", True))
    left.push(Outcome("e4", True, judged_by="operator"))
    left.push(Outcome("e6", False, discard=True, judged_by="operator"))
    assert left.drain(PATIENCE)
    expected = 4 + 5 + 3 + 1
    until(lambda: windows(first.learner)["practise"][1] == expected)
    until(lambda: first.learner.sources.held["online"][7].discard)
    first.die()
    second = live(server, plan, seed=1, dies_after=0).run()
    assert windows(second.learner) == windows(first.learner)
    newest = [[e.id for e in life.learner.counters.recent("practise", 5)] for life in (first, second)]
    assert newest[0] == newest[1]
    curves = [curve(life.learner.counters, ["practise"]) for life in (first, second)]
    assert curves[0] == curves[1]


def test_an_evaluation_counts_the_same_episodes_after_a_restart(tmp_path, spec, make_segment, serve, live, connect):
    server = serve(found(tmp_path / "run", spec, make_segment))
    plan = plan_of(look=phase(updates=(), mode="evaluate", into="eval", until="episodes >= 3"))
    first = live(server, plan).begin()
    client = connect(server)
    push(client, make_segment, range(5))
    client.push(Outcome(f"arm-{client.session[:8]}-000000", False, judged_by="operator"))  # the judge said success
    assert client.drain(PATIENCE)
    leave(client, first)
    second = live(server, plan, seed=1).run()
    results = [evaluation(life.learner.counters, "look", 0, 3) for life in (first, second)]
    assert results[0] == results[1]
    assert (results[0]["episodes"], results[0]["successes"]) == (3, 0)


# -- the server


def test_a_trainer_that_starts_while_the_server_is_dead_waits_for_it(tmp_path, spec, make_segment, serve):
    server, heard = serve(found(tmp_path / "run", spec, make_segment)), []
    server.status()  # it is up
    with Connection(server.local, m.Hello(m.PROTOCOL, "learner", "trainer")) as link:
        link.hello(PATIENCE)
        server.kill()
        thread = threading.Thread(target=lambda: heard.append(capacities(link)), daemon=True)
        thread.start()
        time.sleep(0.3)
        assert thread.is_alive()
        server.start()
        thread.join(PATIENCE)
    assert heard == [{"demo": 500, "eval": 20_000, "online": 2000}]


def test_a_trainer_hears_and_is_heard_again_after_each_death_of_the_server(
    tmp_path, spec, make_segment, serve, live, connect
):
    """It dies while it is asked, and while it is told: the trainer publishes after every update."""
    server = serve(found(tmp_path / "run", spec, make_segment))
    plan = plan_of(
        practise=phase(publish={"every_updates": 1}, until="env_steps >= 192"),
        rest=phase(updates=(), until="operator"),
    )
    life = live(server, plan, checkpoint_s=60.0).begin()
    client = connect(server)
    for number in range(4):
        made = len(life.made)
        until(lambda: len(life.made) > made + 3)  # noqa: B023
        server.kill()
        server.start()
        push(client, make_segment, range(3 * number, 3 * number + 3))
    until(lambda: life.phase == "rest")
    client.command("next")
    until(lambda: client.directive["mode"] == "stop")
    leave(client, life)
    status = server.status()
    assert status["weights"]["version"] == life.learner.version["version"]
    assert status["weights"]["sha256"] == life.learner.version["sha256"]
    assert status["directive"]["number"] == life.learner._number


def test_a_trainer_takes_no_answer_for_that_to_another_request_when_the_store_fails(
    tmp_path, spec, make_segment, serve, live, connect
):
    server = serve(found(tmp_path / "run", spec, make_segment))
    plan = plan_of(
        practise=phase(publish={"every_updates": 1}, until="env_steps >= 150"),
        rest=phase(updates=(), until="env_steps >= 40"),
        last=phase(updates=(), until="operator"),
    )
    life = live(server, plan, checkpoint_s=60.0).begin()
    client = connect(server)
    until(lambda: len(life.made) > 3)
    (server.run_dir / "fail").touch()
    for record in episode(make_segment, "failing", 0, directive=client.directive["number"]):
        client.push(record)
    until(lambda: client.degraded)
    time.sleep(2.0)  # the store is opened again each second, and fails again
    (server.run_dir / "fail").unlink()
    assert client.drain(PATIENCE)
    push(client, make_segment, range(8))
    until(lambda: client.directive["phase"] == "rest")
    push(client, make_segment, range(8, 14))
    until(lambda: life.phase == "last" and client.directive["phase"] == "last")
    assert life.learner._number == client.directive["number"]
    status = server.status()
    assert status["weights"]["version"] == life.learner.version["version"]
    assert status["weights"]["sha256"] == life.learner.version["sha256"]
    client.command("next")
    leave(client, life)


# -- a checkpoint that is cut off


def counted(killer, *args, **kwargs):
    """An open file of which every write of more than a few bytes counts."""
    file = open(*args, **kwargs)  # noqa: SIM115 - as open does

    class Counted:
        def __enter__(self):
            return self

        def __exit__(self, *exception):
            file.close()

        def __getattr__(self, name):
            return getattr(file, name)

        def write(self, data):
            (killer.wrap(file.write) if len(data) > 64 else file.write)(data)
            file.flush()

    return Counted()


def save_and_die(life, killer):
    """In a child: the checkpoint, cut off by the killer."""
    for name in ("fsync", "rename", "mkdir", "unlink", "rmdir"):
        setattr(os, name, killer.wrap(getattr(os, name)))
    checkpoint.open = partial(counted, killer)
    life.learner.checkpoint()


def test_a_checkpoint_that_is_cut_off_at_any_step_leaves_the_last_good_one(tmp_path, spec, make_segment, killer_at):
    run_dir, plan = found(tmp_path / "run", spec, make_segment), plan_of(**LEARNING)
    life, at, kept, status = Life(run_dir, None, spec, plan), 0, set(), None
    for updates in range(1, 6):
        life.learner.state.updates = updates
        life.learner.checkpoint()
    while status != 0:
        at += 1
        life.learner.state.updates = 5 + at
        child = os.fork()
        if child == 0:
            try:
                save_and_die(life, killer_at(at))
            finally:
                os._exit(0)
        status = os.waitpid(child, 0)[1]
        saved = life.learner.checkpoints.load()
        kept.add(5 + at - saved["plan"]["updates"])
        assert not differences(saved["algorithm"], life.algorithm.state_dict())
        assert saved["sources"]["generator"] == life.learner.sources.generator.bit_generator.state
        life.learner.checkpoint()  # the next start's
        assert life.learner.checkpoints.load()["plan"]["updates"] == 5 + at
    assert at > 20
    assert kept == {0, 1}, "either the one that was cut off is whole, or the one before it is there"
    names = sorted(path.name for path in life.learner.checkpoints.folder.iterdir())
    assert len([name for name in names if name.isdecimal()]) == 3


def test_a_full_disk_makes_training_wait_and_ends_nothing(tmp_path, spec, make_segment, serve, live, monkeypatch):
    server = serve(found(tmp_path, spec, make_segment))
    sync, refused, room = os.fsync, [], threading.Event()

    def full(descriptor):
        if not room.is_set():
            refused.append(descriptor)
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    monkeypatch.setattr(learner, "FULL_S", 0.01)
    monkeypatch.setattr(os, "fsync", full)
    life = live(server, plan_of(practise=phase(until="updates >= 3"))).begin()
    until(lambda: len(refused) > 3)
    assert life.updates == 0  # nothing was published yet
    room.set()
    assert life.end().updates == 3
    assert life.learner.checkpoints.load()["plan"]["updates"] == 3


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


def test_batches_that_are_not_finite_cost_their_updates_and_nothing_else(
    tmp_path, spec, make_segment, serve, live, caplog
):
    server = serve(found(tmp_path / "run", spec, make_segment))

    def spoil(batch, updates):
        if updates in (7, 8, 9, 15):
            batch.observation[STATE][3, 0, 1] = float("nan")
        if updates == 16:
            batch.reward[0, 0] = float("inf")

    life = poisoned(live(server, plan_of(**LEARNING)), "update_critic", spoil)
    poisoned(life, "update", spoil).run()
    assert life.updates == 30
    assert life.learner.ranks.steps()["critic_optimizer"] == (30, 5)
    saved = life.learner.checkpoints.load()
    assert finite(saved["algorithm"])
    assert saved["plan"]["updates"] == 30
    assert finite(life.learner.ranks.published())
    assert "had no finite gradient: skipped" in caplog.text


def test_a_run_whose_gradients_are_never_finite_ends_with_one_sentence_and_its_good_weights(
    tmp_path, spec, make_segment, serve, live, monkeypatch
):
    monkeypatch.setattr(learner, "METRICS_S", 0.0)
    monkeypatch.setattr("serl_launcher.training.finite.MOST_IN_A_ROW", 5)
    server = serve(found(tmp_path / "run", spec, make_segment))

    def spoil(batch, updates):
        if updates >= 12:
            batch.reward[0, 0] = float("nan")

    life = poisoned(live(server, plan_of(**LEARNING)), "update_critic", spoil)
    with pytest.raises(RetakeError, match=r"critic_optimizer: the gradients of the last 5 steps up to update \d+ were"):
        poisoned(life, "update", spoil).run()
    assert finite(life.learner.checkpoints.load()["algorithm"])
    assert finite(life.algorithm.state_dict())


@pytest.mark.parametrize("where", ["policy", "target_critic"])
def test_weights_that_are_not_finite_are_neither_published_nor_kept(tmp_path, spec, make_segment, serve, live, where):
    """What is published is checked, and what only a checkpoint holds. The same command again goes on."""
    server = serve(found(tmp_path / "run", spec, make_segment))

    def spoil(batch, updates):
        if updates == 13:
            next(getattr(life.algorithm, where).parameters()).data[0] = float("nan")

    life = poisoned(live(server, plan_of(**LEARNING)), "update_critic", spoil)
    with pytest.raises(RetakeError, match=rf"{where}\..* not finite, so the learner stopped before .* of update 1\d"):
        poisoned(life, "update", spoil).run()
    saved = life.learner.checkpoints.load()
    assert finite(saved["algorithm"])
    assert saved["plan"]["updates"] == 13
    newest = server.run_dir / "weights" / f"{life.learner.version['sha256']}.safetensors"
    assert finite(safetensors.torch.load_file(newest))
    assert live(server, plan_of(**LEARNING), seed=1).run().updates == 30


def test_the_statistics_leave_out_what_is_not_finite():
    class Buffer:
        def observed(self, name, among):
            return np.array([[1.0, 2.0], [3.0, 4.0], [np.nan, 6.0], [5.0, np.inf]], np.float32)

    class Stored:
        spec = Spec({STATE: Feature((2,))}, Feature((2,), low=-9, high=9), fps=10.0)
        views, buffers = {"demo": SimpleNamespace(of=["demo"])}, {"demo": Buffer()}

        def chosen(self, name, part):
            return None

    found = statistics(Stored(), "demo")
    for name in (STATE, "action"):
        values = {kind: found[kind][name].tolist() for kind in found}
        assert values == {"mean": [2.0, 3.0], "std": [1.0, 1.0], "low": [1.0, 2.0], "high": [3.0, 4.0]}


def test_the_scale_of_actions_and_states_is_fitted_to_the_source_that_the_plan_names(
    tmp_path, spec, make_segment, serve, live
):
    server = serve(found(tmp_path / "run", spec, make_segment))
    plan = plan_of(clone=phase(data={"demo": 1.0}, until="updates >= 2", on_begin=[{"fit_normalizer": "demo"}]))
    life = live(server, plan).run()
    fitted = statistics(life.learner.sources, "demo")
    rows = life.learner.sources.buffers["demo"]
    actions = rows.observed("action", None)
    assert len(actions) == 4 * STEPS
    np.testing.assert_allclose(fitted["high"]["action"], actions.max(0))
    np.testing.assert_allclose(fitted["mean"][STATE], rows.observed(STATE, None).mean(0), rtol=1e-5)
    means = [value for key, value in life.algorithm.state_dict().items() if key.endswith("state.mean")]
    assert means
    for mean in means:
        np.testing.assert_allclose(mean, fitted["mean"][STATE], rtol=1e-5)
