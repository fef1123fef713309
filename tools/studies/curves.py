"""What is learned after how much practice: parts of it, and an evaluation behind each."""

import os
import statistics
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from robot_infra.cameras import gl
from serl_launcher.training.report import read
from tools.studies import runs
from tools.studies.cells import Rows, Study, each

EARLY = 100  # steps before the end of an episode at which a part of the practice ends, so that no further one begins
# SAC of three seeds after 50 thousand steps: results/sac/*.csv of github.com/nicklashansen/tdmpc2 (Hansen et al. 2024,
# arXiv 2310.16828), whose step 100000 counts simulator steps. Returns; success of Meta-World 2, an older version.
RETURNS = {
    "cartpole-balance": (999.4, 998.3, 998.5),
    "ball_in_cup-catch": (949.2, 955.0, 970.1),
    "cartpole-swingup": (844.8, 825.8, 834.3),
    "walker-walk": (917.8, 509.6, 697.1),
    "reacher-easy": (739.3, 68.4, 813.4),
}
SUCCESS = {
    "door-close-v3": 1.0, "coffee-button-v3": 1.0, "handle-press-side-v3": 1.0, "window-open-v3": 0.9,
    "plate-slide-v3": 0.83,
}  # fmt: skip
QUICKSTART = ["plan=quickstart", *runs.without("baseline", "practise", "evaluate")]
LARGE = "plan.sources.online.capacity=100000"
SAC = [
    "algo=sac", *QUICKSTART, LARGE, "policy.hidden=[256,256]", "policy.layer_norm=false", "critic.hidden=[256,256]",
    "algo.tau=0.01", "algo.initial_temperature=0.1",
]  # fmt: skip
RANDOM = 2500  # steps, five episodes
TDMPC2 = [
    "algo=tdmpc2_tiny", "plan=tdmpc2", *runs.without("practise", "evaluate"), f"random_steps={RANDOM - EARLY}", LARGE,
    "algo.discount=0.99", "algo.model.episodic=false",
]  # fmt: skip
PIXELS: dict[str, Any] = {"task": "sim_arm_pixels"}
HALF = "{online: 0.5, demo: 0.5}"
UPDATES = (3000, 3000, 6000)  # of the verdicts, before each evaluation; two for each step of the arm


def control(cell: Namespace) -> Mapping[str, Any]:
    """SAC, or a small TD-MPC2, on tasks of two suites, from states (docs/evidence/: learning.md, planning.md).

    control          algo=sac with the networks of its paper and two numbers of DrQ (Kostrikov et al. 2020, arXiv
                     2004.13649); batches of 256, one update per step
    control_tdmpc2   algo=tdmpc2_tiny: the first 2,500 steps are random, and as many updates follow at once
    After --at thousand steps each, --starts episodes are evaluated without exploration. A step is one action, repeated
    for two simulator steps. The actor runs in the Python of examples/dmc or examples/metaworld, which its first start
    installs (0.4 GB).
    """
    words = [*control_words(cell), *cell.words]
    made = runs.finished(cell.folder / cell.task, *words, example="metaworld" if cell.task in SUCCESS else "dmc")
    found: dict[str, Any] = {"returns": [], "env_steps": [], "successes": [], "updates": []}
    known = runs.metrics(made, "episode")
    for line in runs.evaluations(made, cell.starts):
        own = [at for at, episode in enumerate(known) if episode["phase"] == line["phase"]][: cell.starts]
        before = [episode["steps"] for episode in known[: own[-1]] if not episode["phase"].startswith("evaluate")]
        found["returns"].append(round(statistics.fmean(known[at]["return"] for at in own), 1))
        found["env_steps"].append(sum(before))
        found["successes"].append(line["successes"])
        found["updates"].append(line["updates"])
    return found


def control_words(cell: Namespace) -> list[str]:
    is_sac = vars(cell).get("algorithm", "sac") == "sac"
    first, begin = (0, 1000) if is_sac else (RANDOM, RANDOM - EARLY)
    practice = parts(spans(cell.at, first, EARLY), "{online: 1.0}", begin, cell.starts)
    return [f"task.env_id={cell.task}", f"seed={cell.seed}", *(SAC if is_sac else TDMPC2), *practice]


def cube_words(cell: Namespace) -> list[str]:
    return [f"seed={cell.seed}", "algo=rlpd", *QUICKSTART, *parts(spans(cell.at), HALF, 200, cell.starts)]


def spans(at: Sequence[int], first: int = 0, early: int = 0) -> list[str]:
    """Return the ends of practice until so many thousand steps, `first` of which come before; each is `early`."""
    ends = [first, *(1000 * count for count in at)]
    return [f"env_steps >= {until - before - early}" for before, until in pairwise(ends)]


def parts(untils: Sequence[str], data: str, begin: int, starts: int) -> list[str]:
    """Return the words for practice on `data` until each of these, begun after so many steps, with evaluations."""
    when = [f"online.steps >= {begin}", *[""] * (len(untils) - 1)]
    return runs.turns(
        [runs.practice(until, data, start=start) for until, start in zip(untils, when, strict=True)], starts
    )


