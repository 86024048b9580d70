"""Models: families and weight maps (no torch), construction on Megatron, and Hugging Face folders in and out.

A file that imports megatron imports `megappo.parallel.runtime` first, by name: this package imports nothing itself, so
that a planner can read the families without torch.
"""
