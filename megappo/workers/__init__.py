"""One worker a role: actor, critic, reference, rollout, reward. A worker works on this rank's part of the batch."""

import megappo.parallel.runtime  # noqa: F401  the CPU runtime must be in place before megatron is imported