def beside_published(rows: Rows, options: Namespace) -> Iterator[str]:
    """Yield the means of the seeds after each part, and the last one as a share of what is published."""
    steps = " | ".join(map(str, options.at))
    yield f"| after thousand steps | {steps} | by seed | SAC, published, after 50 | share of it |"
    yield "|---" * (len(options.at) + 4) + "|"
    for task, cells in rows.items():
        judged = task in SUCCESS
        curves = [
            [count / options.starts for count in cell["successes"]] if judged else cell["returns"] for cell in cells
        ]
        means = [statistics.fmean(found) for found in zip(*curves, strict=True)]
        published, digits = (SUCCESS[task], 2) if judged else (statistics.fmean(RETURNS[task]), 0)
        last = ", ".join(f"{cell['seed']}: {curve[-1]:.{digits}f}" for cell, curve in zip(cells, curves, strict=True))
        values = " | ".join(f"{mean:.{digits}f}" for mean in means)
        name = f"`{task}`, {'success' if judged else 'return'}"
        yield f"| {name} | {values} | {last} | {published:.{digits}f} | {means[-1] / published:.2f} |"


def pick_cube(cell: Namespace) -> Mapping[str, Any]:
    """RLPD picks up gym-hil's cube, placed at random, from 20 demonstrations of its script (docs/evidence/learning.md).

    algo=rlpd as it is, and nobody takes over. After --at thousand steps of practice each, the policy acts on the same
    --starts starts. The goal is 24 of 30 in the mean, after 10 thousand steps. Needs the extra `hil`.
    """
    os.environ.setdefault("MUJOCO_GL", gl.backend())  # the task makes a renderer, though nothing is drawn
    actor = ["task.env.operator=scripted", "task.env.clock=simulated", f"seed={cell.seed}"]
    words = [*cube_words(cell), *cell.words]
    found = runs.evaluations(runs.finished(cell.folder / "run", *words, task="pick_cube", actor=actor), cell.starts)
    return {name: [line[name] for line in found] for name in ("successes", "updates")}


def frozen(cell: Namespace) -> Mapping[str, Any]:
    """RLPD picks up the arm's block from two cameras, through a frozen random ResNet18 (docs/evidence/learning.md).

    20 demonstrations of the script on sim_arm_pixels, then practice, one update per step, all settings of rlpd_pixels.
    After --at thousand steps each, the policy acts on --starts distinct starts.
    trained convolutions   algo=rlpd_pixels, the control
    a frozen backbone      algo=rlpd_frozen: nothing of the ResNet is trained
    Hypothesis, said before the first cell: after the last part both succeed equally often, so that the interval of the
    paired difference holds 0.
    """
    begun = runs.demonstrations(cell.folder / "demonstrations", cell.seed, 20, **PIXELS)
    words = [f"algo={cell.algo}", f"seed={cell.seed}", *QUICKSTART, *runs.without("demonstrate")]
    words += [*parts(spans(cell.at), HALF, 200, cell.starts), *cell.words]
    actor = [f"seed={cell.seed}"]
    made = runs.finished(cell.folder / cell.algo, *words, of=begun, forgets=True, actor=actor, **PIXELS)
    found = runs.evaluations(made, cell.starts)
    return {name: [line[name] for line in found] for name in ("successes", "updates")} | {"draw": runs.draw(made)}


def verdicts(cell: Namespace) -> Mapping[str, Any]:
    """Does RLPD learn from a person's verdicts alone what it learns from a judge? On sim_arm (docs/guides/verdicts.md).

    The judge gives reward 1 and ends the episode when the block is up. With operator it is silent, and a scripted one
    says success when the block is up, and failure after an episode whose time ran out. All else is the same. After
    3,000, 6,000 and 12,000 updates, --starts distinct starts are evaluated.
    """
    words = [f"seed={cell.seed}", *QUICKSTART, *parts([f"updates >= {n}" for n in UPDATES], HALF, 200, cell.starts)]
    actor = [f"seed={cell.seed}", f"task.env.verdict_by={cell.verdict_by}"]
    made = runs.finished(cell.folder / cell.verdict_by, *words, *cell.words, actor=actor)
    known, summary = runs.episodes(made, "demo", "online", "eval"), read(made / "summary.json")
    return {
        "successes": runs.successes(made, cell.starts), "env_steps": summary["env_steps"],
        "updates": summary["updates"], "stored_reward": sum(episode.reward for episode in known),
        "verdicts": sum(episode.judged_by == "operator" for episode in known), "episodes": len(known),
    }  # fmt: skip


CONTROL: dict[str, Any] = {"columns": lambda _: {}, "notes": beside_published}
TASKS = {task: {"task": task} for task in (*RETURNS, *SUCCESS)}
SMALL = {task: {**key, "algorithm": "tdmpc2_tiny"} for task, key in TASKS.items()}
PARTS: dict[str, Any] = {"columns": lambda options: each(f"after {count} thousand steps" for count in options.at)}
STUDIES = {
    "control": Study(control, {"at": [5, 10, 20, 30, 40, 50], "starts": 10}, TASKS, usual=3, **CONTROL),
    "control_tdmpc2": Study(control, {"at": [15], "starts": 10}, SMALL, usual=1, **CONTROL),
    "pick_cube": Study(pick_cube, {"at": [2, 4, 6, 8, 10], "starts": 30}, {"RLPD": {}}, **PARTS),
    "frozen": Study(
        frozen, {"at": [2, 4], "starts": 30},
        {"trained convolutions": {"algo": "rlpd_pixels"}, "a frozen backbone": {"algo": "rlpd_frozen"}},
        control="trained convolutions", **PARTS,
    ),
    "verdicts": Study(
        verdicts, {"starts": 50}, {who: {"verdict_by": who} for who in ("judge", "operator")}, control="judge",
        columns=lambda _: each(f"after {count} updates" for count in ("3,000", "6,000", "12,000")),
    ),
}  # fmt: skip
