"""bert_padding: arities, dtypes, round trips and gradients that libraries rely on."""

from __future__ import annotations

import pytest
import torch

from flash_attn import bert_padding
from flash_attn.bert_padding import (
    index_first_axis,
    index_first_axis_residual,
    index_put_first_axis,
    pad_input,
    unpad_input,
    unpad_input_for_concatenated_sequences,
)


def test_unpad_and_pad() -> None:
    x = torch.randn(3, 4, 2, requires_grad=True)
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [0, 1, 1, 1]])  # a row of padding only, left padding
    rows, indices, cu_seqlens, max_seqlen, seqused = unpad_input(x, mask)
    assert indices.dtype == torch.int64 and indices.tolist() == [0, 1, 9, 10, 11]
    assert cu_seqlens.dtype == torch.int32 and cu_seqlens.tolist() == [0, 2, 2, 5]
    assert type(max_seqlen) is int and max_seqlen == 3
    assert seqused.dtype == torch.int32 and seqused.tolist() == [2, 0, 3]
    torch.testing.assert_close(rows, x[mask.bool()])
    back = pad_input(rows, indices, 3, 4)
    torch.testing.assert_close(back, x * mask[..., None])
    back.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, mask[..., None].expand(3, 4, 2).float())


def test_int32_indices() -> None:
    """transformers' decoding step of a padded batch unpads with cu_seqlens[:-1]."""
    x = torch.randn(3, 2, requires_grad=True)
    indices = torch.tensor([2, 0, 1], dtype=torch.int32)
    torch.testing.assert_close(index_first_axis(x, indices), x[[2, 0, 1]])
    back = pad_input(x, indices, 3, 1)
    torch.testing.assert_close(back, x[[1, 2, 0]][:, None])
    back[0].sum().backward()
    assert x.grad is not None and x.grad.tolist() == [[0.0, 0.0], [1.0, 1.0], [0.0, 0.0]]


def test_unpad_with_bool_and_unused_masks() -> None:
    x = torch.arange(8.0).view(2, 4)
    mask = torch.tensor([[True, False, False, False], [True, True, False, False]])
    unused = torch.tensor([[False, True, False, False], [False, False, False, False]])
    rows, _, cu_seqlens, max_seqlen, seqused = unpad_input(x, mask, unused)
    assert rows.tolist() == [0.0, 1.0, 4.0, 5.0] and cu_seqlens.tolist() == [0, 2, 4]
    assert max_seqlen == 2 and seqused.tolist() == [1, 2]


def test_masks_that_overlap_or_hold_other_numbers_describe_the_rows_that_are_kept() -> None:
    """Lengths and indices come from one mask, so that cu_seqlens[-1] is the number of rows."""
    mask, unused = torch.tensor([[2, 1, 0], [1, 1, 0]]), torch.tensor([[1, 0, 1], [0, 0, 0]])
    rows, _, cu_seqlens, max_seqlen, seqused = unpad_input(torch.arange(6.0).view(2, 3), mask, unused)
    assert rows.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0] and cu_seqlens.tolist() == [0, 3, 5]
    assert max_seqlen == 3 and seqused.tolist() == [2, 2]


def test_empty_batch() -> None:
    rows, indices, cu_seqlens, max_seqlen, _ = unpad_input(torch.randn(0, 4, 2), torch.ones(0, 4))
    assert rows.shape == (0, 2) and indices.numel() == 0 and cu_seqlens.tolist() == [0] and max_seqlen == 0


def test_concatenated_sequences() -> None:
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    x = torch.randn(3, 6, 2)
    rows, indices, cu_seqlens, max_seqlen = unpad_input_for_concatenated_sequences(x, lengths)
    assert indices.tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 12, 13, 14, 15, 16, 17]
    assert cu_seqlens.tolist() == [0, 2, 5, 8, 10, 16] and cu_seqlens.dtype == torch.int32
    assert max_seqlen == 6
    torch.testing.assert_close(rows, x.flatten(0, 1)[indices])


def test_index_functions() -> None:
    x, indices = torch.randn(5, 2, 3), torch.tensor([4, 0, 2])
    rows = index_first_axis(x, indices)
    torch.testing.assert_close(rows, x[indices])
    again, residual = index_first_axis_residual(x, indices)
    torch.testing.assert_close(again, rows)
    assert residual is x
    put = index_put_first_axis(rows, indices, 5)
    torch.testing.assert_close(put[indices], rows)
    assert not put[[1, 3]].any()


def test_rearrange_can_be_imported_from_here() -> None:
    assert bert_padding.rearrange(torch.zeros(2, 3), "a b -> b a").shape == (3, 2)


def test_wrong_masks() -> None:
    with pytest.raises(
        ValueError, match=r"attention_mask must be \(batch, seqlen\) = \[2, 3\], got \[2, 4\]"
    ):
        unpad_input(torch.zeros(2, 3, 1), torch.ones(2, 4))
    with pytest.raises(ValueError, match=r"unused_mask must be \(batch, seqlen\) = \[2, 3\], got \[3\]"):
        unpad_input(torch.zeros(2, 3, 1), torch.ones(2, 3), torch.ones(3))
    with pytest.raises(ValueError, match=r"attention_mask_in_length must be \(batch, seqlen\)"):
        unpad_input_for_concatenated_sequences(torch.zeros(2, 3, 1), torch.ones(2, 4))
