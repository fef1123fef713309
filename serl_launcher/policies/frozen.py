"""Publishes a policy that is trained in part: a digest stands for the weights that never change."""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from serl_launcher.policies.base import Acting

FROZEN = "frozen.sha256"  # published in place of the frozen weights


class PartlyFrozen(Acting):
    """What a policy with `frozen` weights publishes: the others in `precision`, the buffers, and a digest.

    So an acting process has to begin with the same frozen weights, and `load_published` refuses others.
    """

    _frozen_digest: Tensor | None = None

    def published(self) -> dict[str, Tensor]:
        weights = dict(self.named_parameters())
        tensors = {
            name: tensor.to(self.precision) if name in weights else tensor
            for name, tensor in self.state_dict().items() if name not in self.frozen
        }  # fmt: skip
        return {**tensors, FROZEN: self._digest()}

    def load_published(self, tensors: Mapping[str, Tensor]) -> None:
        tensors = dict(tensors)
        frozen = tensors.pop(FROZEN, None)
        if differing := sorted(tensors.keys() ^ (self.state_dict().keys() - self.frozen)):
            raise RuntimeError(f"weight {differing[0]}: trained by one of the two alone")
        if frozen is None or not torch.equal(frozen.cpu(), self._digest()):
            raise RuntimeError(
                "the frozen weights differ: give the same policy.weights and policy.freeze (or policy.path) as the "
                "learner"
            )
        self.load_state_dict(tensors, strict=False)

    def _digest(self) -> Tensor:
        """Return the SHA-256 of the frozen weights, uint8 [32]. They never change, so it is computed once."""
        if self._frozen_digest is None:
            digest = hashlib.sha256()
            for name, weight in sorted(self.named_parameters()):
                if name in self.frozen:
                    digest.update(name.encode())
                    digest.update(weight.detach().to(self.precision).cpu().flatten().view(torch.uint8).numpy().data)
            self._frozen_digest = torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)
        return self._frozen_digest
