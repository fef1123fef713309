"""Builds from the config for trainer and inference: seed, device, algorithm, number of ranks."""

import copy
import logging
from collections.abc import Callable
from dataclasses import replace

import torch
from omegaconf import DictConfig, OmegaConf
from serl_client.errors import ConfigError
from serl_client.spec import Spec

from serl_launcher.algorithms.base import Algorithm
from serl_launcher.config import factory
from serl_launcher.training import budget, memory
from serl_launcher.training.origin import Origin
from serl_launcher.training.plan_reader import plan_of

log = logging.getLogger(__name__)

WORTH = 50_000_000  # weights, frozen ones too, from which on several GPUs are believed to be faster; not measured


def seed(config: DictConfig) -> None:
    """Seed torch and set its threads. Call it before `build`: weights that no file gives are then alike everywhere."""
    torch.set_num_threads(int(config.threads))
    torch.manual_seed(int(config.seed))


def device_of(config: DictConfig) -> str:
    """Return torch's name of the config's device; `auto` is a GPU if there is one.

    Raises ConfigError for a device that this machine does not have.
    """
    if config.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=str(config.device))
    except (RuntimeError, AssertionError):
        raise ConfigError(f"device={config.device} cannot be used: say device=auto, cpu or cuda:0") from None
    return str(config.device)


def build(config: DictConfig, spec: Spec, origin: Origin | None = None) -> Algorithm:
    """Build the config's algorithm for this Spec, with what another run has learned, if that is its origin.

    Raises ConfigError for an option that the algorithm does not have, for a part of it that no checkpoint would keep,
    and for an origin with other networks.
    """
    make = factory(config, "algo", spec)
    algorithm = origin.begun(make, spec) if origin else make(spec)
    if unkept := algorithm.unkept:
        raise ConfigError(
            f"no checkpoint would keep {', '.join(unkept)} of {type(algorithm).__name__}: give it an Optimizer of "
            "serl_launcher/optim/optimizer.py, one an attribute, and make an nn.ModuleList or nn.ModuleDict of several "
            "modules"
        )
    return algorithm


def untrained(config: DictConfig, spec: Spec) -> Callable[[], Algorithm]:
    """Return a function that builds the config's algorithm, and reads no weights from a file."""
    config = copy.deepcopy(config)
    if OmegaConf.select(config, "algo.policy.weights"):
        config.algo.policy.weights = None
    return lambda: build(config, spec)


def ranks_of(config: DictConfig, spec: Spec) -> int:
    """Return how many processes train where `ranks` is auto: one for each GPU, or 1 for less than WORTH weights."""
    there = torch.cuda.device_count() if device_of(config) == "cuda" else 1
    if there == 1 or sum(weight.numel() for weight in memory.hollow(untrained(config, spec)).parameters()) >= WORTH:
        return there
    log.info("1 of %d GPUs trains, because messages between them would take longer: ranks=%d uses all", there, there)
    return 1


def check_memory(config: DictConfig, spec: Spec, device: str, size: int) -> memory.Need:
    """Return the memory that training takes on each of `size` ranks.

    Raises ConfigError when `device` does not have it, or is a GPU that has no room for the inference process beside it.
    """
    torch.set_num_threads(int(config.threads))  # the estimate computes a little while other processes start
    memory.check_built(untrained(config, spec), config.ranks)
    make = untrained(config, spec)
    zero = config.sharding.zero_optimization
    need = memory.needed(make, spec, config.batch_size, size, zero.stage, plan_of(config).batches(config.batch_size))
    if size > 1:
        need = replace(need, exchanged=budget.of_exchange(make, zero))
    staged = budget.of_staging(make)
    if device == "cpu":
        need = replace(need, staged=staged)
        memory.check(need, memory.free(device, config.ranks), device)
        return need
    acting = budget.of_acting(make)
    need = replace(need, published=acting.swapped, context=budget.CONTEXT + budget.NCCL * (size > 1))
    budget.check_staging(staged, memory.free("cpu", 1))
    free, total = torch.cuda.mem_get_info(device)
    memory.check(need, free, device)
    budget.check_both(need, acting, total, device)
    return need
