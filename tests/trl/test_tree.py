"""TRL's own tries (`TreeRow.pack`) through a real model with its fused LM head: equal to one row at a
time."""

from __future__ import annotations

import pytest
import torch
from tiny import BASE, model_path
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from trl.experimental.async_grpo.packing import TreeRow, register_tree_attention
from trl.trainer.utils import add_fused_lm_head

from flash_attn.integrations._trl_tree import read_trie, tree_attention
from flash_attn.integrations.trl import SharedPromptAsyncGRPOTrainer, install_tree_attention

G = torch.Generator().manual_seed(0)


def tokens(n: int) -> list[int]:
    return torch.randint(3, 60, (n,), generator=G).tolist()


def samples(tries: str) -> list[tuple[list[int], int]]:
    """(ids, prompt length) of each sample."""
    if tries == "two-level":  # two prompts, one with a lone response; a response that begins another
        a, b = [3, *tokens(12)], [4, *tokens(7)]
        long = tokens(9)
        return [(a + tokens(5), 13), (a + long, 13), (a + tokens(1), 13), (b + tokens(6), 8)]
    if tries == "chains":  # nothing shared
        return [([3 + i, *tokens(6 + i)], 4) for i in range(3)]
    system = [3, *tokens(6)]  # a system prompt, prompts, responses that fork again
    rows = []
    for i in range(2):
        prompt = [*system, 40 + i, *tokens(5)]
        for j in range(2):
            turn = [*prompt, 20 + j, *tokens(3)]
            rows += [([*turn, 50 + k, *tokens(2 + k)], len(prompt)) for k in range(2)]
        rows.append(([*prompt, 30, *tokens(4)], len(prompt)))
    return rows


def packed(rows) -> dict[str, torch.Tensor]:
    tree = TreeRow()
    for ids, prompt_len in rows:
        n = len(ids)
        tree.add({
            "input_ids": torch.tensor(ids), "group_id": 0, "advantage": 1.0, "old_log_probs": torch.zeros(n),
            "completion_mask": torch.tensor([0] * prompt_len + [1] * (n - prompt_len)),
        })  # fmt: skip
    return tree.pack()


def build(implementation: str, folder, **changes):
    torch.manual_seed(0)
    config = AutoConfig.for_model(changes.pop("model_type", "qwen3"), **{**BASE, **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation).double()
    add_fused_lm_head(model, temperature=0.8, outputs=("log_probs", "entropy"))
    return model.train()


def by_row(model, rows, weights):
    loss, position = 0.0, 0
    for ids, prompt_len in rows:
        labels = torch.tensor([[-100] * prompt_len + ids[prompt_len:]])
        out = model(input_ids=torch.tensor([ids]), labels=labels, fused_lm_head=True).log_probs[
            0, prompt_len - 1 :
        ]
        loss = loss + (out * weights[position : position + len(out)]).sum()
        position += len(out)
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters()}


