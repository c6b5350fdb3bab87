"""log_probs against its PyTorch twin: values, every gradient, and bad input."""

import importlib
import re

import pytest
import torch
import torch._dynamo.testing

from flash_attn.shared_prompt import SharedPromptLayout, log_probs, pack, unpack_responses

# Not `import ... as`: the package's attribute of this name is the function.
MODULE = importlib.import_module("flash_attn.shared_prompt.log_probs")
CHECKS = importlib.import_module("flash_attn.shared_prompt._log_probs_checks")
VOCAB, SIZE = 23, 5
BOUNDARIES = ["fork", "shared"]


def twin(
    hidden,
    labels,
    weight=None,
    bias=None,
    *,
    pred_index=None,
    temperature=1.0,
    softcap=None,
    ignore_index=-100,
    compute_entropy=True,
):
    """The same function on whole logits."""
    if not isinstance(labels, torch.Tensor):
        labels, pred_index = labels.labels, labels.pred_index
    rows = hidden.reshape(-1, hidden.shape[-1])
    logits = rows if weight is None else torch.nn.functional.linear(rows.to(weight.dtype), weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = logits if pred_index is None else logits[pred_index]
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    if isinstance(temperature, torch.Tensor):
        temperature = temperature.reshape(-1, 1)
    log_p = torch.log_softmax(logits / temperature, -1)
    flat = labels.reshape(-1)
    valid = flat != ignore_index
    values = log_p.gather(1, flat.where(valid, 0)[:, None])[:, 0].where(valid, 0.0)
    entropy = -(log_p.exp() * log_p.where(log_p > -torch.inf, 0)).sum(-1).where(valid, 0.0)
    return values.view(labels.shape), entropy.view(labels.shape) if compute_entropy else None


def inputs(num_rows=11, dtype=torch.float64, bias=True, seed=0):
    torch.manual_seed(seed)
    hidden = torch.randn(num_rows, SIZE, dtype=dtype, requires_grad=True)
    weight = torch.randn(VOCAB, SIZE, dtype=dtype, requires_grad=True)
    head_bias = torch.randn(VOCAB, dtype=dtype, requires_grad=True) if bias else None
    return hidden, weight, head_bias


def compare(hidden, labels, weight=None, bias=None, rtol=1e-12, **options):
    """Values and the gradients of everything that requires one, with random weights on both results."""
    tensors = [t for t in (hidden, weight, bias) if t is not None and t.requires_grad]
    twin_options = {k: v for k, v in options.items() if k != "tile_elements"}
    results = []
    for function, kwargs in ((log_probs, options), (twin, twin_options)):
        values, entropy = function(hidden, labels, weight, bias, **kwargs)
        torch.manual_seed(1)
        loss = (values * torch.randn_like(values)).sum()
        loss = loss + (entropy * torch.randn_like(entropy)).sum()
        results.append([values, entropy, *torch.autograd.grad(loss, tensors)])
    for ours, reference in zip(*results, strict=True):
        assert ours.dtype == reference.dtype and ours.shape == reference.shape
        torch.testing.assert_close(ours, reference, rtol=rtol, atol=rtol)
    return results[0]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("tile_elements", [1, 7, 64, 2**25])
def test_equals_the_twin_whatever_the_tiles(tile_elements, temperature, softcap, bias, monkeypatch):
    monkeypatch.setattr(MODULE, "MAX_TILE_ROWS", 4)  # several row blocks too
    hidden, weight, head_bias = inputs(bias=bias)
    labels = torch.randint(0, VOCAB, (11,))
    labels[[2, 7]] = -100
    compare(
        hidden,
        labels,
        weight,
        head_bias,
        temperature=temperature,
        softcap=softcap,
        tile_elements=tile_elements,
    )


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logits_instead_of_hidden_states(temperature, softcap):
    logits = torch.randn(9, VOCAB, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, VOCAB, (9,))
    before = logits.detach().clone()
    options = dict(temperature=temperature, softcap=softcap, tile_elements=40)
    first = compare(logits, labels, **options)
    second = compare(logits, labels, **options)
    assert torch.equal(logits, before)  # nothing in place: a second call sees the same logits
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    compare(logits, torch.randint(0, VOCAB, (14,)), pred_index=torch.randint(0, 9, (14,)), **options)


def test_gradcheck():
    hidden, weight, bias = inputs(num_rows=4)
    labels = torch.tensor([3, -100, 0, 22])
    options = dict(temperature=0.7, softcap=3.0, tile_elements=30)
    assert torch.autograd.gradcheck(
        lambda h, w, b: log_probs(h, labels, w, b, **options), (hidden, weight, bias)
    )


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_every_response_token_of_a_pack(boundary):
    prompts, responses = [[1, 2, 3], [4], [1, 2, 3], [1, 2, 3]], [[5, 6], [7, 8, 9], [], [10]]
    packed = pack(prompts, responses, boundary=boundary, loss_mask=[[1, 1], [1, 0, 1], [], [1]])
    hidden, weight, bias = inputs(packed.layout.num_rows)
    compare(hidden[None], packed, weight, bias, tile_elements=50)
    # The values belong to the caller's tokens: logits that depend on the predicting token alone.
    table = torch.randn(12, VOCAB)
    values, _ = log_probs(table[packed.input_ids[0]], packed)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        previous = [*prompt, *response][len(prompt) - 1 : -1]
        want = torch.log_softmax(table[previous], -1)[range(len(response)), response]
        want[packed.labels[packed.grid_to_response[row, : len(response)]] == -100] = 0.0
        torch.testing.assert_close(unpack_responses(values, packed)[row], want)


def test_repeated_rows_add_up_in_fp32():
    """The last prompt row of the shared boundary receives the gradients of all responses' first tokens."""
    layout = SharedPromptLayout.from_lengths([1], [[1] * 512], boundary="shared")
    hidden, weight, _ = (
        None if t is None else t.detach().bfloat16() for t in inputs(layout.num_rows, bias=False)
    )
    hidden.requires_grad_()
    labels = torch.zeros(512, dtype=torch.int64)
    options = dict(pred_index=layout.pred_index, tile_elements=4)  # in 128 blocks of rows
    log_probs(hidden, labels, weight, **options).log_probs.sum().backward()
    exact = hidden.detach().double().requires_grad_()
    twin(exact, labels, weight.double(), pred_index=layout.pred_index)[0].sum().backward()
    assert (hidden.grad - exact.grad).norm() < 0.008 * exact.grad.norm()


def test_half_precision_is_cast_before_the_softmax():
    hidden, weight, bias = (t.detach().bfloat16().requires_grad_() for t in inputs(num_rows=64))
    labels = torch.randint(0, VOCAB, (64,))
    values, entropy = log_probs(hidden, labels, weight, bias, tile_elements=100)
    assert values.dtype == entropy.dtype == torch.float32
    reference, reference_entropy = twin(hidden, labels, weight, bias)
    # The logits are bf16, nothing behind them is.
    torch.testing.assert_close(values, reference, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(entropy, reference_entropy, rtol=1e-5, atol=1e-5)
    (values.sum() + entropy.sum()).backward()
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight, bias)]
    sum(t.sum() for t in twin(exact[0], labels, *exact[1:])).backward()
    for ours, true in zip((hidden, weight, bias), exact, strict=True):
        assert ours.grad.dtype == torch.bfloat16
        assert (ours.grad - true.grad).norm() < 0.02 * true.grad.norm()


