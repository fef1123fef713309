"""Utils: what several rooms use and none owns. Nothing here imports from store, replay, datasets, training or acting.

Without torch: logging.py (metrics as JSON lines, wandb), recording.py (rerun, mp4), report.py (summary.json, learning
curve), schedule.py (learning rate), words.py (the word that was meant). With torch: checkpoint.py, distributed.py
(ranks), finite.py (NaN), optim.py (Adam, sharding).
"""
