"""pytest -p tests.dearest: at the end, the ten files whose tests took most CPU time, with that of their processes."""

import resource
from collections import Counter

import pytest

COST = "cpu_s"
BEFORE = [0.0]


def spent() -> float:
    """CPU seconds of this process and of those that it has started and that have ended."""
    used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def pytest_runtest_logstart():
    BEFORE[0] = spent()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport():
    outcome = yield
    now = spent()
    outcome.get_result().user_properties.append((COST, now - BEFORE[0]))  # also from a worker to who gathers
    BEFORE[0] = now


def pytest_terminal_summary(terminalreporter):
    costs = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            costs[getattr(report, "nodeid", "").partition("::")[0]] += dict(getattr(report, "user_properties", ())).get(
                COST, 0.0
            )
    terminalreporter.section(f"the dearest of {len(costs)} files, in CPU seconds; all: {sum(costs.values()):.0f}")
    for name, cost in costs.most_common(10):
        terminalreporter.write_line(f"{cost:7.1f} {name}")
