"""Two ranks average gradients in few messages, as one process would make them of both batches."""

import multiprocessing
import os
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import distributed, nn

from serl_launcher.optim import averaging
from serl_launcher.optim.distributed import World
from serl_launcher.optim.optimizer import Optimizer
from tests.shared.common import SCALE

pytestmark = pytest.mark.usefixtures("one_thread")

PATIENCE = 60.0 * SCALE
LAYERS, BUCKETS = 8, 3
STEPS = 3


class Net(nn.Module):
    """Some layers; of the last two, `odd` is used by rank 1 alone, and `unused` by nobody."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(LAYERS)))
        self.odd, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, rows, rank):
        hidden = self.layers(rows)
        return (self.odd(hidden) if rank else hidden).square().mean()


def rows_of(step, part, rank):
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(100 * step + 10 * part + rank))


def optimizer_of():
    torch.manual_seed(0)
    return Optimizer(Net(), learning_rate=0.01, weight_decay=0.1, accumulation=2)


def alone():
    """One process that makes both ranks' losses."""
    optimizer = optimizer_of()
    for step in range(STEPS):
        for part in range(2):
            losses = [optimizer.forward(rows_of(step, part, rank), rank) for rank in (0, 1)]
            optimizer.step(sum(losses) / 2)
    return optimizer.module.state_dict(), list(optimizer.state_dict()["states"].values())


def trained(folder, rank):
    """What a rank does: train, and write down what came out and the sizes of all messages of a step."""
    torch.set_num_threads(1)
    averaging.BUCKET = sum(weight.nbytes for weight in Net().parameters()) // 2 - 1  # so there are BUCKETS
    store = distributed.FileStore(str(folder / "store"), 2)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=PATIENCE))
    world, sent, reduce = World(rank, 2, "cpu", distributed.new_group()), [], distributed.all_reduce
    distributed.all_reduce = lambda tensor, **more: sent.append(tensor.numel()) or reduce(tensor, **more)
    optimizer = optimizer_of()
    optimizer.spread(world, None)
    for step in range(STEPS):
        sent.clear()
        for part in range(2):
            optimizer.step(optimizer.forward(rows_of(step, part, rank), rank))
    steps = [*sent]
    given = world.scatter([{"rows": rows_of(9, 0, each), "names": [str(each)]} for each in (0, 1)] if rank == 0 else ())
    joined, least = world.joined(given["rows"]), world.least(torch.tensor([rank, -rank]))
    told = given, joined, least
    torch.save([optimizer.module.state_dict(), list(optimizer.state_dict()["states"].values()), steps, told],
               folder / f"{rank}.pt")  # fmt: skip
    os._exit(0)  # as the launcher's ranks: the threads of gloo do not survive an orderly end


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What both ranks have written down."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    spawn = multiprocessing.get_context("spawn")  # autograd does not survive a fork
    processes = [spawn.Process(target=partial(trained, folder), args=(rank,), daemon=True) for rank in (0, 1)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE)
        process.kill()
    assert [process.exitcode for process in processes] == [0, 0]
    return [torch.load(folder / f"{rank}.pt") for rank in (0, 1)]


@pytest.mark.slow
def test_ranks_take_the_steps_of_one_process_also_where_one_rank_alone_used_a_weight(ranks):
    """Adam's steps are the same for larger gradients, but its averages of them are not."""
    expected, expected_states = alone()
    for weights, states, *_ in ranks:
        torch.testing.assert_close(weights, expected)
        torch.testing.assert_close(states, expected_states)
    assert all(torch.equal(ranks[0][0][name], ranks[1][0][name]) for name in expected)


@pytest.mark.slow
def test_a_weight_that_no_rank_uses_stays_as_it_was_without_decay(ranks):
    for weights, states, *_ in ranks:
        assert torch.equal(weights["unused.weight"], optimizer_of().module.unused.weight)
        assert [bool(state) for state in states] == [True] * (2 * LAYERS + 2) + [False] * 2


@pytest.mark.slow
def test_gradients_travel_in_few_messages(ranks):
    numbers = sum(weight.numel() for weight in Net().parameters())
    for *_, sent, _ in ranks:
        *buckets, used = sent
        assert len(buckets) == BUCKETS
        assert sum(buckets) == numbers
        assert used == 2 * LAYERS + 4  # which weights had a gradient


@pytest.mark.slow
def test_each_rank_gets_its_part_alone_and_the_least_of_all(ranks):
    for rank, (*_, (given, joined, least)) in enumerate(ranks):
        assert least.tolist() == [0, -1]
        assert given["names"] == [str(rank)]
        assert torch.equal(given["rows"], rows_of(9, 0, rank))
        assert torch.equal(joined, torch.cat([rows_of(9, 0, each) for each in (0, 1)]))


def test_a_large_weight_is_a_bucket_of_its_own(monkeypatch):
    sizes = [4, 1, 1, 9, 2]
    monkeypatch.setattr(averaging, "BUCKET", 4 * 4)  # bytes
    buckets = averaging._buckets([nn.Parameter(torch.zeros(size)) for size in sizes])
    assert [[len(weight) for weight in bucket] for bucket in buckets] == [[2], [9], [1, 1], [4]]
