"""Engines run models: training with Megatron's schedules, generation behind the `RolloutEngine` protocol.

A file that imports megatron imports `megappo.parallel.runtime` first, by name, or its package does: this package
imports nothing itself, so that plans of the hybrid engine can be made without torch.
"""
