"""Learned models, and what acts with them: each with and without a part, from the same weights."""

import json
import statistics
import sys
import threading
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from serl_client import messages as m
from serl_client.connection import Connection
from serl_client.errors import RetakeError

from serl_launcher.config import saved
from serl_launcher.training.report import read
from tools.compare import compared, trials
from tools.studies import runs
from tools.studies.cells import Rows, Study

DREAMER = [  # chosen on seed 9: the discount fits episodes of 5 to 20 steps, and the entropy keeps both ways open
    "algo=dreamer_tiny", "utd=1", "algo.discount_steps=20", "algo.entropy_scale=0.03",
]  # fmt: skip
SAC = ["plan=from_scratch", "algo=sac", "policy=gaussian", "utd=1", "algo.discount=0.95"]
TDMPC2 = ["algo=tdmpc2_tiny", "algo.discount=0.95"]  # episodes of 50 steps, or at most 60: 1 - 5/50, at least 0.95
SEARCH = ["algo.mppi.samples=64", "algo.mppi.iterations=3", "algo.mppi.elites=12"]  # a third of the yaml's time
COST = ["task.env.cost=1.0"]
ONLINE = ["plan=offline_to_online", *runs.without("demonstrate", "offline", "baseline", "practise", "evaluate")]
EVERY, DEADLINE_MS = 5.0, 50  # seconds between two questions for the status; half of a step of the arm


def many(starts: int) -> list[str]:
    """Return the words of an evaluation on so many starts."""
    return ["plan=evaluate", f"eval_episodes={starts}", f"eval_steps={starts * 1000}"]


def succeeded(folder: Path) -> int:
    return sum(bool(trial.success) for trial in trials(folder).values())


def memory(cell: Namespace) -> Mapping[str, Any]:
    """Does Dreamer remember what a task shows once? In a corridor, by seed, beside SAC (docs/evidence/world-models.md).

    The goal is at one of two ends, and only the first observation of an episode tells at which (task=corridor): SAC
    sees each observation alone, Dreamer (algo=dreamer_tiny) remembers, and then does not: the same weights on the same
    --starts starts, with the carry reset at each step. Both have --steps steps, --random of them random, and one update
    for each other one. Words at the end go to every learner of Dreamer.
    """
    begun = [f"random_steps={cell.random}", f"max_env_steps={cell.steps}"]
    dreamer = [*DREAMER, f"seed={cell.seed}", *cell.words]

    def made(name: str, *words: str, of: Path | None = None) -> Path:
        return runs.finished(cell.folder / name, *words, of=of, task="corridor")

    learned = made("practice", "plan=dreamer", *dreamer, *begun, *runs.without("evaluate"))
    sac = made("sac", *many(cell.starts)[1:], *SAC, f"seed={cell.seed}", *begun)
    kept = made("dreamer", *many(cell.starts), *dreamer, of=learned)
    reset = made("reset", *many(cell.starts), *dreamer, "algo.remembers=false", of=learned)
    return {"sac": succeeded(sac), "dreamer": succeeded(kept), "reset": succeeded(reset)}


def planning(cell: Namespace) -> Mapping[str, Any]:
    """Does planning in the learned model act better than the prior alone? On a point (docs/evidence/planning.md).

    A point must come within 5 cm of a goal (task=fake); each step costs its distance in metres, the goal gives 1.
    algo=tdmpc2_tiny practises by plan=tdmpc2, --random of the --steps at random. After half of them the prior acts
    without planning (algo.plan=false), then planned actions of the same weights on the same --starts starts; after all
    of them planned actions again. The difference of returns is that of the first two, paired start by start.
    """
    half = cell.steps // 2
    common = [*TDMPC2, *COST, *cell.words, f"seed={cell.seed}"]

    def made(name: str, *words: str, of: Path | None = None) -> Path:
        return runs.finished(cell.folder / name, *common, *words, of=of, task="fake", actor=COST)

    def practised(name: str, steps: int, *words: str, of: Path | None = None) -> Path:
        begun = ["plan=tdmpc2", f"random_steps={cell.random}", f"max_env_steps={cell.steps}"]
        return made(name, *begun, f"plan.phases.practise.until=['env_steps >= {steps}']", *words, of=of)

    begin = practised("half", half - cell.random, *runs.without("evaluate"))
    prior = made("prior", *many(cell.starts), "algo.plan=false", of=begin)
    planned = made("planning", *many(cell.starts), of=begin)
    whole = made("planning-at-end", *many(cell.starts), of=practised("whole", half, "phase=practise", of=begin))
    pair = compared((prior, trials(prior)), (planned, trials(planned)))
    counts = {"prior": succeeded(prior), "planning": succeeded(planned), "planning_at_end": succeeded(whole)}
    return {**counts, "difference": pair["difference"], "return_difference": pair["return_difference"][0]}


