"""Starts the ranks of a trainer (several GPUs), and runs the algorithm on all; rank 0 has the Learner."""

import logging
import math
import os
import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from serl_client.errors import ConfigError
from torch import Tensor

from serl_launcher.algorithms.base import Algorithm
from serl_launcher.networks.mlp import Statistics
from serl_launcher.optim.distributed import World, gathered
from serl_launcher.supervisor import END, REFUSED
from serl_launcher.training.staging import Staging
from serl_launcher.types import Batch, Metrics

log = logging.getLogger(__name__)


class Ranks:
    """One algorithm, built alike on every rank. Rank 0 calls the public methods, the others call `obey`.

    sharding: DeepSpeed's config, for the optimiser with most weights. With stage 0 every rank holds everything.
    """

    def __init__(self, algorithm: Algorithm, world: World, sharding: Mapping[str, Any]) -> None:
        self.algorithm, self.world = algorithm, world
        self._staging = Staging()
        self._sharding = sharding if world.size > 1 and sharding["zero_optimization"]["stage"] else None

    def check(self, batch_sizes: Collection[int]) -> None:
        """Raise ConfigError for a batch size that the ranks cannot share, or for networks that ZeRO-3 cannot shard."""
        optimizers = list(self.algorithm.optimizers.values())
        parts = math.lcm(*(self.world.size * optimizer.accumulation for optimizer in optimizers))
        if size := next((size for size in sorted(batch_sizes) if size % parts), None):
            raise ConfigError(
                f"batch_size={size} cannot be cut into {parts} equal parts ({self.world.size} ranks times the "
                f"optimizer's accumulation): say batch_size={math.ceil(size / parts) * parts}, "
                "or so many rows where the plan says `batch`"
            )
        if self._sharding and self._sharding["zero_optimization"]["stage"] == 3 and len(optimizers) > 1:
            raise ConfigError("sharding=zero3 is for algorithms that train one network (algo=sft): say sharding=zero2")

    # -- what rank 0 says
    def begin(self, state: Mapping[str, Any] | None) -> None:
        """Load `state` on every rank; None: take the weights with which rank 0 was built."""
        if state is not None:
            self.algorithm.load_state_dict(state)
        self._all("begin")

    def update(self, name: str, batch: Batch) -> tuple[Metrics, Metrics]:
        """Make the update of that name, each rank on an equal part of the batch.

        The batch is on this rank's device. Returns the mean of the metrics, and the columns [B, ...] that it computed.
        """
        if self.world.size == 1:
            return self._made(name, batch)
        self.world.broadcast(["update", name])
        parts = [batch.part(rank, self.world.size) for rank in range(self.world.size)]
        return self._update(name, [{field.name: getattr(part, field.name) for field in fields(part)} for part in parts])

    def set_statistics(self, statistics: Statistics) -> None:
        self._all("statistics", {
            kind: {name: value.tolist() for name, value in part.items()} for kind, part in statistics.items()
        })  # fmt: skip

    def published(self) -> Staging:
        """Copy the acting part's weights, whole, into memory that stays allocated. Returns that memory."""
        self._all("published")
        return self._staging

    def still_published(self) -> bool:
        """Return whether the acting part has the weights that `published` has copied."""
        return self._all("still_published")

    def state_dict(self) -> dict[str, Any]:
        """Return the algorithm's state, in a form that fits any number of ranks and any sharding."""
        return self._all("state")

    def steps(self) -> dict[str, tuple[int, int]]:
        """Return {optimiser's name: (steps asked for, steps refused because the gradient was not finite)}."""
        return {name: (each.steps, each.refused) for name, each in self.algorithm.optimizers.items()}

    def end(self) -> None:
        self.world.broadcast(["end", None])

    def _all(self, what: str, argument: Any = None) -> Any:
        what, argument = self.world.broadcast([what, argument])
        return getattr(self, f"_{what}")(argument)

    # -- what every rank does
    def obey(self) -> None:
        """Do what rank 0 tells this rank, until that is `end`."""
        while (order := self.world.broadcast())[0] != "end":
            getattr(self, f"_{order[0]}")(order[1])

    def _begin(self, _: None) -> None:
        optimizers = list(self.algorithm.optimizers.values())
        sizes = [sum(weight.numel() for weight in optimizer.parameters.values()) for optimizer in optimizers]
        largest = optimizers[sizes.index(max(sizes))] if optimizers else None
        sharded: set[int] = set()  # the ids of weights that ZeRO-3 takes from the CPU, one at a time
        if largest and self._sharding and self._sharding["zero_optimization"]["stage"] == 3:
            sharded = {id(weight) for weight in largest.module.parameters()}
        named = (*self.algorithm.named_parameters(), *self.algorithm.named_buffers())
        whole = [tensor for _, tensor in named if id(tensor) not in sharded]
        for tensor in whole:
            tensor.data = tensor.data.to(self.world.device)
            self.world.broadcast_into(tensor)
        self.algorithm.generator.set_state(self.world.broadcast(self.algorithm.generator.get_state()).cpu())
        for optimizer in optimizers:
            optimizer.spread(self.world, self._sharding if optimizer is largest else None)

    def _update(self, name: str, parts: Sequence[Mapping[str, Any]] = ()) -> tuple[Metrics, Metrics]:
        part = self.world.scatter(parts)
        metrics, columns = self._made(name, Batch(**{**part, "task": tuple(part["task"])}))
        for buffer in map(self.algorithm.get_buffer, self.algorithm.means):
            buffer.copy_(self.world.mean(buffer))
        for buffer in map(self.algorithm.get_buffer, self.algorithm.lowest):
            buffer.copy_(self.world.least(buffer))
        if metrics:
            values = self.world.mean(torch.stack([value.float() for value in metrics.values()]))
            metrics = dict(zip(metrics, values, strict=True))
        return metrics, {column: self.world.joined(values) for column, values in columns.items()}

    def _made(self, name: str, batch: Batch) -> tuple[Metrics, Metrics]:
        """Make an update of this rank's rows. A mean that is not finite after it stays what it was, as the weights do
        (optim/optimizer.py)."""
        means = [(mean, mean.clone()) for mean in map(self.algorithm.get_buffer, self.algorithm.means)]
        made = getattr(self.algorithm, name)(batch)
        for mean, before in means:
            mean.copy_(torch.where(mean.isfinite(), mean, before))
        return made if isinstance(made, tuple) else (made, {})  # metrics, and columns if it has computed any

    def _statistics(self, argument: Any) -> None:
        self.algorithm.set_statistics({
            kind: {name: np.asarray(value) for name, value in part.items()} for kind, part in argument.items()
        })  # fmt: skip

    def _published(self, _: None) -> None:
        with gathered(self.algorithm.acting.parameters()):
            if self.world.rank == 0:
                self._staging.copy(self.algorithm.acting.published())

    def _still_published(self, _: None) -> bool:
        with gathered(self.algorithm.acting.parameters()):
            return self.world.rank == 0 and self._staging.holds(self.algorithm.acting.published())

    def _state(self, _: None) -> dict[str, Any]:
        state = self.algorithm.state_dict()
        whole: dict[int, Tensor | None] = {}  # a weight that two modules share is kept once
        for name, weight in self.algorithm.named_parameters(remove_duplicate=False):
            if hasattr(weight, "ds_id"):
                if id(weight) not in whole:
                    with gathered([weight]):
                        whole[id(weight)] = weight.detach().to("cpu", copy=True) if self.world.rank == 0 else None
                state[name] = whole[id(weight)]
        return state


