"""Run a job from start to end on its first node. Runs on Python 3.8, without torch."""
