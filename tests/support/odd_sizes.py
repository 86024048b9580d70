"""Bytes of storages that no power of two is near: each of them a little above one, as most of a model's are."""

ODD_SIZES = [1_150_001, 300_007, 9_000_013, 33, 540_673, 4_300_001, 513, 2_200_003, 70_001]
