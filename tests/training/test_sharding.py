"""Two real processes train one algorithm: to the same end as one process, whatever is spread over them.

This file is also the program that starts such processes: FOLDER PART
"""

import fcntl
import hashlib
import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from multiprocessing import connection
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from serl_client import ConfigError

from serl_launcher.config import groups
from serl_launcher.optim.distributed import World, join
from serl_launcher.optim.optimizer import Optimizer
from serl_launcher.training.checkpoint import Checkpoints
from serl_launcher.training.ranks import Ranks
from tests.shared import lerobot_policies
from tests.shared.common import CONFIG, ROOT, SCALE, free_port
from tests.shared.models import batch, config_of, robot
from tests.shared.programs import Programs

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(
        not all(map(find_spec, ("accelerate", "deepspeed", "transformers"))), reason="needs the extra `vla`"
    ),
]

PATIENCE = 240.0 * SCALE
UPDATES, KEPT = 6, 3  # how many there are, and after how many a checkpoint is kept
WAYS = groups(CONFIG)["sharding"]
SPEC = robot(states=4, reach=1)
TINY = [
    "+algo=sft", "+policy=pi0_tiny", "algo.optimizer.learning_rate=1e-3", "policy.gemma.depth=2",
    "policy.vision.image=16", "policy.vision.depth=1",
]  # fmt: skip
HALF = ["policy.precision=bfloat16", "policy.checkpointing=true"]
FLOW = [
    "+algo=sft", "+policy=flow", "policy.network.hidden=[64,64]", "algo.optimizer.accumulation=2",
    "++algo.optimizer.rates={network.layers.0: 0.3}",
]  # fmt: skip
CASES = {  # words, how it is spread, and how far the loss may be from that of one process
    "flow": (FLOW, WAYS, 1e-4),
    "pi0": (TINY, ("replicas", "zero2", "zero3"), 1e-3),
    "pi0 bf16": ([*TINY, *HALF], ("replicas", "zero3"), 2e-2),
    "rlpd": (["+algo=rlpd", "+policy=gaussian"], ("replicas", "zero2"), 1e-3),
}
PARTS = {  # what is trained, {case: ways}
    "two": {"flow": ["zero2"], "pi0": ["zero3"]},
    "all": {case: list(ways) for case, (_, ways, _) in CASES.items()},
    "lerobot": {kind: ["replicas"] for kind in lerobot_policies.SMALL if kind[:2] != "pi" or lerobot_policies.HAS_PI},
}


def case_of(part, case, folder):
    """(words, Spec) of a case. A policy of lerobot begins with the one in `folder`."""
    if part != "lerobot":
        return CASES[case][0], SPEC
    return ["+algo=rejection_lerobot", f"policy.path={folder}/models/{case}"], lerobot_policies.SPEC


def ranks_of(words, world, way="replicas", spec=SPEC):
    config = config_of(*words, f"+sharding={way}")
    torch.manual_seed(0)
    return Ranks(instantiate(config.algo)(spec), world, OmegaConf.to_container(config.sharding))


def batch_of(window, number, spec):
    """The batch of update `number`: the same for whoever asks."""
    weight = torch.rand(8, generator=torch.Generator().manual_seed(number))
    return batch(spec, 8, window=window, seed=number, weight=weight)


def train(ranks, begin, end, update="update", spec=SPEC):
    """The metrics of some updates, as numbers."""
    window = ranks.algorithm.windows[update]
    metrics = [ranks.update(update, batch_of(window, number, spec)) for number in range(begin, end)]
    return [{name: float(value) for name, value in each.items()} for each, _ in metrics]


