"""Engines run models: training with Megatron's schedules, generation behind the `RolloutEngine` protocol."""

import megappo.parallel.runtime  # noqa: F401  the CPU runtime must be in place before megatron is imported
