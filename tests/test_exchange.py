"""Strided copies in wide words: every bit arrives, whatever the strides allow."""

from __future__ import annotations

import pytest
import torch

from flash_attn.shared_prompt._exchange import copy_words


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("width", [1, 2, 4, 6, 8, 24])
@pytest.mark.parametrize("offset", [0, 1, 2, 4, 8])
def test_every_bit_is_copied(dtype: torch.dtype, width: int, offset: int) -> None:
    """(ranks, rows, width) within wider rows, into (rows, ranks, width) within others."""
    numbers = torch.randint(-(2**15), 2**15, (3, 5, (width + 16) * dtype.itemsize // 2), dtype=torch.int16)
    source = numbers.view(dtype)[..., offset : offset + width]  # NaNs of any payload among them
    target = torch.zeros(5, 3, width + 8, dtype=dtype)
    copy_words(target[..., 8 - offset :][..., :width], source.transpose(0, 1))
    found = target[..., 8 - offset :][..., :width].transpose(0, 1).contiguous().view(torch.int16)
    assert torch.equal(found, source.contiguous().view(torch.int16))
    rest = torch.cat([target[..., : 8 - offset], target[..., 8 - offset + width :]], -1)
    assert not rest.contiguous().view(torch.int16).any()


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (1, 8), ()])
def test_empty_tensors_and_single_rows(shape: tuple[int, ...]) -> None:
    source, target = torch.ones(shape), torch.zeros(shape)
    copy_words(target, source)
    assert torch.equal(target, source)
    flipped = torch.zeros(4, 8).t()  # no stride of one at the end
    copy_words(flipped, torch.ones(8, 4))
    assert flipped.all()
