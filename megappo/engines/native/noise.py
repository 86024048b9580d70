"""Sampling noise as a pure function of (key, token index). No generator, no state; torch's RNG is left alone.

The number is the output of SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators"),
which can be read at any index, so that a sequence draws the same noise in any batch, in any order and on any layout.
"""

import torch
from torch import Tensor


def _signed(value: int) -> int:
    """The int64 with the bits of an unsigned 64-bit number."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


INCREMENT = _signed(0x9E3779B97F4A7C15)
FIRST_FACTOR = _signed(0xBF58476D1CE4E5B9)
SECOND_FACTOR = _signed(0x94D049BB133111EB)


def uniform(keys: list[int], indices: list[int]) -> Tensor:
    """Number `indices[i]` of the stream of `keys[i]`, float64 in [0, 1), on the CPU; shape [len(keys)].

    Keys are any integers and count modulo 2^64. Neighbouring keys give unrelated streams: a key is mixed once before
    it seeds its stream. 52 bits, so that u · total < total holds after rounding.
    """
    seeds = _mixed(torch.tensor([_signed(key) for key in keys], dtype=torch.int64))
    bits = splitmix64(seeds, torch.tensor(indices, dtype=torch.int64))
    return _shifted(bits, 12).double() * 2.0**-52


def splitmix64(seeds: Tensor, indices: Tensor) -> Tensor:
    """Output number `indices` (from 0) of SplitMix64 started at `seeds`; int64 tensors that hold unsigned bits."""
    return _mixed(seeds + (indices + 1) * INCREMENT)


def _mixed(bits: Tensor) -> Tensor:
    bits = (bits ^ _shifted(bits, 30)) * FIRST_FACTOR
    bits = (bits ^ _shifted(bits, 27)) * SECOND_FACTOR
    return bits ^ _shifted(bits, 31)


def _shifted(bits: Tensor, places: int) -> Tensor:
    """Logical right shift: int64's own shift would copy the sign bit."""
    return (bits >> places) & ((1 << (64 - places)) - 1)
