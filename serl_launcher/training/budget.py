"""Estimates the GPU memory of inference, and whether trainer and inference fit on one GPU together.

CONTEXT and GRAPHS were measured on an H200 (docs/evidence/gpu.md); NCCL is believed: two GPUs were never at hand.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from serl_client.errors import ConfigError
from serl_client.spec import Spec

from serl_launcher.algorithms.base import Algorithm
from serl_launcher.optim.averaging import BUCKET
from serl_launcher.replay.encoded import Encoder
from serl_launcher.store.layout import Layout
from serl_launcher.training.memory import SHARE, Need, hollow, parts, said

CONTEXT = 700 << 20  # bytes of a process before its first tensor: CUDA's context, kernels, cuBLAS' workspaces
NCCL = 1 << 30  # bytes of a rank where there are several: NCCL's channels and buffers
NUMBER = 4  # bytes of a weight or a gradient that is trained: float32
GRAPHS = 0.5  # of the acting weights: the graphs' pools, for batches of about 20 of PI0; memory may limit them to less


@dataclass(frozen=True, slots=True)
class Acting:
    """Bytes of the inference process: `weights` in the policy's precision, a second copy of those that are `swapped`,
    the pools of its `graphs`, and the `context` of CUDA."""

    weights: int
    swapped: int
    graphs: int
    context: int = CONTEXT

    @property
    def total(self) -> int:
        return sum(asdict(self).values())

    def __str__(self) -> str:
        return f"{said(self.total)} ({parts(self)})"


def of_acting(make: Callable[[], Algorithm]) -> Acting:
    """Return what the inference process takes of a GPU, found without any weights."""
    policy = hollow(make).acting
    sizes = {name: weight.numel() * policy.precision.itemsize for name, weight in policy.named_parameters()}
    weights, rest = sum(sizes.values()), sum(buffer.nbytes for buffer in policy.buffers())
    swapped = sum(size for name, size in sizes.items() if name not in policy.frozen) + rest
    return Acting(weights + rest, swapped, int(GRAPHS * weights) if policy.graph else 0)


def of_exchange(make: Callable[[], Algorithm], zero: Mapping[str, Any]) -> int:
    """Return the bytes that each of several ranks takes for gradients and weights on their way.

    zero: `zero_optimization` of DeepSpeed's config. Stages 1 and 2 fill one bucket of gradients while another is sent.
    Stage 3 has whole weights while they are used. One that is larger than the limits is whole, too, with its gradient.
    """
    if not zero["stage"]:
        return BUCKET
    if zero["stage"] < 3:
        return int(2 * zero["reduce_bucket_size"] * NUMBER)
    limits = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_max_live_parameters")
    largest = max(weight.nbytes for weight in hollow(make).parameters())
    return int(sum(zero[name] for name in limits) * NUMBER) + 2 * largest


def of_staging(make: Callable[[], Algorithm]) -> int:
    """Return the bytes of this machine's memory that hold copies of weights and of a checkpoint while they are written.

    A checkpoint has all weights, and two moments of each that is trained.
    """
    algorithm = hollow(make)
    optimizers = list(algorithm.optimizers.values())
    trained = {id(weight): weight.nbytes for each in optimizers for weight in each.parameters.values()}
    whole = sum(tensor.nbytes for tensor in (*algorithm.parameters(), *algorithm.buffers()))
    return whole + 2 * sum(trained.values()) + of_acting(make).swapped


def check_staging(size: int, free: int) -> None:
    """Raise ConfigError if `free` bytes of this machine's memory have no room for the copies of `of_staging`."""
    if size > SHARE * free:
        raise ConfigError(
            f"weights and checkpoints are copied into this machine's memory before they are written: {said(size)}, of "
            f"which {said(free)} are free. What helps: a policy that trains less (policy=pi0_expert, policy=pi0_lora), "
            "or more memory"
        )


def check_encoded(encoders: Mapping[str, Encoder], spec: Spec, capacities: Mapping[str, int], free: int) -> None:
    """Raise ConfigError if `free` bytes of this machine's memory have no room for what the replay keeps of images."""
    rows = sum(Layout(spec, steps).rows for steps in capacities.values())
    if (size := rows * sum(each.feature.nbytes for each in encoders.values())) > SHARE * free:
        raise ConfigError(
            f"what the frozen backbone says of {rows} rows takes {said(size)} of this machine's memory, of which "
            f"{said(free)} are free. What helps: smaller sources of the plan (plan.sources.online.capacity=20000), or "
            "a backbone with fewer features"
        )


def check_acting(acting: Acting, free: int, device: str) -> None:
    """Raise ConfigError if the inference process needs more than `free` bytes, even if it answers one at a time."""
    if acting.total - acting.graphs > SHARE * free:
        raise ConfigError(
            f"inference takes {acting}, and {said(free)} are free on {device}: "
            "stop what else runs there, or choose a smaller policy"
        )


def check_both(training: Need, acting: Acting, total: int, device: str) -> None:
    """Raise ConfigError if a rank and the inference process need more than the `total` bytes of a GPU.

    What is free would not tell: the inference process may have taken its part already.
    """
    if training.total + acting.total > SHARE * total:
        raise ConfigError(
            f"trainer and inference share {device}, which has {said(total)}: training takes {training}, inference "
            f"{acting}. What helps: a smaller batch_size, a policy that trains less (policy=pi0_expert, "
            "policy=pi0_lora), policy.checkpointing=true, or a larger GPU"
        )
