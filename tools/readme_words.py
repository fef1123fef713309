"""Says what tools/readme.py changes in the commands of the pages to make them short, and which of them nobody gives."""

SHORT = ["max_env_steps=120", "baseline_episodes=2", "eval_episodes=2"]  # a word that is said wins over these
EARLY = {  # conditions of a plan, and what the copy has for them
    r"updates >= \d+": "updates >= 40", r"demo\.episodes >= 20": "demo.episodes >= 12",  # more than one export holds
    r"online\.steps >= 200": "online.steps >= 40", r"online\.episodes >= 5": "online.episodes >= 1",
    r" episodes >= 10": " episodes >= 1",
}  # fmt: skip
SUBSTITUTES = {"10.0.0.5": "127.0.0.1", "GPU_BOX": "127.0.0.1"}  # places of a reader's own

NOT_RUN = {  # a regular expression of whole commands: why nobody gives them here. One that fits none is an error.
    r"\./test\.sh.*": "is what calls this tool",
    r"(gpu-box\$|laptop\$|ssh|scp).*": "needs a second machine",
    r"(shard=.*; )?(\.venv/bin/)?rerun\b.*": "opens a viewer for a person",
    r"kill .*|setsid .*": "is about a viewer that a person has opened",
    r"apt-get .*": "changes the machine, and needs its administrator",
    r".*operator=keyboard.*": "needs a person at the keyboard",
    r".*sim\.dobot_controller.*|.*task=my_dobot.*": "runs until somebody ends it; tests/house/test_docs.py gives them",
    r"examples/(dmc|metaworld|so101_sim)/\S+\.sh.*": "installs what its tasks need, 0.4 GB each",
    r".*task=so101.*|.*runs/better.*|.*sim\.feetech.*": "needs an SO-101, or what takes its place",
    r"lerobot-(find-port|calibrate|rollout).*": "needs an SO-101",
    r".*runs/(new|both)\b.*": "needs a dataset of the reader's own",
    r"\.venv/bin/tensorboard .*": "serves a page until somebody ends it",
    r".*robot=dobot_xtrainer.*": "needs two real arms; tests/robot/test_dobot_cell.py tries to connect",
    r".*/models/.*|.*/path/to/.*": "needs a file that only its owner has",
    r"examples/robomimic/\S+\.sh.*": "installs robosuite, 1.1 GB",
    r".*tools/study\.py (act(_more)?|control|memory|pick_cube|planning|world_models).*": "takes minutes for each run",
    r".*tools/study\.py effort.*": "takes minutes for each run",
    r".*uv pip install.*|.*LunarLander.*|.*PushT-v0.*": "installs packages that are none of ours",
    r".*tools/study\.py .* -- .*": "takes an hour",
    r".*tools/bench\.py(?! --help).*": "measures, for minutes, and asks for an idle machine",
    r".*(NNODES|ranks=|sharding=|pi0_expert|pi0_lora|policy=pi0\b).*": "needs a GPU, or several machines",
    r".*(EPISODE|NAME|FILE|\.\.\.|<\w+>).*": "has a name in it that a reader fills in",
    r".*tools/mutants\.py .*": "needs git, and an hour",
    r".*tests\.faults\.power --all": "tries every cut, for an hour or more",
    r".*tools/chaos\.py --quickstart.*": "kills a whole run again and again, for ten minutes or more",
    r"\.venv/bin/python": "is only the beginning of a command",
    r".*tools/doctor\.py actor": "needs a learner that runs; README gives it one",
    r".*tools/keys\.py unban .*": "needs a key that was banned",
    r".*run_(learner|actor)\.sh task=my_arm.*": "needs a person; tests/programs/test_own_robot.py is one",
    r"tmux .*": "needs a run that goes on in tmux",
    r".*runs/judged.*": "needs a second actor; tests/programs/test_run.py gives it one",
}
