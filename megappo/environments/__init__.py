"""Environments: what answers the model's turns. How turns are generated is in `workers/turns.py`."""
