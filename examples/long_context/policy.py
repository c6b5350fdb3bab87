"""A causal language model with random weights, sharded by FSDP2 layer by layer as it is built.

No rank ever holds more than one whole layer, and the embedding with the head.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate import init_empty_weights
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM

from flash_attn.integrations.transformers import log_probs_of_batch, register
from flash_attn.shared_prompt import PackedBatch, ulysses


class Policy(torch.nn.Module):
    """The model, with log-probs as output: the LM head is used inside FSDP's forward, where it is whole."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: ulysses.ShardedBatch | PackedBatch, temperature: float) -> torch.Tensor:
        """(n,) log-probs of every response token, on every rank, in pack order."""
        found = log_probs_of_batch(self.model, batch, temperature=temperature, compute_entropy=False)
        return found.log_probs.clone()  # FSDP2 warns of outputs that are views


def materialize(module: torch.nn.Module, device: torch.device, generator: torch.Generator) -> None:
    """Random values for parameters that have none yet, ties kept: matrices N(0, 0.02), norms 1, biases 0."""
    made: dict[int, torch.nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if id(parameter) not in made:
                value = torch.empty_like(parameter, device=device)
                if value.dim() > 1:
                    value.normal_(0.0, 0.02, generator=generator)
                else:
                    value.fill_(0.0 if "bias" in name else 1.0)
                made[id(parameter)] = torch.nn.Parameter(value)
            part._parameters[name] = made[id(parameter)]
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = buffer.to(device)


def build(
    config: Any,
    mesh: DeviceMesh,
    device: torch.device,
    dtype: torch.dtype,
    compute_dtype: torch.dtype,
    seed: int,
) -> Policy:
    """Parameters and gradients in `dtype`, computation in `compute_dtype`, gradients added in fp32."""
    register()
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="dualkv", dtype=dtype)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    policy = Policy(model)
    generator = torch.Generator(device).manual_seed(seed)
    reduce_dtype = torch.promote_types(dtype, torch.float32)
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype)
    for layer in model.model.layers:
        materialize(layer, device, generator)
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    materialize(policy, device, generator)
    fully_shard(policy, mesh=mesh, mp_policy=precision)
    return policy