def launch_ranks(config: DictConfig, module: Sequence[str]) -> int:
    """Run `python -m MODULE ...` as the ranks of this node by `accelerate launch`, until all have ended or one failed.

    Returns the exit status: that of a rank that refused, 1 when one failed. Raises ConfigError for too few GPUs.
    """
    os.environ["LOGLEVEL"] = "CRITICAL"  # torch's launcher would say at length what we say below
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = END.name
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available()):
        there = torch.cuda.device_count()
        if there < config.ranks:
            raise ConfigError(f"ranks={config.ranks}, and this machine has {there} GPUs: say fewer, or device=cpu")
    address, _, port = (config.main if config.nodes > 1 else "127.0.0.1:0").rpartition(":")
    options = {
        "num_processes": config.ranks * config.nodes, "num_machines": config.nodes, "machine_rank": config.node_rank,
        "main_process_ip": address, "main_process_port": port, "mixed_precision": "no", "dynamo_backend": "no",
    }  # fmt: skip
    words = [f"--{name}={value}" for name, value in options.items()]
    os.environ["OMP_NUM_THREADS"] = str(config.threads)
    try:
        launch_command(launch_command_parser().parse_args(["--multi_gpu", *words, "--module", *module]))
    except ChildFailedError as error:
        statuses = {rank: failure.exitcode for rank, failure in error.failures.items()}
        if REFUSED in statuses.values():
            return REFUSED
        first = {rank: status for rank, status in statuses.items() if status != -signal.SIGTERM} or statuses
        log.error("the run is over: %s", ", ".join(f"rank {rank} {_ended(status)}" for rank, status in first.items()))
        return 1
    except SignalException:
        return 1
    return 0


def _ended(status: int) -> str:
    return f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
