"""What a switch copies on the device itself: every byte, whatever the type, the cut and the place in memory."""

import pytest
import torch

from megappo.engines.hybrid.execute import widened


@pytest.mark.parametrize(
    ("shape", "start", "is_wide"),
    [
        ((6, 4), 0, True),  # 48 bytes
        ((3, 4), 4, True),  # begins at 8 bytes
        ((3, 4), 2, False),  # begins at 4
        ((3, 3), 0, False),  # ends at 18
        ((8,), 0, True),
        ((2, 2, 2), 0, True),
    ],
)
def test_copies_go_in_8_bytes_where_they_can(shape: tuple[int, ...], start: int, is_wide: bool) -> None:
    """Bits that are no numbers too: a NaN with a payload stays the one that it is."""
    torch.manual_seed(0)
    size = torch.Size(shape).numel()
    bits = torch.randint(-(2**15), 2**15, (start + size,), dtype=torch.int16)
    source = bits.view(torch.bfloat16)[start:].view(shape)
    memory = torch.zeros(start + size, dtype=torch.bfloat16)
    target = memory[start:].view(shape)
    to, of = widened(target, source)
    assert (to.dtype == of.dtype == torch.int64) == is_wide
    assert to.nbytes == of.nbytes == 2 * size
    torch._foreach_copy_([to], [of])
    assert torch.equal(target.view(torch.int16), source.view(torch.int16))
    assert memory[:start].count_nonzero() == 0


def test_columns_and_other_types_stay_as_they_are() -> None:
    square = torch.ones(4, 8)
    assert widened(square[:, :4], torch.zeros(4, 4))[0].dtype == torch.float32
    to, of = widened(square, torch.ones(4, 8, dtype=torch.bfloat16))
    assert (to.dtype, of.dtype) == (torch.float32, torch.bfloat16)
