"""Runs a policy that Retake wrote (tools/policy.py export), with torch and numpy alone.

    policy = Policy("folder")
    chunk = policy.act({"observation.state": state, "observation.images.front": image})

`python reader.py` asks the policy beside it once, with zeros.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch


class Policy:
    """A policy: an observation in, a chunk of actions out, in the units of the robot that it was trained on.

    folder: has policy.pt2 and policy.json. `about` is what the latter says: names, shapes, units, bounds, the rate.
    """

    def __init__(self, folder: str | Path, device: str = "cpu") -> None:
        folder = Path(folder)
        self.about = json.loads((folder / "policy.json").read_text())
        self._run = torch.export.load(folder / "policy.pt2").module().to(device)
        self._device, self._random = device, torch.Generator()

    def act(self, observation: Mapping[str, np.ndarray], *, explore: bool = False) -> np.ndarray:
        """Return the next `horizon` actions [H, A], one per 1/fps seconds.

        observation: {name: numbers}, images as uint8 [h, w, 3] in RGB; with `history` To > 1 each begins with the
            last To of them, the newest last.
        explore: True: as in practice; False: as in an evaluation.
        """
        seen = {}
        for name, feature in self.about["observation"].items():
            value = np.asarray(observation[name], feature["dtype"])
            if list(value.shape) != feature["shape"]:
                raise ValueError(f"{name} has the shape {list(value.shape)}, and should have {feature['shape']}")
            seen[name] = torch.from_numpy(value)[None].to(self._device)
        noise = torch.randn(1, *self.about["noise_shape"], generator=self._random)
        if self.about["mode_at_zero"] and not explore:
            noise = torch.zeros_like(noise)
        with torch.no_grad():
            return self._run(seen, noise.to(self._device))[0].cpu().numpy()


if __name__ == "__main__":
    policy = Policy(Path(__file__).parent)
    zeros = {name: np.zeros(each["shape"], each["dtype"]) for name, each in policy.about["observation"].items()}
    print(policy.act(zeros))
