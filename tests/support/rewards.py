"""Reward functions of tests. A module of their own: reward processes import it, and should not import Megatron."""

from megappo.experience.sample import RolloutSample


def length_reward(sample: RolloutSample) -> float:
    """Any function of the sample does: it must only vary."""
    return float(sum(sample.response_ids) % 7) - 3.0
