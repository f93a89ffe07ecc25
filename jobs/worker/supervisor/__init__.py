"""A job from its start to its end, on the first of its nodes. Runs on Python 3.8, without torch."""
