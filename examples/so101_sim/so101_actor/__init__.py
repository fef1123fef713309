"""The task SO101PickPlace of lerobot-env-so101, registered without lerobot: expert.py is its operator."""