def by_tree(model, pack, weights):
    names = ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")
    longest_q, longest_k = pack["tree_max_seqlens"].tolist()
    out = model(
        input_ids=pack["input_ids"][None], position_ids=pack["position_ids"][None],
        shift_labels=pack["shift_labels"][None], fused_lm_head=True, tree_max_seqlen_q=longest_q,
        tree_max_seqlen_k=longest_k, **{name: pack[name] for name in names},
    )  # fmt: skip
    loss = (out.log_probs[0][pack["token_index"]] * weights).sum()
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize("tries", ["two-level", "chains", "deep"])
@pytest.mark.parametrize("kind", ["full", "window", "checkpointing"])
def test_a_trie_equals_its_rows_one_by_one(tries, kind, folder):
    changes = {"model_type": "mistral", "sliding_window": 7} if kind == "window" else {}
    rows = samples(tries)
    pack = packed(rows)
    assert len(pack["input_ids"]) < sum(len(ids) for ids, _ in rows) or tries == "chains"
    weights = torch.randn(
        len(pack["token_index"]), generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    expected, gradients = by_row(build("eager", folder, **changes), rows, weights)
    install_tree_attention()
    model = build("tree_fa3", folder, **changes)
    if kind == "checkpointing":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    found, tree_gradients = by_tree(model, pack, weights)
    # RoPE, norms and the LM head's log-sum-exp round to fp32 in transformers and TRL.
    assert found == pytest.approx(expected, rel=2e-6)
    scale = max(float(g.abs().max()) for g in gradients.values())
    for name, gradient in gradients.items():
        assert (gradient - tree_gradients[name]).abs().max() <= 1e-5 * scale, name


def test_two_levels_gather_nothing_and_deeper_tries_one_path_per_fork():
    two = packed(samples("two-level"))
    trie = read_trie(*(two[n] for n in ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")))
    assert trie.context_rows is None
    assert len(two["input_ids"]) < len(two["tree_kv_index"])  # what TRL's function gathers in every layer
    deep = packed(samples("deep"))
    trie = read_trie(*(deep[n] for n in ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")))
    assert trie.context_rows is not None
    assert len(trie.context_rows) < 0.6 * len(deep["tree_kv_index"])


def test_wrong_tables_and_unknown_arguments_are_refused():
    index, cu = torch.arange(4), torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(
        ValueError, match="must delimit tree_kv_index's 4 rows for 1 segments, got 2 segments"
    ):
        read_trie(index, cu, torch.tensor([0, 2, 4], dtype=torch.int32))
    with pytest.raises(ValueError, match="must end each path with the segment's own rows 0 to 3"):
        read_trie(index.flip(0), cu, cu)
    x = torch.randn(1, 2, 4, 8)
    tables = {"tree_kv_index": index, "tree_cu_seqlens_q": cu, "tree_cu_seqlens_k": cu}
    sizes = {"tree_max_seqlen_q": 4, "tree_max_seqlen_k": 4}
    module = torch.nn.Linear(2, 2)
    with pytest.raises(NotImplementedError, match=r"attention dropout is not supported, got dropout=0\.1"):
        tree_attention(module, x, x, x, None, **tables, **sizes, dropout=0.1)
    with pytest.raises(NotImplementedError, match="does not know the argument 'alibi'"):
        tree_attention(module, x, x, x, None, **tables, **sizes, alibi=1)
    with pytest.raises(ValueError, match="the trie must have q's 3 rows, got 4"):
        tree_attention(module, x[:, :, :3], x[:, :, :3], x[:, :, :3], None, **tables, **sizes)


def test_the_async_trainer_runs_on_this_attention(folder, tmp_path, monkeypatch):
    """The real trainer up to its loss and gradients, which need no rollout server."""
    from datasets import Dataset
    from tiny import even_words, tokenizer
    from trl.experimental.async_grpo import AsyncGRPOConfig, async_grpo_trainer

    # The trainer asks CUDA for the device's peak, for a metric.
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: 1.0)

    class NoServer:
        def __getattr__(self, name):
            return lambda *args, **kwargs: None

    args = AsyncGRPOConfig(
        str(tmp_path), use_cpu=True, report_to="none", bf16=False, dtype="float32", max_steps=1
    )
    trainer = SharedPromptAsyncGRPOTrainer(
        model=model_path(folder), args=args, reward_funcs=even_words, processing_class=tokenizer(),
        train_dataset=Dataset.from_dict({"prompt": ["w1 w2"] * 4}), rollout_worker=NoServer(),
        weight_transfer=NoServer(),
    )  # fmt: skip
    assert AttentionInterface()["tree_fa3"] is tree_attention
    pack = packed(samples("deep"))
    inputs = {k: v[None] for k, v in pack.items()}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    count = torch.tensor([float(len(pack["token_index"]))])
    for name in ("global_n_tokens", "global_n_forward_tokens", "mean_seq_len"):
        inputs[name] = count
    trainer.current_gradient_accumulation_steps = 1
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    assert torch.isfinite(loss) and trainer.model.model.layers[0].self_attn.k_proj.weight.grad.abs().sum() > 0
    register_tree_attention()  # TRL's own again, for whoever comes next
    assert AttentionInterface()["tree_fa3"] is not tree_attention
