"""The loops, and what is around them: wiring, checkpoints, evaluation, stopping."""

import megappo.parallel.runtime  # noqa: F401  the CPU runtime must be in place before megatron is imported
