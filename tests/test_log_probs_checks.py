"""log_probs refuses wrong kinds, shapes and options with a message, and keeps to the twin at the borders."""

import re
from fractions import Fraction

import numpy as np
import pytest
import torch

from flash_attn.shared_prompt import log_probs, pack

SIZE, VOCAB = 5, 23
H, W, Y = torch.zeros(3, SIZE), torch.zeros(VOCAB, SIZE), torch.zeros(3, dtype=torch.int64)


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (dict(hidden=H.numpy()), TypeError, "hidden must be a tensor, got ndarray"),
        (dict(weight=W.numpy()), TypeError, "weight must be a tensor or None, got ndarray"),
        (dict(bias=[0.0] * VOCAB), TypeError, "bias must be a tensor or None, got list"),
        (dict(labels=[0, 0, 0]), TypeError, "labels must be a tensor or a PackedBatch, got list"),
        (dict(pred_index=[0, 1, 2]), TypeError, "pred_index must be a tensor or None, got list"),
        (dict(ignore_index=None), TypeError, "ignore_index must be an int, got NoneType"),
        (dict(ignore_index=2**70), ValueError, "ignore_index must be an int of 64 bits, got 1180591620"),
        (dict(tile_elements=2.0), TypeError, "tile_elements must be an int, got float"),
        (dict(temperature="1"), TypeError, "temperature must be a number or a tensor, got str '1'"),
        (dict(temperature=None), TypeError, "temperature must be a number or a tensor, got NoneType None"),
        (dict(temperature=torch.ones(3, 1)), ValueError, "one per label (3,) on cpu, got [3, 1] on cpu"),
        (dict(softcap="1"), TypeError, "softcap must be a number or None, got str '1'"),
        (dict(softcap=float("inf")), ValueError, "softcap must be > 0 and finite, or None, got inf"),
        (dict(softcap=float("nan")), ValueError, "softcap must be > 0 and finite, or None, got nan"),
        (
            dict(temperature=1e-40),
            ValueError,
            "temperature must be in [1.18e-38, 3.4e+38] (torch.float32), got 1e-40",
        ),
        (dict(temperature=float("inf")), ValueError, "(torch.float32), got inf"),
        (dict(temperature=10**400), ValueError, "(torch.float32), got 1000"),
        (dict(temperature=Fraction(10**400)), ValueError, "temperature must be finite, got 1000"),
        (
            dict(temperature=torch.tensor([1, 1e-60, 1], dtype=torch.float64)),
            ValueError,
            "temperature must be in [1.18e-38, 3.4e+38] (torch.float32), got 1e-60",
        ),
        (dict(temperature=torch.tensor([1, torch.inf, 1])), ValueError, "(torch.float32), got inf"),
        (
            dict(softcap=1e300),
            ValueError,
            "softcap must be in [1.18e-38, 3.4e+38] (torch.float32), got 1e+300",
        ),
        (dict(softcap=10**400), ValueError, "(torch.float32), got 1000"),
        (
            dict(hidden=H[:, :0], weight=None),
            ValueError,
            "the vocabulary must have at least one token, got 0",
        ),
        (dict(weight=W[:0]), ValueError, "the vocabulary must have at least one token, got 0 logits per row"),
    ],
)
def test_bad_arguments_are_refused(arguments, error, message):
    with pytest.raises(error, match=re.escape(message)):
        log_probs(**(dict(hidden=H, labels=Y, weight=W) | arguments))


def test_a_second_derivative_is_refused():
    hidden = torch.randn(3, SIZE, requires_grad=True)
    values, entropy = log_probs(hidden, Y, W)
    for result in (values, entropy):
        with pytest.raises(NotImplementedError, match=r"log_probs: double backward .* is not supported"):
            torch.autograd.grad(result.sum(), hidden, create_graph=True, retain_graph=True)


def test_options_of_doubles_may_be_beyond_floats():
    logits, labels = 1e-60 * torch.randn(3, VOCAB, dtype=torch.float64), torch.tensor([1, 2, 3])
    want = (logits / 1e-60).log_softmax(-1).gather(1, labels[:, None])[:, 0]
    for temperature in (1e-60, torch.full((3,), 1e-60, dtype=torch.float64)):
        found = log_probs(logits, labels, temperature=temperature, softcap=10**100).log_probs
        torch.testing.assert_close(found, want)


def test_one_temperature_per_label_in_their_shape_or_flat():
    labels, temperature = torch.tensor([[1, 2, 3, 4]]), torch.tensor([0.5, 1.0, 2.0, 3.0])
    logits = torch.randn(1, 4, VOCAB)
    want = torch.log_softmax(logits[0] / temperature[:, None], -1).gather(1, labels.T).T
    for shape in (4, (1, 4)):
        values, _ = log_probs(logits, labels, temperature=temperature.view(shape))
        torch.testing.assert_close(values, want)
    with pytest.raises(ValueError, match=re.escape("one per label (1, 4) on cpu, got [2, 2] on cpu")):
        log_probs(logits, labels, temperature=temperature.view(2, 2))


def test_numbers_of_numpy_are_numbers():
    logits, labels = torch.randn(3, VOCAB), Y
    ours = log_probs(logits, labels, temperature=np.float32(0.5), softcap=np.float32(2.0)).log_probs
    assert torch.equal(ours, log_probs(logits, labels, temperature=0.5, softcap=2.0).log_probs)


@pytest.mark.parametrize("capacities, rows", [({}, 3), (dict(max_segments=2, max_total=7), 7)])
def test_hidden_must_have_the_rows_of_the_pack(capacities, rows):
    packed = pack([[1, 2]], [[5]], **capacities)
    assert packed.layout.num_rows == rows
    for shape in ((rows + 1, SIZE), (1, rows - 1, SIZE)):
        message = f"hidden must have the {rows} rows of the pack (layout.num_rows), got {list(shape)}"
        with pytest.raises(ValueError, match=re.escape(message)):
            log_probs(torch.zeros(shape), packed, W)
    for shape in ((rows, SIZE), (1, rows, SIZE)):
        assert log_probs(torch.zeros(shape), packed, W).log_probs.shape == packed.labels.shape
    with pytest.raises(TypeError, match="hidden must be a tensor, got ndarray"):
        log_probs(np.zeros((rows, SIZE)), packed, W)


@pytest.mark.parametrize("tile_elements", [4, 2**25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_of_the_lowest_logits_is_flat(dtype, tile_elements):
    lowest = torch.finfo(dtype).min
    logits = torch.full((3, VOCAB), lowest, dtype=dtype)
    logits[1, 4] = 0.0
    logits[2, 0] = -torch.inf
    logits.requires_grad_()
    values, entropy = log_probs(logits, Y, tile_elements=tile_elements)
    uniform = -torch.tensor(VOCAB, dtype=dtype).log()
    torch.testing.assert_close(values[0], uniform)
    torch.testing.assert_close(entropy[0], -uniform)
    assert values[1] == lowest and values[2] == -torch.inf  # impossible as far as the dtype can say
    (gradient,) = torch.autograd.grad(values[0], logits)
    want = torch.full((VOCAB,), -1 / VOCAB, dtype=dtype)
    want[0] += 1
    torch.testing.assert_close(gradient[0], want)
