"""A packed step gives what the samples give one by one."""

import dataclasses

import numpy as np
import pytest
import torch
from peft import get_peft_model
from transformers import Gemma2Config, Gemma2ForCausalLM

from gateway.store.policy_settings import Lora
from tests.trainer import tiny
from trainer import logprobs as lp
from trainer import packing, trie_attention
from trainer.logprobs import Way, choose_way, trained_logprobs
from trainer.model import lora_config
from trainer.packing import micro_batches, pack, unique_tokens


def adapted(kind, **extra):
    """A tiny model with an adapter that does something."""
    base = tiny.model(kind, **extra)
    way = choose_way(base)
    torch.manual_seed(1)
    adapter = get_peft_model(base, lora_config(Lora(rank=8), "base"))
    for name, weight in adapter.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    return base, adapter, way


def result(base, adapter, packed, way):
    """Logprobs, and the adapter's gradient for a loss that weighs them all differently."""
    adapter.zero_grad()
    values, entropies = trained_logprobs(base, packed, way)
    (values * torch.linspace(-1, 1, len(values))).sum().backward()
    gradient = torch.cat([p.grad.flatten() for p in adapter.parameters() if p.requires_grad])
    return values.detach(), gradient.clone(), entropies.detach()


def close(left, right):
    logs, gradients, entropies = left
    other_logs, other_gradients, other_entropies = right
    return (
        torch.allclose(logs, other_logs, atol=2e-5)
        and torch.allclose(entropies, other_entropies, atol=2e-4)
        and (gradients - other_gradients).norm() <= 1e-4 * other_gradients.norm()
    )


def test_the_layout_is_depth_first_with_every_prefix_once():
    sequences = [np.array(list(map(ord, text))) for text in ("abcd", "abxy", "e", "ab")]
    trie = packing.build_trie(sequences)
    assert "".join(map(chr, trie.input_ids.tolist())) == "abcdxye"
    assert trie.position_ids.tolist() == [0, 1, 2, 3, 2, 3, 0]
    assert trie.end.tolist() == [6, 6, 4, 4, 6, 6, 7]
    assert [path.tolist() for path in trie.paths] == [[0, 1, 2, 3], [0, 1, 4, 5], [6], [0, 1]]


def test_the_dense_mask_shows_each_token_its_ancestors_only():
    sequences = [np.array([1, 2, 3]), np.array([1, 4])]
    seen = packing.build_trie(sequences).dense_mask(torch.float32)[0, 0] == 0
    assert seen.int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("way", [Way.SEGMENTS, Way.DENSE])
def test_logprobs_entropies_and_gradients_equal_those_of_single_samples(kind, way):
    base, adapter, chosen = adapted(kind)
    assert chosen is Way.SEGMENTS
    packed = pack(tiny.forked_samples())
    assert close(result(base, adapter, packed, way), result(base, adapter, packed, Way.ONE_BY_ONE))


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_single_samples_equal_the_models_own_loss(kind):
    base, _, _ = adapted(kind)
    samples = tiny.forked_samples()
    packed = pack(samples)
    values, _ = trained_logprobs(base, packed, Way.SEGMENTS)
    expected = []
    for sample in samples:
        for span in sample.spans:
            ids = sample.token_ids.tolist()
            expected += tiny.logprobs(
                base, ids[: span.start], ids[span.start : span.stop], span.temperature
            )
    assert torch.allclose(values, torch.tensor(expected), atol=2e-5)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("fault", ["positions", "mask", "paths"])
def test_a_wrong_layout_is_told_from_a_right_one(kind, fault):
    base, adapter, _ = adapted(kind)
    packed = pack(tiny.forked_samples())
    trie, way = packed.trie, Way.DENSE
    if fault == "positions":
        wrong = dataclasses.replace(trie, position_ids=torch.arange(len(trie.input_ids)))
    elif fault == "mask":
        wrong = dataclasses.replace(trie, end=torch.full_like(trie.end, len(trie.end)))
    else:
        way = Way.SEGMENTS
        spoiled = [
            dataclasses.replace(s, path=s.path.roll(1) if len(s.path) > 9 else s.path)
            for s in trie.segments
        ]
        wrong = dataclasses.replace(trie, segments=spoiled)
    right = result(base, adapter, packed, Way.ONE_BY_ONE)
    other = result(base, adapter, dataclasses.replace(packed, trie=wrong), way)
    assert (right[0] - other[0]).abs().max() > 1e-2
    assert not close(other, right)


