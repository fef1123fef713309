"""What an algorithm cannot be is refused in a sentence that says why, and what to say instead."""

from dataclasses import replace

import pytest
import torch
from omegaconf import OmegaConf
from serl_client import ConfigError, Feature
from torch import nn

from serl_launcher.algorithms.base import Algorithm
from serl_launcher.training.build import build
from tests.shared.common import STATE
from tests.shared.lerobot_policies import ACT_WORD
from tests.shared.models import algorithm_of, robot

PLAIN = robot(states=2, actions=3, cameras=())
NAMED = replace(PLAIN, action=Feature((3,), names=("x", "gripper", "y"), low=[-1, 0, -4], high=[1, 2, 4]))
AUGMENT = "_target_:serl_launcher.networks.augment.Augment,_partial_:true,shift:1,brightness:0.0,contrast:0.0"
STRANGE = "policy._target_=serl_launcher.networks.mlp.StateEncoder " + " ".join(
    f"~policy.{word}" for word in ("encoder", "hidden", "layer_norm", "log_std_low", "log_std_high")
)
DENSITY = r"need a policy with a density .* policy=gaussian, or algo=sac_pi0 with"
OTHERS = ("guided", "fql", "iql", "recap", "sac_pi0", "sac")
LEROBOT = f"policy=lerobot {ACT_WORD} policy.rename={{{STATE}:observation.environment_state}}"
LEROBOT = LEROBOT.replace(", ", ",").replace(": ", ":")  # words are split by blanks
CHUNKS = [f"algo={name}" for name in ("qc", "dsrl", "expo")]
QUICK = [
    *((f"algo={name} {policy}", DENSITY) for name in ("sac", "rlpd") for policy in ("policy=flow", STRANGE)),
    ("algo=hybrid algo.gripper=3", r"algo\.gripper=3: the entries of this robot's action are 0 to 2"),
    ("algo=hybrid algo.gripper=-1", r"algo\.gripper=-1: the entries .* null is the last one"),
    ("algo=hybrid algo.gripper=gripper", r"algo\.gripper=gripper: .* there is none"),
    ("algo=hybrid algo.grasp_penalty=-0.1", r"at least 0, and epsilon a share .* grasp_penalty=-0\.1, epsilon=0\.0"),
    ("algo=hybrid algo.epsilon=1.5", r"a share between 0 and 1, not grasp_penalty=0\.02, epsilon=1\.5"),
    ("algo=hybrid policy=flow", r"algo=hybrid needs a policy of single actions .* policy=gaussian, not ChunkPolicy"),
    *((f"algo=iql algo.expectile={wrong}", "algo.expectile between 0 and 1") for wrong in (0.0, 1.0, -0.5)),
    ("algo=iql algo.beta=-1", "algo.beta of at least 0"),
    ("algo=iql policy=gaussian", "algo=iql needs a policy with a head: say policy=flow"),
    ("algo=calql algo.cql_alpha=-0.1", "algo.cql_alpha of at least 0"),
    ("algo=calql algo.cql_samples=0", "one or more algo.cql_samples"),
    ("algo=calql policy=flow", "say policy=gaussian"),
    *((f"algo={name} algo.augment={{{AUGMENT}}}", "sees none") for name in ("iql", "calql")),
    ("algo=recap algo.share=1.0", "shares between 0 and 1"),
    ("algo=recap algo.failure=1.0", "failure not above 0"),
    ("algo=recap policy.tasks=[push]", r"say policy.tasks=\[\]"),
    ("algo=tdmpc2_tiny algo.mppi.samples=5", "no more elites"),
    ("algo=tdmpc2_tiny algo.mppi.prior_samples=-1", "at least 1 of each"),
    ("algo=tdmpc2_tiny algo.mppi.iterations=0", "at least 1 of each"),
    ("algo=tdmpc2_tiny +algo.optimizer.accumulation=2", "takes a batch whole"),
    (
        "algo=reward_classifier algo.inputs=[observation.images.nowhere]",
        "robot has no .*nowhere; name some of observation",
    ),
    ("algo=judge algo.kept=1", "2 or more frames"),
    ("algo=reward_classifier algo.positive=0", "1 or more positive steps"),
    ("algo=reward_classifier algo.focus=-1", "nothing below 0"),
    ("algo=reward_classifier algo.stages=0", "say 1 or more stages"),
    ("algo=reward_classifier task.stages=3", "these rows have no column `stage`: record with task.stages=3"),
    ("algo=reward_classifier algo.encoder.cameras=[top]", "this robot has no camera top"),
]
SLOW = [
    *((f"algo={name} policy=chunk head=regression network=mlp",
       r"Regression are the same, so there is no best of .*proposal_noise=0.1") for name in ("qc", "parl", "expo")),
    *((f"{algo} policy.history=2", f"{algo} .*policy.history=1") for algo in CHUNKS),
    *((f"{algo} policy.max_delay=1", f"{algo} .*policy.max_delay=0") for algo in CHUNKS),
    *((f"{algo} policy=gaussian", f"{algo} needs a policy with a head") for algo in (*CHUNKS, "algo=recap")),
    *((f"algo=dsrl policy=chunk head={head}", r"steers by the noise .*head=ddim") for head in ("ddpm", "gaussian")),
    ("algo=guided policy=chunk head=mip", r"leads the steps of a sampler, which MIP does not have"),
    ("algo=fql policy=chunk head=ddim", r"distils a flow .*policy=flow"),
    ("algo=guided policy.head.path=trigonometric", r"policy.head.path=linear"),
    ("algo=guided algo.task_weight=2.0", r"policy.tasks=\[\.\.\.\] and algo.task_drop=0.1"),
    ("algo=guided algo.task_drop=1.0", r"a share below 1"),
    *((f"algo={name} {LEROBOT}", "say policy=.*, not LeRobotPolicy") for name in OTHERS),
    *((f"algo={name} {LEROBOT}", "LeRobotPolicy are the same, so there is no best") for name in ("qc", "expo", "parl")),
    (f"algo=dsrl {LEROBOT}", "LeRobotPolicy has another: say policy=flow"),
    (f"algo=qc algo.samples=1 algo.encoder=null {LEROBOT}", "LeRobotPolicy has no features for critics: leave"),
    ("algo=sac_pi0 policy=gaussian", "policy=flow or policy=pi0, not GaussianPolicy"),
]  # fmt: skip
ROBOTS = [
    ("algo=hybrid algo.gripper=griper", NAMED, r"no entry of the action is called 'griper'; did you mean 'gripper'\?"),
    ("algo=hybrid", robot(actions=1, cameras=()), r"needs an arm beside the gripper.*one entry: say algo=rlpd"),
    *((f"algo=world_models_tiny algo.{word}", robot(states=0), "say 4 or more, and more than 0")
      for word in ("population=3", "sigma=0")),
    *((words, PLAIN, sentence) for words, sentence in QUICK),
    *(pytest.param(words, PLAIN, sentence, marks=pytest.mark.slow) for words, sentence in SLOW),
]  # fmt: skip


