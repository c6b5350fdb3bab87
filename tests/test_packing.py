"""Packing against plain Python: every map between the caller's grid and the pack, and bad input.

The oracle is the list of replicated rows with their masked tokens left out; no function of the package takes
part in it.
"""

import random
import warnings

import numpy as np
import pytest
import torch

from flash_attn import flash_attn_shared_prompt_func
from flash_attn.shared_prompt import (
    log_probs,
    pack,
    pack_responses,
    pack_tokens,
    unpack,
    unpack_responses,
)

BOUNDARIES = ["fork", "shared"]


class Batch:
    """A random padded batch whose prompts repeat, with holes in its masks, and the same rows as lists of kept
    tokens.
    """

    def __init__(self, seed, holes=True, num_prompts=3, num_rows=7, prompt_width=6, response_width=5):
        rng = random.Random(seed)
        self.prompt_width = prompt_width
        pool = [
            [rng.randint(0, 2) for _ in range(rng.randint(1, prompt_width - 1))] for _ in range(num_prompts)
        ]
        self.prompts, self.responses = [], []
        self.ids = torch.zeros(num_rows, prompt_width + response_width, dtype=torch.int64)
        self.mask = torch.zeros_like(self.ids)
        for row in range(num_rows):
            prompt = rng.choice(pool)
            response = [
                rng.randint(0, 9) for _ in range(rng.choice([0, 0, 1, response_width, rng.randint(0, 4)]))
            ]
            self.prompts.append(prompt)
            self.responses.append(response)
            columns = range(prompt_width - len(prompt), prompt_width)  # left-padded, right-padded
            if holes:
                columns = sorted(rng.sample(range(prompt_width), len(prompt)))
            self.set(row, columns, prompt)
            columns = range(len(response))
            if holes:
                columns = sorted(rng.sample(range(response_width), len(response)))
            self.set(row, [prompt_width + c for c in columns], response)
        # Padding may hold anything.
        self.ids[self.mask == 0] = torch.randint(0, 10, (int((self.mask == 0).sum()),))

    def set(self, row, columns, ids):
        for column, token in zip(columns, ids, strict=True):
            self.ids[row, column], self.mask[row, column] = token, 1

    def pack(self, **options):
        p = self.prompt_width
        return pack(
            self.ids[:, :p],
            self.ids[:, p:],
            prompt_mask=self.mask[:, :p],
            response_mask=self.mask[:, p:],
            **options,
        )

    def row(self, row):
        return self.prompts[row] + self.responses[row]


def replicated(packed, row):
    """Ids and positions of a caller's row, read back through the segment table of the layout: what attention
    sees.
    """
    (p, r), index = packed.row_lens[row], packed.grid_to_packed[row]
    last = int(index[index >= 0][-1]) if r or p else -1
    for q0, q1, c0, c1, k0, k1 in packed.layout.segments.tolist():
        if q0 <= last < q1:
            rows = [*range(c0, c1), *range(k0, k1)][: p + r]
            return packed.input_ids[0, rows].tolist(), packed.position_ids[..., 0, rows].tolist()
    raise AssertionError("row lies in no segment")


@pytest.mark.parametrize("longest_common_prefix", [False, True])
@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("seed", range(20))
def test_a_pack_holds_every_row_and_unpacks_to_the_callers_grid(seed, boundary, longest_common_prefix):
    batch = Batch(seed)
    packed = batch.pack(boundary=boundary, longest_common_prefix=longest_common_prefix)
    assert sorted(r for rows in packed.rows for r in rows) == list(range(len(batch.ids)))
    for row in range(len(batch.ids)):
        assert replicated(packed, row) == (batch.row(row), list(range(len(batch.row(row)))))
    ids = unpack(packed.input_ids[0], packed, fill=-1)
    assert torch.equal(ids, batch.ids.where(batch.mask == 1, -1))
    assert torch.equal(unpack_responses(packed.labels, packed, fill=-1), ids[:, batch.prompt_width :])
    assert torch.equal(pack_tokens(batch.ids, packed), packed.input_ids[0])
    # Any per-token tensor of the caller comes back as it was, with extra dimensions and with gradients.
    values = torch.randn(*batch.ids[:, batch.prompt_width :].shape, 2, requires_grad=True)
    back = unpack_responses(pack_responses(values, packed), packed, fill=7.0)
    kept = (batch.mask[:, batch.prompt_width :] == 1)[..., None].expand(values.shape)
    assert torch.equal(back, values.where(kept, 7.0))
    (grad,) = torch.autograd.grad(back.sum(), values)
    assert torch.equal(grad, kept.float())


