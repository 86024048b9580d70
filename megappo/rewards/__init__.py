"""Rewards: rules, user functions in their own processes, and the weighted sum that is a sequence's score. No torch."""
