"""Which checks each side of a run has, and what becomes of one that breaks."""

import logging
from collections.abc import Iterator, Sequence

from serl_client.errors import RetakeError

from serl_launcher.config import composed

from . import machine, network, robot
from .common import CONFIG, Check, Finding, Run

log = logging.getLogger(__name__)

CHECKS: dict[str, Sequence[Check]] = {  # in this order: some look at what earlier ones found
    "learner": (
        machine.packages, machine.plan, machine.processors, network.folder, network.keys, network.ports,
        robot.described_robot, machine.disk, machine.memory, machine.gpu, machine.programs,
    ),
    "actor": (
        machine.packages, machine.processors, machine.graphics, robot.robot, robot.cameras, robot.control,
        network.key, network.reachable, network.protocol, network.same_robot, network.name, network.inference,
        network.clocks, network.outbox, machine.disk, machine.memory, machine.gpu, machine.programs,
    ),
}  # fmt: skip
NEEDS: dict[Check, Check] = {  # a check whose need has failed says nothing
    machine.memory: machine.plan, machine.gpu: machine.plan, network.reachable: network.key,
    network.protocol: network.reachable, robot.cameras: robot.robot, robot.control: robot.robot,
    robot.described_robot: network.folder, machine.disk: network.folder,
}  # fmt: skip


def examined(side: str, words: Sequence[str], move: bool, seconds: float) -> Iterator[tuple[str, Finding]]:
    """(name of the check, what it found) of all checks of a side."""
    try:
        run = Run(side, composed(CONFIG, [f"{side}=true", *words]), move, seconds)
    except RetakeError as error:
        yield "words", Finding("FAIL", str(error), "examples/train.py --help says what there is to choose")
        return
    failed: set[Check] = set()
    try:
        for check in CHECKS[side]:
            if NEEDS.get(check) in failed:
                failed.add(check)
                continue
            for finding in looked(check, run):
                if finding.state == "FAIL":
                    failed.add(check)
                yield check.__name__, finding
    finally:
        if run.env is not None:
            run.env.close()


def looked(check: Check, run: Run) -> Iterator[Finding]:
    """What a check finds; one that breaks is a finding, too: a driver may raise anything."""
    try:
        yield from check(run)
    except RetakeError as error:
        yield Finding("FAIL", str(error))
    except Exception as error:
        log.exception("the check %s broke", check.__name__)
        yield Finding("FAIL", repr(error), "look at the traceback above: it names the part that failed")
