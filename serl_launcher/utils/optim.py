"""The optimiser of one module; the only place that will know how a module is spread over several devices."""

from typing import Any

import torch
from torch import Tensor, nn


class Optimizer:
    """Adam on the parameters of `module` that ask for a gradient.

    Calling it runs the module. A step differentiates for these parameters alone: a policy's loss that passes through
    a critic leaves nothing in the critic.
    """

    def __init__(self, module: nn.Module, *, learning_rate: float) -> None:
        self.module = module
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._adam = torch.optim.Adam(self._parameters, lr=learning_rate, fused=True)

    def __call__(self, *inputs: Any) -> Any:
        return self.module(*inputs)

    def step(self, loss: Tensor) -> Tensor:
        """One step down the gradient of a scalar loss; returns the gradient's norm, without a gradient of its own."""
        gradients = torch.autograd.grad(loss, self._parameters)
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        self._adam.step()
        return nn.utils.get_total_norm(gradients)

    def state_dict(self) -> dict[str, Any]:
        return self._adam.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._adam.load_state_dict(state)
