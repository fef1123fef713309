"""Builds M of World Models: an LSTM that predicts the next code as a mixture of normal distributions (MDN-RNN).

Ha and Schmidhuber 2018 (arXiv 1803.10122); the mixtures: Bishop 1994, "Mixture Density Networks"; as in Graves 2013
(arXiv 1308.0850), but with mixtures of their own for each number of a code.
"""

import math

import torch
from torch import Tensor, nn

Memory = tuple[Tensor, Tensor]  # hidden and cell state of the LSTM, [B, hidden] each


class LSTM(nn.Module):
    """Codes and actions -> hidden states. A constant input takes the place of the biases, of which one is enough.

    The forget gates begin open by 1, as in the published code.
    """

    def __init__(self, codes: int, actions: int, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.cell = nn.LSTM(codes + actions + 1, hidden, bias=False, batch_first=True)
        constant = next(self.cell.parameters()).data[:, -1]  # torch's gates are input, forget, cell, output
        constant.zero_()
        constant[hidden : 2 * hidden].fill_(1)

    def begin(self, rows: int) -> Memory:
        zeros = next(self.cell.parameters()).new_zeros(rows, self.hidden)
        return zeros, zeros

    def forward(self, code: Tensor, action: Tensor, memory: Memory | None = None) -> tuple[Tensor, Memory]:
        """Follow codes [B, T, codes] and the actions [B, T, A] that were taken there -> hidden states [B, T, hidden]
        after each, and the memory after all. memory: before the first; None: nothing is remembered."""
        hidden, cell = memory or self.begin(len(code))
        inputs = torch.cat([code, action, torch.ones_like(action[..., :1])], -1)
        outputs, (hidden, cell) = self.cell(inputs, (hidden[None], cell[None]))
        return outputs, (hidden[0], cell[0])


class MDNRNN(nn.Module):
    """The LSTM and its mixtures, trained together; the module gives their loss.

    codes: numbers of a code. actions: A. hidden: of the LSTM. mixtures: normal distributions for each number.
    """

    def __init__(self, codes: int, actions: int, hidden: int, mixtures: int) -> None:
        super().__init__()
        self.lstm, self.mixtures = LSTM(codes, actions, hidden), mixtures
        self.head = nn.Linear(hidden, codes * mixtures * 3)

    def forward(self, code: Tensor, action: Tensor) -> Tensor:
        """Return how unlikely each next code was, -log of its density, mean over its numbers: [B, T - 1].

        code: [B, T, codes]. action: [B, T - 1, A], in [-1, 1].
        """
        hidden, _ = self.lstm(code[:, :-1], action)
        return unlikeliness(self.mixture(hidden), code[:, 1:]).mean(-1)

    def mixture(self, hidden: Tensor) -> Tensor:
        """Return logits, means and log standard deviations of the next code, [..., codes, mixtures, 3]."""
        return self.head(hidden).unflatten(-1, (-1, self.mixtures, 3))


def unlikeliness(mixture: Tensor, value: Tensor) -> Tensor:
    """Return -log of the density of each value [...] in its mixture [..., mixtures, 3]."""
    logit, mean, log_std = mixture.unbind(-1)
    distance = (value.unsqueeze(-1) - mean) * (-log_std).exp()
    log_density = -0.5 * (distance.square() + math.log(2 * math.pi)) - log_std
    return -(logit.log_softmax(-1) + log_density).logsumexp(-1)