@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("seed", range(20))
def test_labels_are_the_next_tokens_of_the_same_row(seed, boundary):
    batch = Batch(100 + seed)
    packed = batch.pack(boundary=boundary)
    want = [token for rows in packed.rows for r in rows for token in batch.responses[r]]
    assert packed.labels.tolist() == want
    previous = [t for rows in packed.rows for r in rows for t in batch.row(r)[len(batch.prompts[r]) - 1 : -1]]
    assert packed.input_ids[0, packed.pred_index].tolist() == previous
    if boundary == "fork":
        shifted = packed.shift_labels[0]
        assert (shifted[packed.pred_index] == packed.labels).all()
        # No row at a border predicts the next response's first token.
        assert int((shifted != -100).sum()) == len(want)
    else:
        with pytest.raises(ValueError, match=r'shift_labels must be read with boundary "fork", got "shared"'):
            _ = packed.shift_labels


@pytest.mark.parametrize("longest_common_prefix", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_loss_on_the_prompt_counts_each_stored_token_once(seed, longest_common_prefix):
    batch = Batch(200 + seed)
    packed = batch.pack(loss_on_prompt=True, longest_common_prefix=longest_common_prefix)
    for row in range(len(batch.ids)):
        index = packed.grid_to_packed[row][packed.grid_to_packed[row] >= 0]
        want = batch.row(row)
        # The last prompt token has its own fork row, so its prediction comes from the context's last row.
        assert packed.shift_labels[0, index[:-1]].tolist() == want[1:]
    total = packed.layout.multiplicity[packed.shift_labels[0] != -100].sum()
    assert total == sum(len(batch.row(row)) - 1 for row in range(len(batch.ids)))


def test_loss_mask_takes_attended_tokens_out_of_the_labels():
    prompts, responses = torch.tensor([[1, 2], [1, 2]]), torch.tensor([[3, 4, 5], [6, -100, 8]])
    loss_mask, response_mask = torch.tensor([[1, 0, 1], [1, 1, 1]]), torch.tensor([[1, 1, 1], [1, 0, 1]])
    packed = pack(prompts, responses, response_mask=response_mask, loss_mask=loss_mask)
    assert packed.labels.tolist() == [3, -100, 5, 6, 8]
    assert packed.input_ids.tolist() == [[1, 2, 3, 4, 5, 2, 6, 8]]
    assert packed.shift_labels.tolist() == [[-100, 3, -100, 5, -100, 6, 8, -100]]
    for flags in ([[1, 0, 1], [1, 1]], [[True, False, True], np.array([True, True])]):
        lists = pack([[1, 2], [1, 2]], [[3, 4, 5], [6, 8]], loss_mask=flags)
        assert lists.labels.tolist() == packed.labels.tolist()
    lists = pack([[1, 2]] * 2, responses.tolist(), response_mask=response_mask.bool().numpy())
    assert lists.labels.tolist() == [3, 4, 5, 6, 8]


@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("seed", range(5))
def test_lists_padding_and_row_order_give_the_same_rows(seed, boundary):
    batch = Batch(300 + seed)
    from_lists = pack(
        batch.prompts, [torch.tensor(r, dtype=torch.int32) for r in batch.responses], boundary=boundary
    )
    padded = batch.pack(boundary=boundary)
    for name in ("input_ids", "position_ids", "labels", "pred_index"):
        assert torch.equal(getattr(from_lists, name), getattr(padded, name))
    rows = unpack(from_lists.input_ids[0], from_lists)
    assert [r.tolist() for r in rows] == [batch.row(i) for i in range(len(rows))]
    values = [torch.randn(len(r)) for r in batch.responses]
    back = unpack_responses(pack_responses(values, from_lists), from_lists)
    assert all(torch.equal(a, b) for a, b in zip(values, back, strict=True))
    assert torch.equal(
        pack_tokens([torch.tensor(batch.row(i)) for i in range(len(rows))], from_lists), rows_of(padded)
    )

    order = random.Random(seed).sample(range(len(rows)), len(rows))
    shuffled = pack([batch.prompts[i] for i in order], [batch.responses[i] for i in order], boundary=boundary)
    assert shuffled.num_packed_tokens == padded.num_packed_tokens
    back = unpack(shuffled.input_ids[0], shuffled)
    assert [r.tolist() for r in back] == [batch.row(i) for i in order]


def rows_of(packed):
    return packed.input_ids[0]


def test_holes_in_lists_are_removed_and_restored():
    packed = pack(
        [[5, 6, 7], [5, 9, 7]], [[1, 2], [3]], prompt_mask=[[1, 0, 1], [1, 0, 1]], response_mask=[[0, 1], [1]]
    )
    assert packed.rows == ((0, 1),) and packed.input_ids.tolist() == [[5, 7, 2, 7, 3]]
    assert [r.tolist() for r in unpack(packed.input_ids[0], packed, fill=-1)] == [
        [5, -1, 7, -1, 2],
        [5, -1, 7, 3],
    ]


def test_the_callers_position_ids_are_kept():
    prompts, responses = torch.tensor([[0, 1, 2], [0, 1, 2]]), torch.tensor([[3, 4], [5, 0]])
    mask, response_mask = torch.tensor([[0, 1, 1]] * 2), torch.tensor([[1, 1], [1, 0]])
    positions = torch.tensor([[9, 10, 11, 12, 13], [9, 10, 11, 20, 0]])
    options = dict(prompt_mask=mask, response_mask=response_mask)
    packed = pack(prompts, responses, position_ids=positions, **options)
    assert packed.input_ids.tolist() == [[1, 2, 3, 4, 2, 5]]
    assert packed.position_ids.tolist() == [[10, 11, 12, 13, 11, 20]]
    # Attention counts rows, whatever RoPE is given.
    assert packed.layout.position_ids.tolist() == [0, 1, 2, 3, 1, 2]
    three = torch.stack([positions, positions + 100, positions * 0])  # (3, B, W): multimodal RoPE
    packed = pack(prompts, responses, position_ids=three, **options)
    assert packed.position_ids.shape == (3, 1, 6)
    assert (
        packed.position_ids[1].tolist() == [[110, 111, 112, 113, 111, 120]]
        and not packed.position_ids[2].any()
    )
    positions[:, 0] = -1  # as cumsum of the mask - 1 gives for padding on the left
    assert pack(prompts, responses, position_ids=positions, **options).position_ids[0, 0] == 10
    lists = pack([[1, 2], [1, 2]], [[3, 4], [5]], position_ids=[[10, 11, 12, 13], [10, 11, 20]])
    assert lists.position_ids.tolist() == [[10, 11, 12, 13, 11, 20]]
    masked = dict(prompt_mask=[[0, 1, 1]] * 2, position_ids=[[-1, 10, 11, 12, 13], [-1, 10, 11, 20]])
    lists = pack([[0, 1, 2], [0, 1, 2]], [[3, 4], [5]], **masked)
    assert lists.input_ids.tolist() == [[1, 2, 3, 4, 2, 5]]
    assert lists.position_ids.tolist() == [[10, 11, 12, 13, 11, 20]]


def test_prompts_at_other_positions_are_not_shared():
    prompts, responses = torch.tensor([[1, 2], [1, 2]]), torch.tensor([[3], [4]])
    shifted = torch.tensor([[0, 1, 2], [1, 2, 3]])
    assert pack(prompts, responses, position_ids=shifted).rows == ((0,), (1,))
    assert pack(prompts, responses).rows == ((0, 1),)
    # As of images of other sizes.
    images = torch.stack([torch.tensor([[0, 1, 2]] * 2), torch.tensor([[0, 1, 2], [0, 5, 6]])])
    assert pack(prompts, responses, position_ids=images).rows == ((0,), (1,))


def test_only_equal_prompts_with_equal_keys_share():
    prompts = [[1, 2, 3], [1, 2, 4], [1, 2, 3], [1, 2], [1, 2, 3]]
    responses = [[i] for i in range(5)]
    assert pack(prompts, responses).rows == ((0, 2, 4), (1,), (3,))
    adapters = ["a", "a", "a", "a", "b"]
    assert pack(prompts, responses, keys=adapters).rows == ((0, 2), (1,), (3,), (4,))
    unshared = pack(prompts, responses, keys=range(5))
    assert unshared.rows == tuple((i,) for i in range(5))
    assert unshared.token_ratio == 1.0 and unshared.num_packed_tokens == unshared.num_replicated_tokens == 19


def test_what_inference_mode_packs_can_be_trained_on():
    with torch.inference_mode():
        packed = pack(torch.tensor([[1, 2]] * 2), torch.tensor([[3], [4]]), max_segments=4, max_total=9)
        assert torch.is_inference_mode_enabled()
        moved = packed.to("cpu")
    weight = torch.randn(5, 2, 4, requires_grad=True)
    for batch in (packed, moved):
        q = torch.nn.functional.embedding(batch.input_ids[0], weight.flatten(1)).view(9, 2, 4)
        out = flash_attn_shared_prompt_func(q, q, q, batch.layout)
        values = log_probs(out.flatten(1), batch, torch.randn(5, 8)).log_probs
        (grad,) = torch.autograd.grad(unpack_responses(values, batch).sum(), weight)
        assert grad.any()
    packed.layout.copy_(pack([[1]], [[2]]).layout)  # writes to the tensors


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_empty_and_one_token_rows(boundary):
    packed = pack([[4], [4], [5]], [[], [], []], boundary=boundary)
    assert packed.labels.numel() == packed.pred_index.numel() == 0
    assert [r.tolist() for r in unpack(packed.input_ids[0], packed)] == [[4], [4], [5]]
    assert [r.tolist() for r in unpack_responses(torch.zeros(0, 3), packed)] == [[], [], []]
    empty = pack(
        torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0, 2, dtype=torch.int64), boundary=boundary
    )
    assert empty.input_ids.shape == (1, 0) and unpack(torch.zeros(0), empty).shape == (0, 5)
    assert pack_responses(torch.zeros(0, 2), empty).shape == (0,) and pack_tokens(
        torch.zeros(0, 5), empty
    ).shape == (0,)
    assert pack([], []).layout.num_groups == 0
    positions = torch.zeros(0, 5, dtype=torch.int64)
    for given, kinds in ((positions, (1, 0)), (positions.expand(3, 0, 5), (3, 1, 0))):
        none = torch.zeros(0, 3, dtype=torch.int64)
        assert pack(none, none[:, :2], position_ids=given, boundary=boundary).position_ids.shape == kinds


