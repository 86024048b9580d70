"""The parts of the native rollout engine (one folder up): schedule, cache, attention, module swaps, drawing."""

import megappo.parallel.runtime  # noqa: F401  the CPU runtime must be in place before megatron is imported