def digest(state):
    """A hash of a tree of tensors and plain data."""
    if isinstance(state, torch.Tensor):
        return hashlib.sha256(state.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
    if isinstance(state, dict):
        return hashlib.sha256(json.dumps({str(key): digest(state[key]) for key in state}).encode()).hexdigest()
    return repr(state)


def alone(words, begin=0, state=None):
    """The metrics of one process that trains to the end."""
    ranks = ranks_of(words, World())
    ranks.begin(state)
    return train(ranks, begin, UPDATES)


# -- what a rank does


def each_case(folder, part, life, rank, port):
    """`first`: keep a checkpoint on the way to the end; `second`: from there to the end. Then it is killed."""
    os.environ |= {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    world = join("cpu")
    for case, ways in PARTS[part].items():
        words, spec = case_of(part, case, folder)
        for way in ways:
            ranks = ranks_of(words, world, way, spec)
            if rank != "0":
                ranks.obey()
                continue
            place = Checkpoints(folder / case / way, spec=spec, config={})
            ranks.begin(None if life == "first" else place.load())
            metrics = [] if life == "second" else train(ranks, 0, KEPT, spec=spec)
            if life == "first":
                place.stage(KEPT, ranks.state_dict())()
            metrics += train(ranks, KEPT, UPDATES, spec=spec)
            trained = digest({"published": ranks.published().tensors(), **ranks.state_dict()})
            (folder / case / f"{way}.{life}.json").write_text(json.dumps([metrics, trained]))
            ranks.end()
    if life == "second":
        if "flow" in PARTS[part]:
            moved(folder, world)
        refused(folder, world)
    os.kill(os.getpid(), signal.SIGKILL)


def moved(folder, world):
    """Go on from ZeRO-2's checkpoint with ZeRO-3."""
    ranks = ranks_of(FLOW, world, "zero3")
    if world.rank != 0:
        ranks.obey()
        return
    ranks.begin(Checkpoints(folder / "flow/zero2", spec=SPEC, config={}).load())
    (folder / "moved.json").write_text(json.dumps(train(ranks, KEPT, UPDATES)))
    ranks.end()


def refused(folder, world):
    """Rank 1 refuses; what each rank makes of it goes into a file."""
    try:
        with world.together():
            if world.rank == 1:
                raise ConfigError("there is no room here")
    except ConfigError as error:
        (folder / f"refused{world.rank}").write_text(repr(error))


def two_lives(folder, part):
    """Fork two ranks, and two again when those are dead. What is slow to import is imported once, before."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    for name in ("accelerate", "deepspeed", "serl_launcher.policies.pi0"):
        importlib.import_module(name)
    if part == "lerobot":
        lerobot_policies.all_of_them(folder / "models")
    for life in ("first", "second"):
        fork, port = multiprocessing.get_context("fork"), free_port()
        ranks = [fork.Process(target=each_case, args=(folder, part, life, rank, port)) for rank in "01"]
        for rank in ranks:
            rank.start()
        connection.wait([rank.sentinel for rank in ranks], PATIENCE)
        for rank in ranks:
            rank.join(10.0)  # of a rank that failed the other one would wait for ever
            rank.kill()
            rank.join()
        assert [rank.exitcode for rank in ranks] == [-signal.SIGKILL] * 2


# -- the tests


OURS = [pytest.param("two", marks=pytest.mark.slow), pytest.param("all", marks=pytest.mark.nightly)]
LEROBOT = pytest.param(
    "lerobot", marks=[pytest.mark.slow, pytest.mark.skipif(not find_spec("lerobot"), reason="needs the extra `data`")]
)


@pytest.fixture(scope="module", params=OURS)
def part(request):
    return request.param


@pytest.fixture(scope="module")
def lives(tmp_path_factory, part):
    """Where two processes trained this part, were killed, and went on from their checkpoints: a folder that takes long
    to make, and that the processes of a parallel run share."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"lives of {part}"
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "refused0").exists():
            command = [sys.executable, "-m", "tests.training.test_sharding", folder, part]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=2 * PATIENCE)
            assert done.returncode == 0, done.stderr[-4000:]
    return folder


def told(folder, case, way, life):
    return json.loads((folder / case / f"{way}.{life}.json").read_text())


def test_however_it_is_spread_it_learns_what_one_process_learns(lives, part):
    for case, ways in PARTS[part].items():
        words, _, tolerance = CASES[case]
        expected = alone(words)
        for way in ways:
            metrics, _ = told(lives, case, way, "first")
            assert metrics[0] == pytest.approx(expected[0], rel=max(1e-3, tolerance)), way
            last = {name: value for name, value in expected[-1].items() if "loss" in name}
            assert {name: metrics[-1][name] for name in last} == pytest.approx(last, abs=tolerance), way


@pytest.mark.parametrize("part", [*OURS, LEROBOT], indirect=True)
def test_after_a_kill_it_goes_on_bit_for_bit(lives, part):
    for case, ways in PARTS[part].items():
        for way in ways:
            (metrics, trained), (again, resumed) = told(lives, case, way, "first"), told(lives, case, way, "second")
            assert again == metrics[KEPT:]
            assert resumed == trained


def test_a_checkpoint_goes_from_any_sharding_to_any_other_and_to_one_process(lives):
    expected = told(lives, "flow", "zero2", "first")[0][KEPT:]
    place = Checkpoints(lives / "flow/zero2", spec=SPEC, config={})
    for metrics in (json.loads((lives / "moved.json").read_text()), alone(FLOW, KEPT, place.load())):
        assert [each["loss"] for each in metrics] == pytest.approx([each["loss"] for each in expected], abs=1e-4)


