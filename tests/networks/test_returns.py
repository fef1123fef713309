"""Returns over every pattern of ends, beside a sum that is written out step by step."""

from itertools import product

import pytest
import torch

from serl_launcher.networks.returns import lambda_return

STEPS = 4
PATTERNS = list(product(("", "terminated", "truncated", "both"), repeat=STEPS))  # how each step of a window ends
TERMINATED = torch.tensor([[end in ("terminated", "both") for end in pattern] for pattern in PATTERNS])
TRUNCATED = torch.tensor([[end in ("truncated", "both") for end in pattern] for pattern in PATTERNS])
GENERATOR = torch.Generator().manual_seed(0)
REWARD, VALUE_NEXT = torch.randn(2, len(PATTERNS), STEPS, generator=GENERATOR).double()
EACH_ITS_OWN = torch.rand(len(PATTERNS), STEPS, generator=GENERATOR).double()
WINDOW = (REWARD, VALUE_NEXT, TERMINATED, TRUNCATED)


def summed(row, begin, most, discount):
    """The return of `most` steps from `begin` on, reward by reward."""
    total, kept = 0.0, 1.0
    for count, step in enumerate(range(begin, STEPS)):
        total += kept * float(REWARD[row, step])
        kept *= float(discount[row, step])
        if TERMINATED[row, step]:
            return total
        if TRUNCATED[row, step] or step == STEPS - 1 or count == most - 1:
            return total + kept * float(VALUE_NEXT[row, step])
    raise AssertionError


def every(most, discount):
    rows = range(len(PATTERNS))
    return torch.tensor([[summed(row, step, most, discount) for step in range(STEPS)] for row in rows]).double()


@pytest.mark.parametrize("discount", [0.5, EACH_ITS_OWN], ids=["one", "each step's own"])
@pytest.mark.parametrize("share", [0.0, 0.7, 1.0])
def test_a_lambda_return_is_the_mean_of_n_step_returns(share, discount):
    """(1 - share) share^(n-1) of each n; the longest one has the rest."""
    each = torch.as_tensor(discount).expand(len(PATTERNS), STEPS)
    parts = [(1 - share) * share ** (n - 1) * every(n, each) for n in range(1, STEPS)]
    expected = torch.stack([*parts, share ** (STEPS - 1) * every(STEPS, each)]).sum(0)
    torch.testing.assert_close(lambda_return(*WINDOW, discount=discount, share=share), expected)