def test_a_wider_head_is_used_in_its_own_precision():
    hidden, weight, _ = inputs(num_rows=6, dtype=torch.float32, bias=False)
    labels = torch.randint(0, VOCAB, (6,))
    compare(hidden.detach().bfloat16().requires_grad_(), labels, weight, rtol=1e-2)
    with pytest.raises(
        TypeError, match=re.escape("weight must be torch.float32 like hidden, or wider, got torch.bf")
    ):
        log_probs(hidden, labels, weight.bfloat16())


@pytest.mark.parametrize("trained", [(True, False, False), (False, True, False), (False, False, True)])
def test_frozen_parts_get_no_gradient(trained):
    tensors = [t.requires_grad_(on) for t, on in zip(inputs(), trained, strict=True)]
    labels = torch.randint(0, VOCAB, (11,))
    compare(tensors[0], labels, *tensors[1:], tile_elements=60)
    log_probs(tensors[0], labels, *tensors[1:]).log_probs.sum().backward()
    assert [t.grad is not None for t in tensors] == list(trained)


def test_entropy_can_be_left_out_and_carries_its_own_gradient():
    hidden, weight, bias = inputs()
    labels = torch.randint(0, VOCAB, (11,))
    values, entropy = log_probs(hidden, labels, weight, bias, compute_entropy=False)
    assert entropy is None
    torch.testing.assert_close(values, twin(hidden, labels, weight, bias)[0])
    for pick in (0, 1):  # a bonus on the entropy alone, a loss on the log-probs alone
        ours = torch.autograd.grad(
            log_probs(hidden, labels, weight, bias)[pick].sum(), [hidden, weight, bias]
        )
        want = torch.autograd.grad(twin(hidden, labels, weight, bias)[pick].sum(), [hidden, weight, bias])
        for a, b in zip(ours, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_ignored_labels_give_exact_zeros_even_over_junk():
    hidden, weight, bias = inputs()
    labels = torch.randint(0, VOCAB, (11,))
    labels[3:] = -100
    junk = hidden.detach().clone()
    junk[3:] = float("nan")
    junk.requires_grad_()
    values, entropy = log_probs(junk, labels, weight, bias)
    assert not values[3:].any() and not entropy[3:].any()
    values.sum().backward()
    assert not junk.grad[3:].any() and weight.grad.isfinite().all() and junk.grad[:3].all()
    logits = torch.full((2, VOCAB), float("nan"), requires_grad=True)
    log_probs(logits, torch.tensor([-100, -100])).log_probs.sum().backward()
    assert not logits.grad.any()
    other = log_probs(hidden, labels.where(labels != -100, 0), weight, bias, ignore_index=0)
    assert torch.equal(other.log_probs[3:], torch.zeros(8, dtype=torch.float64))


def test_no_labels_at_all():
    hidden, weight, bias = inputs(num_rows=4)
    packed = pack([[1, 2], [1, 2]], [[], []])
    values, entropy = log_probs(hidden[: packed.layout.num_rows], packed, weight, bias)
    assert values.shape == entropy.shape == (0,)
    (values.sum() + entropy.sum()).backward()
    assert not hidden.grad.any() and not weight.grad.any() and not bias.grad.any()


def test_minus_infinity_has_probability_zero():
    logits = torch.randn(4, VOCAB, dtype=torch.float64)
    logits[:, 1::2] = -torch.inf
    logits.requires_grad_()
    labels = torch.tensor([0, 2, 4, 6])
    values, entropy = log_probs(logits, labels, temperature=0.5, tile_elements=12)
    torch.testing.assert_close(values, twin(logits, labels, temperature=0.5)[0])
    kept = torch.log_softmax(logits[:, ::2] / 0.5, -1)
    torch.testing.assert_close(entropy, -(kept.exp() * kept).sum(-1))
    (values.sum() + 1e6 * entropy.sum()).backward()
    assert logits.grad.isfinite().all() and not logits.grad[:, 1::2].any() and logits.grad[:, ::2].any()
    assert log_probs(logits, labels + 1).log_probs.tolist() == [-torch.inf] * 4


def test_large_logits_keep_their_entropy():
    logits = torch.randn(8, VOCAB) + 3e4
    labels = torch.zeros(8, dtype=torch.int64)
    exact = twin(logits.double(), labels)
    values, entropy = log_probs(logits, labels, tile_elements=40)
    torch.testing.assert_close(entropy.double(), exact[1], rtol=1e-5, atol=1e-5)
    # In float32, lse = 30003.1 would round them off.
    torch.testing.assert_close(values.double(), exact[0], rtol=1e-6, atol=1e-6)


def test_one_temperature_per_label():
    hidden, weight, bias = inputs()
    compare(
        hidden,
        torch.randint(0, VOCAB, (11,)),
        weight,
        bias,
        temperature=torch.rand(11) + 0.3,
        tile_elements=40,
    )


def test_same_weights_give_a_ratio_of_one():
    """The no-grad pass and the training pass take the same code path: exp(new - old) is exactly 1."""
    hidden, weight, bias = inputs(dtype=torch.float32)
    packed = pack([[1, 2], [1, 2]], [[3, 4, 5, 6], [7, 8, 9, 1]])
    with torch.no_grad():
        old = log_probs(hidden, packed, weight, bias).log_probs
    new = log_probs(hidden, packed, weight, bias).log_probs
    assert new.requires_grad and torch.equal((new - old).exp(), torch.ones_like(old))


def test_borders_of_the_pack_carry_no_loss():
    """Making the first token of the next response impossible changes nothing: nobody predicts it across the
    border.
    """
    packed = pack([[1, 2], [1, 2], [3]], [[4], [5], [6]])
    hidden, weight, _ = inputs(packed.layout.num_rows, bias=False)
    bias = torch.zeros(VOCAB, dtype=torch.float64)
    for token, others in ((5, [0, 2]), (6, [0, 1])):
        impossible = bias.index_fill(0, torch.tensor([token]), -1e4)
        before, after = (log_probs(hidden, packed, weight, b).log_probs[others] for b in (bias, impossible))
        assert (after >= before).all() and (after > -100).all()


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_the_gradient_does_not_depend_on_the_micro_batches(boundary):
    """12 rows as 1, 2, 3 and 6 micro-batches of uneven size, one without a loss token: sum over tokens /
    global count.
    """
    torch.manual_seed(0)
    prompts = [[1, 2, 3]] * 4 + [[4, 5]] * 4 + [[6]] * 4
    responses = [torch.randint(0, 9, (n,)).tolist() for n in (3, 0, 5, 1, 2, 2, 0, 7, 0, 0, 4, 1)]
    order = [9, 8, 0, 1, 2, 3, 4, 5, 6, 7, 10, 11]
    table, num_tokens = torch.randn(10, VOCAB, dtype=torch.float64), sum(map(len, responses))
    gradients = []
    for cuts in ([12], [5, 7], [2, 1, 9], [2, 2, 2, 2, 2, 2]):
        total, begin = torch.zeros(10, VOCAB, dtype=torch.float64, requires_grad=True), 0
        for size in cuts:
            rows = order[begin : begin + size]
            packed = pack([prompts[r] for r in rows], [responses[r] for r in rows], boundary=boundary)
            logits = (table + total)[packed.input_ids[0]]
            (log_probs(logits, packed).log_probs.sum() / num_tokens).backward()
            begin += size
        gradients.append(total.grad)
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0], rtol=1e-12, atol=1e-14)