def test_pad_and_eos_ids_inside_a_response_are_tokens():
    packed = pack(torch.tensor([[0, 0]]), torch.tensor([[0, 2, 0]]), response_mask=torch.tensor([[1, 1, 1]]))
    assert packed.labels.tolist() == [0, 2, 0] and packed.input_ids.tolist() == [[0, 0, 0, 2, 0]]


def test_unpacked_gradients_add_up_on_shared_tokens():
    packed = pack([[1, 2], [1, 2], [1, 2]], [[3], [4], []])
    values = torch.zeros(packed.layout.num_rows, requires_grad=True)
    torch.cat(unpack(values, packed)).sum().backward()
    assert torch.equal(values.grad, packed.layout.multiplicity.float())


def test_capacities_reach_every_tensor():
    exact = pack([[1, 2], [1, 2]], [[3, 4], [5]], position_ids=[[5, 6, 7, 8], [5, 6, 7]])
    packed = pack(
        [[1, 2], [1, 2]], [[3, 4], [5]], position_ids=[[5, 6, 7, 8], [5, 6, 7]], max_segments=4, max_total=9
    )
    for name in ("input_ids", "position_ids"):
        tensor = getattr(packed, name)
        assert (
            tensor.shape == (1, 9)
            and torch.equal(tensor[:, :6], getattr(exact, name))
            and not tensor[:, 6:].any()
        )
    assert packed.labels.tolist() == [3, 4, 5] + [-100] * 6 and packed.pred_index.shape == (9,)
    assert packed.shift_labels.tolist() == [exact.shift_labels[0].tolist() + [-100] * 3]
    assert unpack_responses(torch.arange(9.0), packed)[1].tolist() == [2.0]
    assert pack_responses([torch.ones(2), torch.ones(1)], packed).tolist() == [1.0] * 3 + [0.0] * 6


def test_to_moves_every_tensor():
    packed = pack([[1, 2], [1, 2]], [[3, 4], [5]]).to("meta")
    tensors = [v for name in packed.__slots__ if isinstance(v := getattr(packed, name), torch.Tensor)]
    assert len(tensors) == 8 and all(t.is_meta for t in tensors) and packed.layout.segments.is_meta
    assert pack([[1]], [[2]], device="meta").input_ids.is_meta


@pytest.mark.gpu
def test_packing_on_a_gpu_waits_for_it_once():
    batch = Batch(0)
    on_cpu, p = batch.pack(), batch.prompt_width
    ids, mask = batch.ids.cuda(), batch.mask.cuda()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            packed = pack(ids[:, :p], ids[:, p:], prompt_mask=mask[:, :p], response_mask=mask[:, p:])
            values = unpack_responses(pack_responses(torch.ones(7, 5, device="cuda"), packed), packed)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([w for w in found if "synchronizing" in str(w.message)]) == 1
    assert packed.input_ids.is_cuda and packed.layout.segments.is_cuda and values.is_cuda
    for name in ("input_ids", "position_ids", "labels", "pred_index", "grid_to_packed"):
        assert torch.equal(getattr(packed, name).cpu(), getattr(on_cpu, name))
