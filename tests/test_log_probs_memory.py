"""log_probs needs the memory of one tile of logits, forward and backward, and on a GPU never waits for it."""

import subprocess
import sys

import pytest
import torch

from flash_attn.shared_prompt import log_probs

MEMORY = """
import torch
from flash_attn.shared_prompt import log_probs
num_tokens, vocab, size, dtype, tile, from_logits = {}, {}, {}, torch.{}, {}, {}
torch.set_num_threads(2)
def status(name):  # bytes; getrusage's maximum begins at the parent's
    return next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith(name + ":"))
def leaf(*shape):  # filled in place: no larger peak before the measurement
    with torch.no_grad():
        return torch.empty(*shape, dtype=dtype).uniform_(-1, 1).requires_grad_()
hidden = leaf(num_tokens, vocab if from_logits else size)
weight = None if from_logits else leaf(vocab, size)
labels = torch.randint(0, vocab, (num_tokens,))
options = dict() if tile is None else dict(tile_elements=tile)
def step(*tensors):
    values, entropy = log_probs(tensors[0], labels[:len(tensors[0])], *tensors[1:], **options)
    (values.sum() + entropy.sum()).backward()
# Once on few rows: the math library's own buffers are not the function's.
warm = [None if t is None else t.detach().requires_grad_() for t in (hidden[:64], weight)]
log_probs(warm[0], labels[:64], warm[1], tile_elements=2**16).log_probs.sum().backward()
del warm
before = status("VmRSS")
step(hidden, weight)
peak = status("VmHWM")
grads = sum(t.grad.numel() * t.grad.element_size() for t in (hidden, weight) if t is not None)
print((peak - before - grads) / 2**20)
"""


def extra_mib(*arguments):
    run = subprocess.run([sys.executable, "-c", MEMORY.format(*arguments)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return float(run.stdout)


@pytest.mark.parametrize("from_logits", [False, True])
def test_peak_memory_is_that_of_a_tile(from_logits):
    """128 MiB of fp32 logits in tiles of 4 MiB: forward and backward, gradients of inputs and head not
    counted.
    """
    assert extra_mib(1024, 32768, 16, "float32", 2**20, from_logits) < 40


@pytest.mark.slow
def test_8192_tokens_of_a_152k_vocabulary_stay_below_1_gib():
    extra = extra_mib(8192, 151936, 1024, "bfloat16", None, False)
    print(f"extra peak: {extra:.0f} MiB")
    assert extra < 1024


@pytest.mark.gpu
def test_on_a_gpu_no_host_sync_and_below_1_gib():
    """8192 tokens, 152K vocabulary, hidden size 4096, bf16; gradients of inputs and head not counted."""
    hidden = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (0.02 * torch.randn(151936, 4096, device="cuda")).bfloat16().requires_grad_()
    labels = torch.randint(0, 151936, (8192,), device="cuda")
    log_probs(hidden[:8], labels[:8], weight).log_probs.sum().backward()
    hidden.grad = weight.grad = None
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        values, entropy = log_probs(hidden, labels, weight, temperature=0.8)
        (values.sum() + 0.01 * entropy.sum()).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    gradients = 2 * (hidden.numel() + weight.numel())
    assert torch.cuda.max_memory_allocated() - before - gradients < 2**30
    with torch.no_grad():
        log_p = torch.log_softmax((hidden[:64] @ weight.t()).float() / 0.8, -1)
    torch.testing.assert_close(values[:64], log_p.gather(1, labels[:64, None])[:, 0], rtol=1e-2, atol=3e-2)
    torch.testing.assert_close(entropy[:64], -(log_p.exp() * log_p).sum(-1), rtol=1e-2, atol=3e-2)