def test_weights_of_zero_give_gradients_of_exactly_zero():
    packed = pack([[1, 2], [1, 2]], [[3, 4], [5]], boundary="shared")
    hidden, weight, bias = inputs(packed.layout.num_rows)
    values, entropy = log_probs(hidden, packed, weight, bias)
    (0 * values + 0 * entropy).sum().backward()
    assert not hidden.grad.any() and not weight.grad.any() and not bias.grad.any()


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_other_micro_batches_give_the_same_ratio(boundary):
    """Old log-probs from one pack, new ones row by row, in bf16: the ratio stays within 1 % of 1."""
    torch.manual_seed(3)
    prompts = [[1, 2]] * 5
    responses = [torch.randint(0, VOCAB, (n,)).tolist() for n in (4, 1, 7, 2, 3)]
    table, weight = torch.randn(VOCAB, SIZE).bfloat16(), torch.randn(VOCAB, SIZE).bfloat16()
    packed = pack(prompts, responses, boundary=boundary)
    old = unpack_responses(log_probs(table[packed.input_ids[0]], packed, weight).log_probs, packed)
    for row in range(5):
        single = pack(prompts[:1], responses[row : row + 1], boundary=boundary)
        new = log_probs(table[single.input_ids[0]], single, weight).log_probs
        assert ((new - old[row]).exp() - 1).abs().max() < 1e-2