@pytest.mark.parametrize(("words", "spec", "sentence"), ROBOTS, ids=str)
def test_what_cannot_be_is_refused_with_what_to_say(words, spec, sentence):
    with pytest.raises(ConfigError, match=sentence):
        algorithm_of(spec, *words.split())


class Forgetful(Algorithm):
    """Its layer is kept. Of its other parts, those that `holds` names learn, and no checkpoint would keep them."""

    acting = None

    def __init__(self, spec, holds):
        super().__init__()
        self.layer, self.names = nn.Linear(2, 2), ["no part that learns"]
        adam = torch.optim.Adam(self.layer.parameters())
        parts = {
            "adam": adam, "decay": torch.optim.lr_scheduler.ConstantLR(adam), "both": {"actor": adam},
            "critics": [nn.Linear(2, 2), nn.Linear(2, 2)],
        }  # fmt: skip
        for name in holds:
            setattr(self, name, parts[name])


@pytest.mark.parametrize("holds", [("adam",), ("adam", "decay"), ("both", "critics")], ids=str)
def test_a_part_that_learns_and_that_no_checkpoint_keeps_is_refused(holds):
    algo = {"_target_": f"{__name__}.Forgetful", "_partial_": True, "holds": list(holds)}
    with pytest.raises(ConfigError, match=f"keep {', '.join(holds)} of Forgetful: .* an Optimizer .* nn.ModuleList"):
        build(OmegaConf.create({"algo": algo}), PLAIN)
    assert not build(OmegaConf.create({"algo": {**algo, "holds": []}}), PLAIN).unkept
