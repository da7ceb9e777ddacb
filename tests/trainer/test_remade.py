"""What is made again in the backward pass changes no number, and is not kept."""

import pytest
import torch
from torch import nn
from transformers import Gemma3ForCausalLM, Gemma3nTextConfig, Gemma3TextConfig
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextMLP
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from tests.trainer import tiny
from tests.trainer.test_packing import adapted
from trainer.logprobs import trained_logprobs
from trainer.lora_linear import speed_up
from trainer.packing import pack
from trainer.remade import origin_of, remake

KINDS = ["llama", "qwen2", "qwen3", "gemma3"]


def stepped(base, adapter, way):
    """Gradients of a step, and the bytes that its forward pass keeps besides the weights."""
    adapter.zero_grad()
    weights = {w.untyped_storage().data_ptr() for w in base.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        values, _ = trained_logprobs(base, pack(tiny.forked_samples()), way)
    size = sum(storage.nbytes() for storage in kept.values())
    (values * torch.linspace(-1, 1, len(values))).sum().backward()
    gradients = [p.grad.clone() for p in adapter.parameters() if p.requires_grad]
    return values.detach(), gradients, size


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_the_same_to_the_bit_and_less_is_kept(kind, checkpointing, monkeypatch):
    gemma = (Gemma3TextConfig, Gemma3ForCausalLM, {"head_dim": 16})
    monkeypatch.setitem(tiny.KINDS, "gemma3", gemma)
    base, adapter, way = adapted(kind)
    speed_up(adapter)
    if checkpointing:
        adapter.enable_input_require_grads()
        base.gradient_checkpointing_enable({"use_reentrant": False})
        base.train()
    values, gradients, size = stepped(base, adapter, way)
    # Two norms and a feed-forward part of each of the two layers, and the last norm.
    assert remake(adapter) >= 7
    again, found, smaller = stepped(base, adapter, way)
    assert torch.equal(again, values)
    assert all(torch.equal(one, other) for one, other in zip(found, gradients, strict=True))
    if not checkpointing:
        assert smaller < 0.8 * size
    else:
        assert smaller <= size


def test_nothing_is_carried_along_where_there_is_no_backward_pass():
    _, adapter, _ = adapted("llama")
    remake(adapter)
    norm = next(part for part in adapter.modules() if isinstance(part, LlamaRMSNorm))
    x = torch.randn(3, norm.weight.shape[0])
    assert origin_of(norm(x)) is None
    with torch.no_grad():
        assert origin_of(norm(x.requires_grad_())) is None
    assert origin_of(norm(x.clone())) is not None


class Clipped(LlamaMLP):
    """Looks like the usual feed-forward part, and is not."""

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)).clamp(max=1) * self.up_proj(x))


def test_parts_that_compute_something_else_stay_as_they_are():
    config = tiny.model("llama").config
    sparse = Gemma3nTextConfig(
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        activation_sparsity_pattern=[0.5, 0.5],
    )
    norm = LlamaRMSNorm(8)
    assert remake(nn.ModuleList([Clipped(config), Gemma3nTextMLP(sparse, 0), norm])) == 0
    norm.requires_grad_(False)
    assert remake(nn.ModuleList([LlamaMLP(config), norm])) == 2