def test_autocast_uses_its_dtype_in_both_directions():
    hidden, weight, bias = inputs(dtype=torch.float32)
    labels = torch.randint(0, VOCAB, (11,))
    with torch.autocast("cpu", torch.bfloat16):
        values, entropy = log_probs(hidden, labels, weight, bias)
    want = log_probs(hidden.bfloat16(), labels, weight.bfloat16(), bias.bfloat16())
    assert torch.equal(values, want.log_probs) and torch.equal(entropy, want.entropy)
    values.sum().backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.float32


def test_compiles_without_graph_breaks():
    hidden, weight, bias = inputs(dtype=torch.float32)
    labels = torch.randint(0, VOCAB, (11,))
    torch._dynamo.reset()
    compiled = torch.compile(log_probs, backend="aot_eager", fullgraph=True)
    options = dict(temperature=0.7, softcap=4.0, tile_elements=128)
    results = []
    for function in (compiled, log_probs):
        values, entropy = function(hidden, labels, weight, bias, **options)
        gradients = torch.autograd.grad(values.sum() + entropy.sum(), [hidden, weight, bias])
        results.append([values, entropy, *gradients])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_wrong_labels_that_cannot_be_read_give_nan(monkeypatch):
    monkeypatch.setattr(CHECKS, "values_are_read", lambda tensor: False)  # as on a GPU
    hidden, weight, bias = inputs(num_rows=3)
    values = log_probs(hidden, torch.tensor([1, VOCAB, -1]), weight, bias).log_probs
    assert values.isnan().tolist() == [False, True, True]