def test_what_one_rank_refuses_all_refuse_and_rank_0_alone_says_why(lives):
    told = [(lives / f"refused{rank}").read_text() for rank in (0, 1)]
    assert told == ["ConfigError('rank 1: there is no room here')", "ConfigError('')"]


def test_a_batch_that_the_ranks_cannot_share_is_refused():
    words = [*FLOW, "algo.optimizer.accumulation=3"]
    with pytest.raises(ConfigError, match=r"batch_size=16 cannot be cut into 6 equal parts .* say batch_size=18"):
        ranks_of(words, World(size=2)).check({16})
    ranks_of(words, World(size=2)).check({18})


def test_zero_3_is_refused_where_several_networks_are_trained():
    with pytest.raises(ConfigError, match="sharding=zero2"):
        ranks_of(CASES["rlpd"][0], World(size=2), "zero3").check({16})


class Told(World):
    """Rank 0 of two that are not there: what it would send of weights is kept."""

    sent: ClassVar[list[torch.Tensor]] = []

    def broadcast(self, tree=None):
        return tree

    def broadcast_into(self, tensor):
        self.sent.append(tensor)


@pytest.mark.parametrize("way", ["zero2", "zero3"])
def test_what_zero_3_shards_goes_to_no_device_before_it_is_sharded(way, monkeypatch):
    monkeypatch.setattr(Told, "sent", sent := [])
    monkeypatch.setattr(Optimizer, "spread", lambda *_: None)
    ranks = ranks_of(FLOW, Told(size=2), way)
    ranks.begin(None)
    moved, policy = {tensor.data_ptr() for tensor in sent}, ranks.algorithm.policy
    assert {weight.data_ptr() in moved for weight in policy.parameters()} == {way != "zero3"}
    assert {other.data_ptr() for other in (*ranks.algorithm.averaged.parameters(), *policy.buffers())} <= moved


# -- whole runs


class Run(Programs):
    """The learner and the actor of a run, with as much patience as two ranks need."""

    def until(self, condition, seconds=PATIENCE):
        return super().until(condition, seconds)

    def trainers(self):
        """{rank: process id}, the parent of the ranks being rank None."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                words, environment = ((path / name).read_text("latin1").split("\0") for name in ("cmdline", "environ"))
            except OSError:
                continue
            if str(self.run_dir) in words and "trainer" in words:
                rank = next((word for word in environment if word.startswith("RANK=")), None)
                found[rank and int(rank.removeprefix("RANK="))] = int(path.name)
        return found


@pytest.fixture
def run(tmp_path):
    with Run(tmp_path) as made:
        yield made


WORDS = [
    "task=fake", "plan=hiors", "policy=pi0_tiny", "batch_size=8", "checkpoint_s=0.5", "log=false",
    'plan.phases.demonstrate.until=["demo.episodes >= 3"]', 'plan.phases.clone.until=["updates >= 40"]',
    "~plan.phases.baseline", "~plan.phases.practise", 'plan.phases.evaluate.until=["episodes >= 4"]',
]  # fmt: skip


@pytest.mark.nightly
def test_a_run_of_two_ranks_whose_rank_was_killed_says_so_and_goes_on_to_act_with_what_was_trained(run):
    """The actor pulls the weights and checks their hash; the trainer checks the hash of what acted when evaluated."""
    words = [*WORDS, "ranks=2", "sharding=zero2", "inference=local"]
    actor, learner = (run.start(side, *words) for side in ("actor", "learner"))
    run.until(lambda: run.facts().checkpointed > 0)
    os.kill(run.trainers()[1], signal.SIGKILL)
    assert run.status(learner, PATIENCE) == 1
    assert "rank 1 was killed by signal 9" in run.log.read_text()
    run.until(lambda: not run.trainers())
    before = run.facts().checkpointed
    learner = run.start("learner", *WORDS, "ranks=2", "sharding=zero3")
    assert [run.status(process, PATIENCE) for process in (learner, actor)] == [0, 0]
    assert f"after {before} updates" in run.log.read_text()
    summary = json.loads((run.run_dir / "summary.json").read_text())
    file = run.run_dir / "weights" / f"{summary['eval']['weights_sha256']}.safetensors"
    assert hashlib.sha256(file.read_bytes()).hexdigest() == file.stem
    assert summary["updates"] == 40
    assert summary["eval"]["episodes"] == 4
    assert not {word for word in ("Traceback", "errors.log") if word in run.log.read_text()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    two_lives(Path(sys.argv[1]), sys.argv[2])
