"""tools/soak.py: what it calls drift, and a short run of it."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.faults.soak import drift

SOAK = Path(__file__).parents[2] / "tools/soak.py"


def test_a_slow_leak_under_noise_is_drift_and_noise_and_what_fills_up_once_are_none():
    times, noise = np.arange(100) * 5.0, np.random.default_rng(0).normal(0, 3, 100)
    assert not drift(times, 100 + noise).grows
    assert not drift(times, np.minimum(times, 80) + noise).grows
    leak = drift(times, 100 + noise + times / 60)
    assert leak.grows
    assert leak.per_hour == pytest.approx(60, abs=2 * leak.error)


@pytest.mark.slow
def test_actors_come_and_go_at_a_store_that_evicts_and_the_last_line_tells_it():
    done = subprocess.run([sys.executable, SOAK, "--minutes", "0.08", "--actors", "6"], capture_output=True, text=True)
    assert "Traceback" not in done.stderr, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == (0 if result["holds"] else 1)
    assert result["errors"] == []
    assert result["kills"] >= 2
    assert result["lives"] > 6 + result["kills"]
    assert result["evicted"] > 0
    assert "rows of sessions" in result["grows_with_history"]
