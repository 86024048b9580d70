"""Arithmetic about a run that needs no torch: today the split of a step's batch."""
