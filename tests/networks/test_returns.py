"""Returns over every pattern of ends, beside a sum that is written out step by step."""

from itertools import product

import pytest
import torch

from serl_launcher.networks.returns import lambda_return

STEPS, DISCOUNT = 4, 0.5
PATTERNS = list(product(("", "terminated", "truncated", "both"), repeat=STEPS))  # how each step of a window ends
TERMINATED = torch.tensor([[end in ("terminated", "both") for end in pattern] for pattern in PATTERNS])
TRUNCATED = torch.tensor([[end in ("truncated", "both") for end in pattern] for pattern in PATTERNS])
GENERATOR = torch.Generator().manual_seed(0)
REWARD, VALUE_NEXT = torch.randn(2, len(PATTERNS), STEPS, generator=GENERATOR).double()
WINDOW = (REWARD, VALUE_NEXT, TERMINATED, TRUNCATED)


def summed(row, begin, most):
    """The return of `most` steps from `begin` on, reward by reward."""
    total = 0.0
    for count, step in enumerate(range(begin, STEPS)):
        total += DISCOUNT**count * float(REWARD[row, step])
        if TERMINATED[row, step]:
            return total
        if TRUNCATED[row, step] or step == STEPS - 1 or count == most - 1:
            return total + DISCOUNT ** (count + 1) * float(VALUE_NEXT[row, step])
    raise AssertionError


def every(most):
    return torch.tensor([[summed(row, step, most) for step in range(STEPS)] for row in range(len(PATTERNS))]).double()


@pytest.mark.parametrize("share", [0.0, 0.7, 1.0])
def test_a_lambda_return_is_the_mean_of_n_step_returns(share):
    """(1 - share) share^(n-1) of each n; the longest one has the rest."""
    parts = [(1 - share) * share ** (n - 1) * every(n) for n in range(1, STEPS)]
    expected = torch.stack([*parts, share ** (STEPS - 1) * every(STEPS)]).sum(0)
    torch.testing.assert_close(lambda_return(*WINDOW, discount=DISCOUNT, share=share), expected)


def test_a_discount_of_its_own_for_each_step_is_the_mixture_of_all_longer_returns():
    generator = torch.Generator().manual_seed(0)
    reward, value, discount = (torch.rand(1, 5, generator=generator) for _ in range(3))
    never = torch.zeros(1, 5, dtype=torch.bool)
    found = lambda_return(reward, value, never, never, discount=discount, share=0.9)
    for t in range(5):
        longer, kept, total = [], 1.0, 0.0
        for k in range(t, 5):
            total, kept = total + kept * reward[0, k], kept * discount[0, k]
            longer.append(total + kept * value[0, k])
        shares = [0.1 * 0.9**n for n in range(len(longer) - 1)]
        shares.append(1 - sum(shares))
        expected = sum(share * each for share, each in zip(shares, longer, strict=True))
        torch.testing.assert_close(found[0, t], expected)
