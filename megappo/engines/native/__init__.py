"""The parts of the native rollout engine (one folder up): schedule, cache, attention, module swaps, drawing."""