def evolved(cell: Namespace) -> Mapping[str, Any]:
    """Does a controller need World Models' memory where a picture does not tell all? (docs/evidence/world-models.md)

    Pictures show where a puck slides, but not its speed (task=puck). algo=world_models_tiny learns V and M from
    --random steps of drift. Twice from there --steps steps of evolution follow: of a controller of the code z and the
    memory h, and of one of z alone (algo.remembers=false). Each acts on the same --starts starts; the difference of
    returns is paired. Words at the end that begin with `algo` go to the actors, too.
    """
    common = ["plan=world_models", "algo=world_models_tiny", f"seed={cell.seed}", *cell.words]
    common += [f"random_steps={cell.random}", f"max_env_steps={cell.steps}", f"eval_episodes={cell.starts}"]
    own = ["inference=local", "algo=world_models_tiny", *(word for word in cell.words if word.startswith("algo"))]

    def made(name: str, *words: str, of: Path | None = None, both: Sequence[str] = ()) -> Path:
        return runs.finished(cell.folder / name, *common, *words, *both, of=of, task="puck", actor=[*own, *both])

    learned, tried = made("learned", *runs.without("evolve", "evaluate")), {}
    for way, remembers in (("full", "true"), ("z_alone", "false")):
        old = runs.without("drift", "see", "encode", "predict")
        run = made(way, *old, of=learned, both=[f"algo.remembers={remembers}"])
        tried[way] = run, trials(run)
    pair = compared(tried["z_alone"], tried["full"])
    means = {way: statistics.fmean(trial.total for trial in found.values()) for way, (_, found) in tried.items()}
    counts = {f"{way}_successes": succeeded(run) for way, (run, _) in tried.items()}
    return {**means, **counts, "shared": pair["shared"], "return_difference": pair["return_difference"][0]}


def returns_told(rows: Rows, _: Namespace) -> Iterator[str]:
    for title, way in (("z and h", "full"), ("z alone", "z_alone")):
        yield f"returns of {title}: {' / '.join(f'{cell[way]:.1f}' for cell in rows[title])}"