H, W, Y = torch.zeros(3, SIZE), torch.zeros(VOCAB, SIZE), torch.zeros(3, dtype=torch.int64)


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (dict(hidden=H[0]), ValueError, "hidden must be (num_rows, size) or (1, num_rows, size), got [5]"),
        (dict(hidden=H.view(3, 1, SIZE)), ValueError, "(1, num_rows, size), got [3, 1, 5]"),
        (dict(hidden=Y[:, None]), TypeError, "hidden must be floating point, got torch.int64"),
        (dict(weight=W.t()), ValueError, "weight must be (vocab_size, 5), got [5, 23]"),
        (dict(bias=W[0]), ValueError, "bias must be (23,) torch.float32, got [5] torch.float32"),
        (dict(weight=None, bias=W[:, 0]), ValueError, "bias must come with weight, got weight=None"),
        (dict(labels=Y.int()), TypeError, "labels must be int64, got torch.int32"),
        (dict(labels=Y[:2]), ValueError, "labels must be (3,), got [2]"),
        (dict(labels=Y + VOCAB), ValueError, "labels must be in [0, 23) or -100, got 23"),
        (dict(labels=Y - 1), ValueError, "labels must be in [0, 23) or -100, got -1"),
        (dict(pred_index=Y.int()), ValueError, "pred_index must be (n,) int64, got [3] torch.int32"),
        (dict(pred_index=Y + 3), ValueError, "pred_index must be in [0, 3), got 3"),
        (dict(labels=Y.to("meta")), ValueError, "labels must be on cpu like hidden, got meta"),
        (dict(temperature=0.0), ValueError, "temperature must be > 0, got 0.0"),
        (dict(temperature=-1), ValueError, "temperature must be > 0, got -1"),
        (dict(temperature=float("nan")), ValueError, "temperature must be > 0, got nan"),
        (dict(temperature=torch.tensor([1.0, 0.0, 1.0])), ValueError, "temperature must be > 0, got 0.0"),
        (
            dict(temperature=torch.ones(2)),
            ValueError,
            "a number or one per label (3,) on cpu, got [2] on cpu",
        ),
        (
            dict(temperature=torch.ones(3, requires_grad=True)),
            NotImplementedError,
            "temperature has no gradient here",
        ),
        (dict(softcap=0.0), ValueError, "softcap must be > 0 and finite, or None, got 0.0"),
        (dict(tile_elements=0), ValueError, "tile_elements must be at least 1, got 0"),
    ],
)
def test_bad_arguments_are_refused(arguments, error, message):
    with pytest.raises(error, match=re.escape(message)):
        log_probs(**(dict(hidden=H, labels=Y, weight=W) | arguments))


def test_a_pack_brings_its_own_index_and_sharded_heads_are_refused():
    with pytest.raises(ValueError, match="pred_index must not be given with a PackedBatch"):
        log_probs(H, pack([[1]], [[1]]), W, pred_index=Y)

    class Sharded(torch.Tensor):
        def full_tensor(self):
            return self

    with pytest.raises(NotImplementedError, match=re.escape("weight must be a plain tensor, got DTensor")):
        log_probs(H, Y, W.as_subclass(Sharded))
