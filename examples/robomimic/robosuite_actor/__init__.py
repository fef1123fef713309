"""Robosuite's tasks as robots of an actor: scene.py is robot and cameras, expert.py the script that drives it."""
