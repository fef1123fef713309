"""Autoregressive head: each number of an action chunk is one of 128 bins, drawn after those before it.

The numbers of a chunk have an order: step by step, and within a step as in the action. With the bins y_1..y_N,
    (1) p(y | observation) = prod_i p(y_i | y_1..y_{i-1}, observation),
so a sample asks the network N times. Any network will do, because it learns by masking. A row draws one place i. The
network sees the bin centres before i, zeros from i on, and (i - 1) / N as time. For each number it predicts 128 logits:
    (2) loss = -log p(y_i | y_<i) - mean_{j >= i} log p(y_j | y_<i).
The first term, with i drawn evenly, is an unbiased estimate of 1 / N of the negative log of (1): samples use it alone.
The second one gives each update a gradient for the numbers behind i, too. Its optimum is the true p(y_j | y_<i), so it
moves no optimum; all its numbers together weigh as much as the first term.
A sample takes the bin in which a uniform number falls by the cumulative distribution. These numbers are the normal
distribution's, of the noise: equal noise gives equal chunks. Rounding may differ between batches of other sizes, and
where it puts a number into the next bin, what follows may differ more.
"""

import torch
from serl_client.errors import ConfigError
from torch import Tensor

from serl_launcher.networks.seeded_noise import uniform
from serl_launcher.policies.heads.base import Head, Predict, Target, asked

PLACE = 1  # stream of a row's random numbers for its place


class Autoregressive(Head):
    """bins: of each number, between -1 and 1."""

    keeps_unit = True

    def __init__(self, *, horizon: int, width: int, bins: int) -> None:
        super().__init__(horizon=horizon, width=width)
        if bins < 2:
            raise ConfigError(f"head.bins={bins}: say 2 or more, such as 128")
        self.bins = bins

    @property
    def passes(self) -> int:
        return self.horizon * self.width

    @property
    def outputs(self) -> int:
        return self.bins * self.width

    def errors(self, predict: Predict, target: Target) -> Tensor:
        """Compute (2), shared out so that the mean over the numbers that count is (2) again."""
        first, end = (row.unsqueeze(1) * self.width for row in (target.first, target.end))  # [B, 1], numbers
        count = end - first
        place = first + (uniform(target.seed, (1,), PLACE) * count).long().clamp(max=count - 1)  # i - 1
        bins = ((target.chunk.clamp(-1, 1) + 1) / 2 * self.bins).long().clamp(max=self.bins - 1)
        number = torch.arange(self.passes, device=place.device)  # j - 1
        is_given = (number < place).view_as(bins)
        logits = predict(torch.where(is_given, self._centre(bins), 0.0), place / self.passes)
        logits = logits.view(*bins.shape, self.bins)
        loss = -logits.log_softmax(-1).gather(-1, bins.unsqueeze(-1)).squeeze(-1)  # [B, H, D]
        behind = ((number >= place) & (number < end)).float() / (end - place)
        return loss * (count * (behind + (number == place).float())).view_as(loss)

    def sample(self, predict: Predict, noise: Tensor) -> Tensor:
        chunk = noise.new_zeros(len(noise), self.horizon, self.width)
        share = torch.special.ndtr(noise[:, 0])
        for place in range(self.passes):
            row, number = divmod(place, self.width)
            logits = asked(predict, chunk, place / self.passes)[:, row]
            below = logits.unflatten(-1, (self.width, self.bins))[:, number].softmax(-1).cumsum(-1)
            bins = (below < share[:, row, number].unsqueeze(-1)).sum(-1).clamp(max=self.bins - 1)
            chunk = chunk.clone()
            chunk[:, row, number] = self._centre(bins)
        return chunk

    def _centre(self, bins: Tensor) -> Tensor:
        return (bins + 0.5) * (2 / self.bins) - 1
