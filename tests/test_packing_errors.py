"""Batches that `pack` refuses, and values that belong to another batch: each message names the argument."""

import re

import pytest
import torch

from flash_attn.shared_prompt import pack, pack_responses, pack_tokens, unpack, unpack_responses

IDS, MASK = torch.tensor([[1, 2], [3, 4]]), torch.ones(2, 2, dtype=torch.int64)


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (dict(prompts=IDS, responses=IDS[0]), ValueError, "responses must be (num_rows, width), got [2]"),
        (
            dict(prompts=IDS, responses=IDS[:1]),
            ValueError,
            "responses must have one row per prompt (2), got 1",
        ),
        (
            dict(prompts=IDS, responses=[[1], [2]]),
            TypeError,
            "responses must be a tensor like prompts, got list",
        ),
        (
            dict(prompts=[[1]], responses=IDS[:1]),
            TypeError,
            "responses must be a list of rows like prompts, got Tensor",
        ),
        (
            dict(prompts=IDS.float(), responses=IDS),
            TypeError,
            "prompts must hold integers, got torch.float32",
        ),
        (
            dict(prompts=[[1.5]], responses=[[1]]),
            TypeError,
            "prompts[0] must hold integers, got torch.float32",
        ),
        (dict(prompts=[1], responses=[[1]]), ValueError, "prompts[0] must be a list of ids, got shape []"),
        (dict(prompts=[[]], responses=[[1]]), ValueError, "prompts[0] must have at least one token, got 0"),
        (dict(prompts=[[2**70]], responses=[[1]]), ValueError, "prompts[0] must be a list of ids, got [118"),
        (dict(prompts=["ab"], responses=[[1]]), ValueError, "prompts[0] must be a list of ids, got 'ab'"),
        (dict(prompts=[None], responses=[[1]]), ValueError, "prompts[0] must be a list of ids, got None"),
        (
            dict(prompts=[[1]], responses=None),
            TypeError,
            "responses must be a list of rows like prompts, got NoneType",
        ),
        (
            dict(prompts=None, responses=[[1]]),
            TypeError,
            "prompts must be a list of rows like prompts, got NoneType",
        ),
        (
            dict(prompts=IDS, responses=IDS, prompt_mask=0 * MASK),
            ValueError,
            "prompts[0] must have at least one token",
        ),
        (
            dict(prompts=IDS, responses=-IDS),
            ValueError,
            "responses must hold ids >= 0 where not masked, got -1 in row 0",
        ),
        (
            dict(prompts=IDS, responses=IDS, prompt_mask=MASK[:1]),
            ValueError,
            "prompt_mask must be (2, 2) like its ids",
        ),
        (
            dict(prompts=IDS, responses=IDS, response_mask=MASK * 3),
            ValueError,
            "must hold 0 and 1 only, got 3",
        ),
        (
            dict(prompts=[[1, 2]], responses=[[1]], prompt_mask=[[1]]),
            ValueError,
            "must have one flag per id of prompts",
        ),
        (
            dict(prompts=IDS, responses=IDS, keys=[1]),
            ValueError,
            "keys must have one entry per row (2), got 1",
        ),
        (
            dict(prompts=IDS, responses=IDS, position_ids=IDS),
            ValueError,
            "position_ids must be (2, 4) or (K, 2, 4), got [2, 2]",
        ),
        (
            dict(prompts=IDS, responses=IDS, position_ids=torch.rand(2, 4)),
            TypeError,
            "position_ids must hold integers",
        ),
        (
            dict(prompts=[[1]], responses=[[1]], position_ids=[[1]]),
            ValueError,
            "position_ids must have one id per token of each row [2], got [1]",
        ),
        (
            dict(prompts=IDS, responses=IDS, position_ids=-torch.eye(2, 4).long()),
            ValueError,
            "position_ids must be >= 0 where not masked, got -1 in row 0",
        ),
        (
            dict(prompts=[[5], [5]], responses=[[6, 7], [8]], position_ids=[[0, 1, 2], [0, -3]]),
            ValueError,
            "position_ids must be >= 0 where not masked, got -3 in row 1",
        ),
        (
            dict(prompts=IDS, responses=IDS, boundary="x"),
            ValueError,
            'boundary must be "fork" or "shared", got \'x\'',
        ),
        (
            dict(prompts=IDS, responses=IDS, max_segments=1, max_total=99),
            ValueError,
            "it needs 4, got max_segments=1",
        ),
    ],
)
def test_bad_batches_are_refused(arguments, error, message):
    with pytest.raises(error, match=re.escape(message)):
        pack(**arguments)


def test_values_of_another_batch_are_refused():
    packed, lists = pack(IDS, IDS), pack([[1, 2]], [[3]])
    with pytest.raises(
        ValueError, match=re.escape("values must be (num_rows, ...) = (8,) first, got [1, 8]")
    ):
        unpack(torch.zeros(1, 8), packed)
    with pytest.raises(
        ValueError, match=re.escape("values must be (num_response_tokens, ...) = (4,) first, got [5]")
    ):
        unpack_responses(torch.zeros(5), packed)
    with pytest.raises(
        ValueError, match=re.escape("values must be (num_rows, width, ...) = (2, 4) first, got [2, 3]")
    ):
        pack_tokens(torch.zeros(2, 3), packed)
    with pytest.raises(
        ValueError, match=re.escape("(num_rows, response width, ...) = (2, 2) first, got [4]")
    ):
        pack_responses(torch.zeros(4), packed)
    with pytest.raises(
        ValueError, match=re.escape("values must have one value per token of each row [1], got [2]")
    ):
        pack_responses([torch.zeros(2)], lists)
