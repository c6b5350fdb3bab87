"""Values between a pack and the caller's rows: dtypes, fills, empty batches and bad input."""

import re

import pytest
import torch

from flash_attn.shared_prompt import pack, pack_responses, pack_tokens, unpack, unpack_responses

IDS = torch.tensor([[1, 2], [3, 4]])
MASK = torch.tensor([[1, 1], [1, 0]])


@pytest.mark.parametrize(
    "dtype, value, fill",
    [
        (torch.int64, 2**53 + 1, -100),
        (torch.int32, 2**24 + 1, -1),
        (torch.uint8, 255, 7),
        (torch.bool, True, False),
        (torch.bfloat16, 1.5, 0.1),
        (torch.float64, 1 + 2**-40, float("nan")),
    ],
)
def test_the_dtype_of_the_values_is_kept(dtype, value, fill):
    packed, lists = pack(IDS, IDS, response_mask=MASK), pack([[1, 2], [1, 2]], [[5], []])
    whole = unpack(torch.full((packed.layout.num_rows,), value, dtype=dtype), packed, fill=fill)
    part = unpack_responses(torch.full((3,), value, dtype=dtype), packed, fill=fill)
    want = torch.full((2, 4), value, dtype=dtype)
    want[1, 3] = fill
    torch.testing.assert_close(whole, want, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(part, want[:, 2:], rtol=0, atol=0, equal_nan=True)
    rows = unpack(torch.full((lists.layout.num_rows,), value, dtype=dtype), lists)
    rows += unpack_responses(torch.full((1,), value, dtype=dtype), lists)
    for row, length in zip(rows, (3, 2, 1, 0), strict=True):
        assert torch.equal(row, torch.full((length,), value, dtype=dtype)) and row.dtype == dtype
    nothing = unpack_responses(torch.zeros(0, dtype=dtype), pack([[1]], [[]]))
    assert nothing[0].dtype == dtype


@pytest.mark.parametrize(
    "dtype, fill, error",
    [
        (torch.int64, 0.5, ValueError),
        (torch.int64, float("nan"), ValueError),
        (torch.uint8, -100, ValueError),
        (torch.bool, 2, ValueError),
        (torch.float16, 1e30, ValueError),
        (torch.float32, "0", TypeError),
    ],
)
def test_a_fill_that_the_dtype_cannot_hold_is_refused(dtype, fill, error):
    packed = pack([[1, 2]], [[5]])
    message = f"fill must be a value of {dtype} like values, got {fill}"
    with pytest.raises(error, match=re.escape(message if error is ValueError else "a number, got str")):
        unpack(torch.zeros(packed.layout.num_rows, dtype=dtype), packed, fill=fill)
    with pytest.raises(error, match="fill must be a"):
        unpack_responses(torch.zeros(1, dtype=dtype), packed, fill=fill)


def test_rows_of_different_dtypes_are_promoted():
    packed = pack([[1], [1], [1]], [[], [5], [6]])
    big = 2**24 + 1
    ints = pack_responses([[], [big], [big]], packed)
    assert ints.dtype == torch.int64 and ints.tolist() == [big, big]
    assert pack_responses([[], [1], [0.5]], packed).tolist() == [1.0, 0.5]
    assert pack_tokens([[1], [1, 2], [1, 0.5]], packed).tolist()[-1] == 0.5


@pytest.mark.parametrize("capacities", [{}, dict(max_segments=3, max_total=4)])
def test_an_empty_batch_of_lists(capacities):
    empty = pack([], [], **capacities)
    size = empty.layout.num_rows
    assert torch.equal(pack_responses([], empty), torch.zeros(size))
    assert torch.equal(pack_tokens([], empty), torch.zeros(size))
    assert torch.equal(pack_tokens(torch.zeros(0, 0, 2), empty), torch.zeros(size, 2))
    assert unpack(torch.zeros(size), empty) == [] == unpack_responses(torch.zeros(size), empty)


def test_tensors_for_a_batch_of_lists_must_fit_its_longest_row():
    packed = pack([[1, 2], [1, 2]], [[3], [4, 5]])
    values = torch.tensor([[10, 20, 30, 0], [10, 20, 40, 50]])
    assert pack_tokens(values, packed).tolist() == [10, 20, 30, 20, 40, 50]
    assert pack_responses(values[:, 2:], packed).tolist() == [30, 40, 50]
    for width in (3, 5):
        message = f"values must be (num_rows, longest row, ...) = (2, 4) first, got [2, {width}]"
        with pytest.raises(ValueError, match=re.escape(message)):
            pack_tokens(torch.zeros(2, width), packed)
    with pytest.raises(ValueError, match=re.escape("= (2, 2) first, got [2, 3]")):
        pack_responses(torch.zeros(2, 3), packed)


def test_values_of_another_kind_are_refused():
    padded, lists = pack(IDS, IDS), pack([[1, 2]], [[3]])
    for function in (unpack, unpack_responses, pack_tokens, pack_responses):
        with pytest.raises(TypeError, match="values must be a tensor here, got list"):
            function([[0.0]], padded)
    for function in (pack_tokens, pack_responses):
        with pytest.raises(TypeError, match="values must be a tensor or one sequence per row, got NoneType"):
            function(None, lists)
        with pytest.raises(ValueError, match=r"one value per token of each row \[\d\], got \[None\]"):
            function([1.0], lists)


def test_compiled_with_dynamic_shapes():
    packed = pack(IDS, IDS)
    grid = torch.arange(IDS.shape[0] * 2 * IDS.shape[1]).view(len(IDS), -1).float()

    def there_and_back(values):
        rows = unpack(pack_tokens(values, packed), packed, fill=-1.0)
        return rows, unpack_responses(pack_responses(values[:, IDS.shape[1] :], packed), packed)

    torch._dynamo.reset()
    compiled = torch.compile(there_and_back, fullgraph=True, dynamic=True, backend="eager")
    assert all(torch.equal(*pair) for pair in zip(compiled(grid), there_and_back(grid), strict=True))