def test_long_segments_are_cut_without_a_difference(monkeypatch):
    monkeypatch.setattr(packing, "QUERIES", 3)
    base, adapter, _ = adapted("llama")
    packed = pack(tiny.forked_samples())
    assert len(packed.trie.segments) > 10
    assert close(
        result(base, adapter, packed, Way.SEGMENTS), result(base, adapter, packed, Way.ONE_BY_ONE)
    )


def test_a_head_in_checkpointed_chunks_gives_the_same(monkeypatch):
    base, adapter, _ = adapted("llama")
    packed = pack(tiny.forked_samples())
    whole = result(base, adapter, packed, Way.SEGMENTS)
    monkeypatch.setattr(lp, "HEAD_FLOATS", 4 * tiny.VOCAB)
    assert close(result(base, adapter, packed, Way.SEGMENTS), whole)


def test_sliding_windows_are_kept_over_a_trie():
    window = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 0}
    base, adapter, way = adapted("qwen3", **window)
    assert way is Way.SEGMENTS
    packed = pack(tiny.forked_samples())
    assert close(
        result(base, adapter, packed, Way.SEGMENTS), result(base, adapter, packed, Way.ONE_BY_ONE)
    )


def test_the_attention_passes_a_numerical_gradient_check():
    torch.manual_seed(0)
    sequences = [np.array([1, 2, 3, 4]), np.array([1, 2, 5]), np.array([6, 7])]
    trie = packing.build_trie(sequences)
    total = len(trie.input_ids)
    inputs = [
        torch.randn(heads, total, 4, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)
    ]

    def attention(query, key, value):
        return trie_attention._TrieAttention.apply(query, key, value, trie.segments, 0.5, 3)

    assert torch.autograd.gradcheck(attention, inputs, eps=1e-3, atol=1e-3, rtol=1e-2)


def test_a_model_with_softcapped_attention_is_taken_one_by_one():
    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 32, "head_dim": 8, "vocab_size": tiny.VOCAB}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Gemma2Config(**size, **heads, initializer_range=0.25, pad_token_id=0)
    assert choose_way(Gemma2ForCausalLM(config).eval()) is Way.ONE_BY_ONE


def test_a_model_that_packing_would_get_wrong_is_taken_one_by_one(monkeypatch):
    monkeypatch.setattr(packing.Trie, "dense_mask", lambda trie, dtype: None)
    base = tiny.model("llama")
    real = trie_attention._scores

    def blind(query, keys, segment, scale, window):
        return real(query, keys, segment, scale * 0.5, window)

    monkeypatch.setattr(trie_attention, "_scores", blind)
    before = base.config._attn_implementation
    assert choose_way(base) is Way.ONE_BY_ONE
    assert base.config._attn_implementation == before


def test_a_shared_prompt_is_counted_once():
    samples = tiny.forked_samples()
    assert unique_tokens(samples) == len(pack(samples).trie.input_ids)
    assert unique_tokens(samples) < sum(len(s.token_ids) for s in samples) / 2


def test_passes_keep_to_the_budget_and_to_groups():
    samples = tiny.forked_samples()
    groups = [[s for s in samples if s.group_id == name] for name in ("g", "h")]
    assert micro_batches(samples, 10_000) == [[*groups[0], *groups[1]]]
    assert micro_batches(samples, max(map(unique_tokens, groups))) == groups
    small = micro_batches(samples, 25)
    assert sorted(s.trajectory_id for batch in small for s in batch) == sorted(
        s.trajectory_id for s in samples
    )
    assert all(len(batch) == 1 or unique_tokens(batch) <= 25 for batch in small)
