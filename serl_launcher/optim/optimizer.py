"""Optimises one module (AdamW or LaProp, gradient clipping, accumulation), replicated or sharded (ZeRO) over the ranks.

A replicated module averages its gradients during the backward pass (averaging.py). A sharded module uses
DeepSpeed (Rajbhandari et al. 2020, "ZeRO", arXiv 1910.02054): stage 1 splits the optimiser state over the ranks, stage
2 also the gradients, stage 3 also the weights. Weights, gradients and states are float32 in each case, so that all
take the same steps.
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from serl_client.errors import ConfigError
from torch import Tensor, nn

from serl_launcher.optim.averaging import GradientAverage
from serl_launcher.optim.distributed import World, quiet
from serl_launcher.optim.schedule import rate
from serl_launcher.types import Batch

kernels: Any = torch  # torch's functions that begin with _ : type checkers do not see them

NORM_EVERY = 20  # steps between two norms of a gradient that is not clipped: a norm costs as much as a small layer
MOMENTS = ("exp_avg", "exp_avg_sq")  # Adam's state of one weight, beside the number of its steps

Parameters = dict[str, nn.Parameter]
State = dict[str, Tensor]  # step and MOMENTS of one weight, whole
Groups = Sequence[tuple[float, Sequence[nn.Parameter]]]  # a factor of the learning rate, and the weights that have it


class Optimizer:
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) on the trainable parameters of `module`, or another rule.

    `forward` runs the module. A step differentiates with respect to these parameters alone: a policy loss that passes
    through a critic leaves no gradient in the critic.

    learning_rate: the largest of the schedule; None: this and the next ones are what the module names in its
        `optimizer_preset`. warmup, decay, final: see schedule.rate.
    rates: {beginning of a weight's name: factor of the learning rate}; the longest that fits counts. Others have 1.
    betas: decay rates of the first and second moment. weight_decay: decoupled, as a share of the learning rate.
    epsilon: added to the root of the second moment.
    rule: `adamw`; or `laprop`, see _LaProp, which shards do not have.
    grad_clip_norm: largest norm of the gradient; None: not clipped.
    accumulation: parts of a batch (see `parts`) whose mean gradient makes one step, so that a batch may exceed memory.

    A gradient that is not finite changes no weight and no moment, because one such value would stay in every weight
    for good. `steps` counts the steps that were asked for, `refused` the steps with such a gradient. DeepSpeed's
    shards refuse none. Raises ConfigError if `rates` has a beginning of no weight's name, and for an unknown rule.
    """

    changeable = (  # see config.changeable
        "learning_rate", "rates", "betas", "weight_decay", "epsilon", "grad_clip_norm", "warmup", "decay", "final",
        "accumulation",
    )  # fmt: skip

    def __init__(
        self, module: nn.Module, *, learning_rate: float | None, rates: Mapping[str, float] | None = None,
        betas: tuple[float, float] = (0.9, 0.999), weight_decay: float = 0.0, epsilon: float = 1e-8,
        grad_clip_norm: float | None = None, warmup: int = 0, decay: int | None = None, final: float = 0.1,
        accumulation: int = 1, rule: str = "adamw",
    ) -> None:  # fmt: skip
        if rule not in RULES:
            raise ConfigError(f"algo.optimizer.rule={rule}: say one of {', '.join(RULES)}")
        own = {
            "learning_rate": learning_rate, "rates": rates or {}, "betas": betas, "weight_decay": weight_decay,
            "epsilon": epsilon, "grad_clip_norm": grad_clip_norm, "warmup": warmup, "decay": decay, "final": final,
        }  # fmt: skip
        if learning_rate is None:
            own |= _preset(module)
        self.module, self.learning_rate, self.accumulation = module, own["learning_rate"], accumulation
        self.grad_clip_norm = own["grad_clip_norm"]
        self.parameters = {name: weight for name, weight in module.named_parameters() if weight.requires_grad}
        self._schedule: dict[str, Any] = {name: own[name] for name in ("warmup", "decay", "final")}
        self._groups = grouped(self.parameters, own["rates"])
        self._adam = {
            "lr": self.learning_rate, "betas": tuple(own["betas"]), "weight_decay": own["weight_decay"],
            "eps": own["epsilon"],
        }  # fmt: skip
        self._rule = RULES[rule]
        self.steps = self._part = 0  # taken, and parts of the next one that were differentiated
        self._norm = torch.zeros(())
        self._loaded: dict[str, State] = {}
        # Made when it is needed: it takes memory, on the right device.
        self._placement: _Replica | _Shards | None = None

    def forward(self, *inputs: Any) -> Any:
        """Run the module, as it is placed on the ranks."""
        return self.placement.module(*inputs)

    @property
    def placement(self) -> "_Replica | _Shards":
        """How the module is placed on the ranks: alone on this one, unless `spread` was called."""
        if self._placement is None:
            self._placement = _Replica(self.module, self.parameters, self._groups, self._made, World())
            for name, state in self._loaded.items():
                self._placement.load(name, state)
            self._loaded = {}
        return self._placement

    def spread(self, world: World, sharding: Mapping[str, Any] | None) -> None:
        """Train on all ranks from now on, with the state that rank 0 has; every rank calls this, its module being on
        its device and like rank 0's. `sharding` is DeepSpeed's config; None: every rank has all. ZeRO-3 takes weights
        from the CPU, one at a time, and gives every rank a part of rank 0's."""
        if world.size == 1:
            return
        if sharding and self._rule is not _Adam:
            raise ConfigError("algo.optimizer.rule=laprop has no shards: say sharding=replicas")
        self.steps, norm, names = world.broadcast([self.steps, float(self._norm), list(self._loaded)])
        self._norm = torch.tensor(norm)
        own = (self.module, self.parameters, self._groups)
        if sharding:
            self._placement = _Shards(*own, self._adam, world, sharding, self.accumulation, self.grad_clip_norm)
        else:
            self._placement = _Replica(*own, self._made, world)
        for name in names:
            self._placement.load(name, world.broadcast(self._loaded.get(name)))
        self._loaded = {}

    def _made(self, weights: Sequence[nn.Parameter], states: dict[nn.Parameter, State]) -> "_Rule":
        return self._rule(weights, states, **self._adam)

    def parts(self, batch: Batch) -> Iterator[Batch]:
        """The parts of a batch, for each of which the module is run and `step` called."""
        for part in range(self.accumulation):
            yield batch.part(part, self.accumulation) if self.accumulation > 1 else batch

    def step(self, loss: Tensor) -> Tensor:
        """Add the gradient of a part's scalar loss; with that of the last part, take one step down.

        Returns the gradient's norm before it is clipped, without a gradient of its own; 0 before the last part. If it
        is not clipped, the norm is that of one of the last NORM_EVERY steps.
        """
        self._part += 1
        is_last = self._part == self.accumulation
        part = loss if self.accumulation == 1 else loss / self.accumulation
        self.placement.differentiate(part, is_first=self._part == 1, is_last=is_last)
        if not is_last:
            return torch.zeros((), device=loss.device)
        learning_rate = self.learning_rate * rate(self.steps, **self._schedule)
        norm = self.placement.step(learning_rate, self.grad_clip_norm, measured=self.steps % NORM_EVERY == 0)
        self._norm = self._norm.to(loss.device) if norm is None else norm
        self._part, self.steps = 0, self.steps + 1
        return self._norm

    @property
    def refused(self) -> int:
        """How many steps had a gradient that was not finite, in this process; waits for the device."""
        return 0 if self._placement is None else int(self._placement.refused)

    def state_dict(self) -> dict[str, Any]:
        """Return the steps taken, the last norm, and the state of each weight by its name, whole: whatever ranks and
        sharding are, and were. Every rank calls this."""
        states = (
            self._loaded if self._placement is None else {name: self._placement.state(name) for name in self.parameters}
        )
        return {"steps": self.steps, "norm": float(self._norm), "states": states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what state_dict said. Called before `spread`, on rank 0 alone."""
        self.steps, self._loaded, self._placement = state["steps"], dict(state["states"]), None
        self._norm = torch.tensor(state["norm"])


def _preset(module: nn.Module) -> Mapping[str, Any]:
    preset: Mapping[str, Any] | None = getattr(module, "optimizer_preset", None)
    if preset is None:
        raise ConfigError("algo.optimizer.learning_rate: say a number, because this policy brings none")
    return preset


def grouped(parameters: Parameters, rates: Mapping[str, float]) -> Groups:
    """Group weights by their factor of the learning rate; see Optimizer.rates."""
    for beginning in rates:
        if not any(name.startswith(beginning) for name in parameters):
            raise ConfigError(
                f"rates.{beginning}: no trained weight's name begins so; use the beginnings of {', '.join(parameters)}"
            )
    groups: dict[float, list[nn.Parameter]] = {}
    for name, weight in parameters.items():
        fitting = [beginning for beginning in rates if name.startswith(beginning)]
        groups.setdefault(rates[max(fitting, key=len)] if fitting else 1.0, []).append(weight)
    return list(groups.items())


class _Replica:
    """All of a module on every rank."""

    def __init__(
        self, module: nn.Module, parameters: Parameters, groups: Groups, rule: Callable[..., "_Rule"], world: World
    ) -> None:
        self.module, self._parameters = module, parameters
        self._states: dict[nn.Parameter, State] = {}
        self._rules = [(factor, rule(weights, self._states)) for factor, weights in groups]
        self._average = GradientAverage(list(parameters.values()), world) if world.size > 1 else None
        device = next(iter(parameters.values())).device
        self.refused, self._one = torch.zeros((), device=device), torch.ones((), device=device)

    def differentiate(self, loss: Tensor, *, is_first: bool, is_last: bool) -> None:
        if is_first:
            for weight in self._parameters.values():
                weight.grad = None
        if is_last and self._average is not None:
            self._average.begin()
        loss.backward(inputs=list(self._parameters.values()))

    def step(self, learning_rate: float, grad_clip_norm: float | None, *, measured: bool) -> Tensor | None:
        """Return the gradient's norm if it is clipped or `measured`."""
        if self._average is not None:
            self._average.finish()
        weights = list(self._parameters.values())
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        is_bad = torch.zeros_like(self.refused)  # on the device: nobody waits for it
        kernels._amp_foreach_non_finite_check_and_unscale_(gradients, is_bad, self._one)
        norm = nn.utils.get_total_norm(gradients) if measured or grad_clip_norm is not None else None
        if norm is not None and grad_clip_norm is not None:
            nn.utils.clip_grads_with_norm_(weights, grad_clip_norm, norm)
        for factor, rule in self._rules:
            rule.step(factor * learning_rate, is_bad)
        self.refused += is_bad
        return norm

    def state(self, name: str) -> State:
        return dict(self._states.get(self._parameters[name], {}))

    def load(self, name: str, state: State) -> None:
        weight = self._parameters[name]
        self._states[weight] = {key: value.to(weight.device, copy=True) for key, value in state.items()}


class _Rule(ABC):
    """How a step goes. states: it keeps those of its weights there."""

    def __init__(
        self, weights: Sequence[nn.Parameter], states: dict[nn.Parameter, State], *, lr: float,
        betas: tuple[float, float], weight_decay: float, eps: float,
    ) -> None:  # fmt: skip
        self._weights, self._states = weights, states
        self._options = {"beta1": betas[0], "beta2": betas[1], "weight_decay": weight_decay, "eps": eps}

    @torch.no_grad()
    def step(self, learning_rate: float, skip: Tensor) -> None:
        """Take a step with the gradients that are there. `skip`, 0 or 1 on the device: with 1 nothing changes."""
        weights = [weight for weight in self._weights if weight.grad is not None]
        if not weights:
            return
        for weight in weights:
            if weight not in self._states:
                moments = {name: torch.zeros_like(weight) for name in MOMENTS}
                self._states[weight] = {"step": torch.zeros((), device=weight.device), **moments}
        states = [self._states[weight] for weight in weights]
        steps, first, second = ([state[name] for state in states] for name in ("step", *MOMENTS))
        kernels._foreach_add_(steps, [1 - skip] * len(steps))  # one tensor alone would be read, which waits for the GPU
        self._move(weights, steps, first, second, learning_rate, skip)

    @abstractmethod
    def _move(
        self, weights: list[nn.Parameter], steps: list[Tensor], first: list[Tensor], second: list[Tensor],
        learning_rate: float, skip: Tensor,
    ) -> None:  # fmt: skip
        """Change weights and moments by their gradients. skip: with 1 nothing changes."""


class _Adam(_Rule):
    """AdamW by PyTorch's fused kernel. torch.optim.AdamW calls the same kernel, but imports PyTorch's compiler, which
    costs each trainer seconds at its start."""

    def _move(
        self, weights: list[nn.Parameter], steps: list[Tensor], first: list[Tensor], second: list[Tensor],
        learning_rate: float, skip: Tensor,
    ) -> None:  # fmt: skip
        kernels._fused_adamw_(
            weights, [weight.grad for weight in weights], first, second, [], steps, lr=learning_rate, amsgrad=False,
            maximize=False, grad_scale=None, found_inf=skip, **self._options,
        )  # fmt: skip


class _LaProp(_Rule):
    """LaProp (Ziyin et al. 2020, arXiv 2002.04839): the first moment is of gradients that the second has normalised.

    Before that each weight's gradient is cut to 0.3 of the weight's norm, which counts as 0.001 at least (adaptive
    gradient clipping: Brock et al. 2021, arXiv 2102.06171, equation 3, here of whole tensors, as in DreamerV3). Both
    moments are corrected for their beginning at zero, so that the first step is the learning rate, and the sign.
    """

    CLIP, LEAST = 0.3, 1e-3

    def _move(
        self, weights: list[nn.Parameter], steps: list[Tensor], first: list[Tensor], second: list[Tensor],
        learning_rate: float, skip: Tensor,
    ) -> None:  # fmt: skip
        beta1, beta2, weight_decay, eps = (self._options[name] for name in ("beta1", "beta2", "weight_decay", "eps"))
        is_bad, kept = skip > 0, 1 - skip
        gradients = [torch.where(is_bad, 0.0, weight.grad) for weight in weights if weight.grad is not None]
        norms, largest = kernels._foreach_norm(gradients), kernels._foreach_norm(weights)
        largest = kernels._foreach_mul(kernels._foreach_clamp_min(largest, self.LEAST), self.CLIP)
        shares = kernels._foreach_clamp_min(kernels._foreach_div(norms, largest), 1.0)
        kernels._foreach_div_(gradients, shares)
        kernels._foreach_mul_(second, 1 - (1 - beta2) * kept)
        kernels._foreach_addcmul_(second, gradients, gradients, 1 - beta2)
        begun1, begun2 = (self._begun(beta, steps) for beta in (beta1, beta2))
        roots = kernels._foreach_sqrt(kernels._foreach_div(second, begun2))
        kernels._foreach_div_(gradients, kernels._foreach_add(roots, eps))
        kernels._foreach_mul_(first, 1 - (1 - beta1) * kept)
        kernels._foreach_add_(first, gradients, alpha=1 - beta1)
        if weight_decay:
            kernels._foreach_mul_(weights, 1 - learning_rate * weight_decay * kept)
        moves = kernels._foreach_mul(kernels._foreach_div(first, begun1), kept)
        kernels._foreach_add_(weights, moves, alpha=-learning_rate)

    @staticmethod
    def _begun(beta: float, steps: list[Tensor]) -> list[Tensor]:
        """Return 1 - beta^step of each weight, 1 where no step was taken."""
        return [torch.where(step > 0, 1 - beta**step, 1.0) for step in steps]


RULES: Mapping[str, type[_Rule]] = {"adamw": _Adam, "laprop": _LaProp}


class _Shards:
    """A part of a module's training on every rank, by DeepSpeed."""

    refused = 0

    def __init__(
        self, module: nn.Module, parameters: Parameters, groups: Groups, adam: Mapping[str, Any], world: World,
        sharding: Mapping[str, Any], accumulation: int, grad_clip_norm: float | None,
    ) -> None:  # fmt: skip
        deepspeed: Any = importlib.import_module("deepspeed")
        deepspeed.ops.__compatible_ops__ = {}  # nothing is compiled: all that is used of it is Python
        counted = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": accumulation}
        self._parameters, self._rank, self._whole = parameters, world.rank, deepspeed.utils
        self._factors, self._is_linked = [factor for factor, _ in groups], False
        self._stage = sharding["zero_optimization"]["stage"]
        config = {**sharding, **counted, "gradient_clipping": grad_clip_norm or 0.0}
        with quiet():
            if self._stage == 3:  # `initialize` alone would move the whole module to the device before it is sharded
                deepspeed.zero.Init(module=module, config_dict_or_path=config)
            rule = torch.optim.AdamW([{"params": list(weights)} for _, weights in groups], fused=True, **adam)
            self.module, self._zero, *_ = deepspeed.initialize(
                model=module, model_parameters=list(parameters.values()), optimizer=rule, config=config
            )  # fmt: skip

    def differentiate(self, loss: Tensor, *, is_first: bool, is_last: bool) -> None:
        self.module.backward(loss, scale_wrt_gas=False)
        if not is_last:
            self.module.step()  # it counts parts by this

    def step(self, learning_rate: float, grad_clip_norm: float | None, *, measured: bool) -> Tensor:
        for factor, group in zip(self._factors, self._zero.param_groups, strict=True):
            group["lr"] = factor * learning_rate
        self.module.step()
        if self._stage < 3 and not self._is_linked:  # DeepSpeed does so behind the first group, when others have none
            self._zero._hp_optimizer_states_linked = False
            self._zero._lazy_init_hp_params_optimizer_state()
            self._is_linked = True
        return torch.as_tensor(self.module.get_global_grad_norm(), dtype=torch.float32, device=self.module.device)

    def state(self, name: str) -> State:
        """All of it on rank 0, in memory that is not the device's; nothing elsewhere."""
        weight, states = self._parameters[name], self._zero.optimizer.state
        if not states:
            return {}
        state = {"step": next(iter(states.values()))["step"]}
        for key in MOMENTS:
            whole = self._whole.safe_get_full_optimizer_state(weight, key)
            state |= {key: whole.cpu()} if self._rank == 0 else {}
        return state

    def load(self, name: str, state: State) -> None:
        if not state:  # there was no step yet, or none that this weight had a part in
            return
        self._begin(state["step"])
        for key in MOMENTS:
            self._whole.safe_set_full_optimizer_state(self._parameters[name], state[key], key)

    def _begin(self, step: Tensor) -> None:
        """Have the states that Adam would make at its first step."""
        zero = self._zero
        flat = zero.fp32_partitioned_groups_flat if self._stage == 3 else zero.single_partition_of_fp32_groups
        for weight in flat:
            if weight not in zero.optimizer.state:
                zero.optimizer.state[weight] = {key: torch.zeros_like(weight) for key in MOMENTS}
            zero.optimizer.state[weight]["step"] = step.float().to(weight.device, copy=True)
        if self._stage < 3:
            zero._lazy_init_hp_params_optimizer_state()