def practised(cell: Namespace) -> Mapping[str, Any]:
    """Does TD-MPC2 learn on an arm at its own pace, with a person who takes over? By seed (docs/evidence/planning.md).

    sim_arm on the real clock, 10 steps a second. A script demonstrates --demonstrations times, algo=tdmpc2_tiny learns
    from these rows alone for --offline-updates, and practises for --steps steps with one update for each, while the
    script takes over where the policy is stuck. Reward is 1 where the block is up; each metre that is left costs 1.
        offline       the dataset alone has taught this, before practice
        practised     after practice
        more updates  the control: as many updates, on the demonstrations alone, and nobody practises
    Each acts on --starts distinct starts, with planning and without help, on the simulated clock. act: the time from an
    actor's question to its answer at the server of actions, while the robot practised, beside the deadline, after which
    the arm holds still.
    """
    common, demo = [*TDMPC2, *SEARCH, f"seed={cell.seed}", *cell.words], "{demo: 1.0}"

    def made(name: str, body: str, of: Path, *actor: str) -> Path:
        words = [*ONLINE, *common, runs.phase(name, body)]
        return runs.finished(cell.folder / name, *words, of=of, actor=[*COST, *actor])

    def tried(run: Path) -> int:
        words = [*many(cell.starts), *common]
        return succeeded(runs.finished(run.with_name(f"{run.name}-tried"), *words, of=run, actor=COST))

    words = [*TDMPC2, *SEARCH]
    begun = runs.demonstrations(cell.folder / "demonstrations", cell.seed, cell.demonstrations, *words, actor=COST)
    fit, until = ", on_begin: [{fit_normalizer: demo}]", f"updates >= {cell.offline_updates}"
    offline = made("offline", runs.training(until, demo, more=fit), begun)
    takes: dict[str, Any] = {"pace": "1.0", "intervene": True, "start": "online.episodes >= 2", "every": 20}
    body = runs.practice(f"env_steps >= {cell.steps}", "{online: 0.5, demo: 0.5}", **takes)
    with watched(cell.folder / "practised") as file:
        after = made("practised", body, offline, "task.env.clock=real")
    updates = int(read(after / "summary.json")["updates"])
    more = made("more", runs.training(f"updates >= {updates - cell.offline_updates}", demo), offline)
    counts = {"offline": tried(offline), "practised": tried(after), "more_updates": tried(more)}
    return {**counts, "updates": updates, **runs.effort(after), **read(file)}


@contextmanager
def watched(folder: Path) -> Iterator[Path]:
    """Ask a run's learner how long answers take, every EVERY seconds of the phase of its name; write the medians."""
    ended, told, file = threading.Event(), list[Mapping[str, Any]](), folder.with_suffix(".json")

    def watch() -> None:
        while not ended.wait(EVERY):
            with suppress(OSError, RetakeError):  # it does not answer yet
                address = f"tcp://127.0.0.1:{saved(folder).port}"
                with Connection(address, m.Hello(m.PROTOCOL, "viewer", "study")) as link:
                    answer: Any = link.call(m.Status(), timeout=3.0)
                report = answer.report
                if report["directive"].get("phase") == folder.name:
                    told.extend(client for client in report["clients"] if "p99_ms" in client)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield file
    finally:
        ended.set()
        watcher.join()
    if told:
        names = ("p50_ms", "p99_ms")
        medians = {f"act_{name}": round(statistics.median(client[name] for client in told), 1) for name in names}
        file.write_text(json.dumps(medians))
    elif not file.exists():
        sys.exit(f"error: the learner of {folder} never told how long answers took: remove that folder, then go on")


def answers_told(rows: Rows, _: Namespace) -> Iterator[str]:
    for cell in rows["practised"]:
        driven = f"the script drove {cell['driven_by_the_operator']} of {cell['env_steps']} rows"
        yield (
            f"seed {cell['seed']}: {driven}; act: half of the answers within {cell['act_p50_ms']} ms, 99 of 100 within "
            f"{cell['act_p99_ms']} ms, deadline {DEADLINE_MS} ms"
        )


STUDIES = {
    "memory": Study(
        memory, {"random": 1000, "steps": 3000, "starts": 100},
        parts={"sac": "SAC", "dreamer": "Dreamer", "reset": "Dreamer, its carry reset at each step"},
    ),
    "planning": Study(
        planning, {"random": 500, "steps": 3000, "starts": 100}, control="prior",
        parts={"prior": "prior", "planning": "planning", "planning_at_end": "planning, whole"},
    ),
    "planning_arm": Study(
        practised, {"demonstrations": 20, "offline_updates": 500, "steps": 1500, "starts": 30},
        parts={"offline": "offline", "practised": "practised", "more_updates": "more updates"},
        control="more updates", notes=answers_told,
    ),
    "world_models": Study(
        evolved, {"random": 8000, "steps": 80000, "starts": 20}, notes=returns_told,
        parts={"full_successes": "z and h", "z_alone_successes": "z alone"},
    ),
}  # fmt: skip
