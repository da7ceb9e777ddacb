"""A packed step gives what the samples give one by one."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from peft import get_peft_model
from transformers import Gemma2Config, Gemma2ForCausalLM

from gateway.store.policy_settings import Lora
from tests.trainer import tiny
from trainer import flex_attention, head, lora_linear, packing, trie_attention
from trainer import logprobs as lp
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


def random_trie(longest, monkeypatch):
    """A trie with forks at many depths and several roots, and which key each query may see."""
    monkeypatch.setattr(packing, "LONGEST", longest)
    texts = ("abcdefghij", "abcdxy", "abcdxyzzzz", "e", "ab", "abcdefgQQQQ", "eab")
    trie = packing.build_trie([np.array(list(map(ord, text))) for text in texts])
    distance = torch.full((len(trie.end), len(trie.end)), -1)
    for path in trie.paths:
        for query, key in itertools.product(range(len(path)), repeat=2):
            if key <= query:
                distance[path[query], path[key]] = query - key
    return trie, distance


@pytest.mark.parametrize("window", [None, 3, 1])
def test_the_rule_of_the_block_mask_shows_each_token_its_ancestors_only(window, monkeypatch):
    trie, distance = random_trie(3, monkeypatch)
    index = torch.arange(len(trie.end))
    seen = flex_attention.rule(trie, window)(0, 0, index[:, None], index[None, :])
    assert torch.equal(seen, (distance >= 0) & (distance < (window or 100)))
    assert flex_attention.block_mask(trie, window) is flex_attention.block_mask(trie, window)


@pytest.mark.parametrize("window", [None, 3, 1])
@pytest.mark.parametrize("longest", [1, 3, 256])
def test_attention_by_segments_is_attention_under_the_mask(window, longest, monkeypatch):
    trie, distance = random_trie(longest, monkeypatch)
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, len(trie.end), 8, dtype=torch.float64, requires_grad=True)
        for heads in (6, 2, 2)
    )
    unseen = (distance < 0) | (distance >= (window or 100))
    out = trie_attention.by_segments(trie, query, key, value, 0.5, window)
    keys, values = (t.repeat_interleave(3, 1) for t in (key, value))
    scores = (query @ keys.transpose(2, 3) * 0.5).masked_fill(unseen, -torch.inf)
    expected = scores.softmax(-1) @ values
    weights = torch.randn_like(out)
    found = torch.autograd.grad(out, (query, key, value), weights)
    wanted = torch.autograd.grad(expected, (query, key, value), weights)
    for left, right in zip((out, *found), (expected, *wanted), strict=True):
        assert torch.allclose(left, right, atol=1e-12)


@pytest.mark.parametrize("window", [None, 6])
def test_flexattention_gives_what_segments_give(window, monkeypatch):
    # On a CPU it has a forward pass only, and is not compiled here.
    trie, _ = random_trie(3, monkeypatch)
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, len(trie.end), 16) for heads in (4, 2, 2))
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        found = flex_attention.attend(trie, query, key, value, 0.25, window)
    expected = trie_attention.by_segments(trie, query, key, value, 0.25, window)
    assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_on_a_gpu_flexattention_gives_the_logprobs_and_gradients_of_single_samples(kind):
    base = tiny.model(kind).cuda()
    assert choose_way(base) is Way.FLEX
    adapter = get_peft_model(base, lora_config(Lora(rank=8), "base"))
    packed = pack(tiny.forked_samples(), "cuda")
    assert close(result(base, adapter, packed, Way.FLEX), result(base, adapter, packed, Way.PADDED))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("lean", [False, True])
def test_logprobs_entropies_and_gradients_equal_those_of_single_samples(kind, lean):
    base, adapter, chosen = adapted(kind)
    assert chosen is Way.SEGMENTS
    packed = pack(tiny.forked_samples())
    expected = result(base, adapter, packed, Way.PADDED)
    if lean:
        assert lora_linear.speed_up(adapter) == 14
    assert close(result(base, adapter, packed, Way.SEGMENTS), expected)


def test_a_quick_layer_is_the_bare_one_while_the_adapter_is_off():
    base, adapter, _ = adapted("llama")
    packed = pack(tiny.forked_samples())
    with torch.no_grad(), adapter.disable_adapter():
        expected, _ = trained_logprobs(base, packed, Way.SEGMENTS)
    lora_linear.speed_up(adapter)
    with torch.no_grad():
        with adapter.disable_adapter():
            found, _ = trained_logprobs(base, packed, Way.SEGMENTS)
        on, _ = trained_logprobs(base, packed, Way.SEGMENTS)
    assert torch.equal(found, expected)
    assert (on - found).abs().max() > 1e-3


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
@pytest.mark.parametrize("fault", ["positions", "descendants", "roots"])
def test_a_wrong_layout_is_told_from_a_right_one(kind, fault):
    base, adapter, _ = adapted(kind)
    packed = pack(tiny.forked_samples())
    trie = packed.trie
    if fault == "positions":
        wrong = dataclasses.replace(trie, position_ids=torch.arange(len(trie.input_ids)))
    elif fault == "descendants":
        # The keys of one segment are hidden from what descends from it.
        chosen = next(i for i, s in enumerate(trie.segments) if s.end > s.stop and s.depth > 0)
        spoiled = list(trie.segments)
        spoiled[chosen] = dataclasses.replace(spoiled[chosen], end=spoiled[chosen].stop)
        wrong = dataclasses.replace(trie, segments=spoiled)
    else:
        # A segment forgets what was seen before it.
        chosen = next(i for i, s in enumerate(trie.segments) if s.depth > 0)
        spoiled = list(trie.segments)
        spoiled[chosen] = dataclasses.replace(spoiled[chosen], depth=0)
        wrong = dataclasses.replace(trie, segments=spoiled)
    right = result(base, adapter, packed, Way.PADDED)
    other = result(base, adapter, dataclasses.replace(packed, trie=wrong), Way.SEGMENTS)
    assert not close(other, right)


@pytest.mark.parametrize("fault", ["segments", "window"])
def test_a_wrong_mask_is_told_from_a_right_one(fault, monkeypatch):
    trie, distance = random_trie(256, monkeypatch)
    index = torch.arange(len(trie.end))
    spoiled = dataclasses.replace(trie, end=torch.full_like(trie.end, len(trie.end)))
    wrong, window = (spoiled, 3) if fault == "segments" else (trie, 4)
    seen = flex_attention.rule(wrong, window)(0, 0, index[:, None], index[None, :])
    assert not torch.equal(seen, (distance >= 0) & (distance < 3))


def test_long_segments_are_cut_without_a_difference(monkeypatch):
    monkeypatch.setattr(packing, "LONGEST", 3)
    base, adapter, _ = adapted("llama")
    packed = pack(tiny.forked_samples())
    assert len(packed.trie.segments) > 10
    assert close(
        result(base, adapter, packed, Way.SEGMENTS), result(base, adapter, packed, Way.PADDED)
    )


@pytest.mark.parametrize("frozen", [True, False])
def test_a_head_in_chunks_gives_the_same(frozen, monkeypatch):
    base, adapter, _ = adapted("llama")
    base.get_output_embeddings().weight.requires_grad_(not frozen)
    packed = pack(tiny.forked_samples())
    whole = result(base, adapter, packed, Way.PADDED)
    monkeypatch.setattr(head, "LOGITS", {"cpu": 4 * tiny.VOCAB})
    assert close(result(base, adapter, packed, Way.SEGMENTS), whole)


def test_the_derivative_of_the_head_in_chunks_is_that_of_autograd(monkeypatch):
    monkeypatch.setattr(head, "LOGITS", {"cpu": 3 * 20})
    torch.manual_seed(0)
    linear = torch.nn.Linear(6, 20).requires_grad_(False)
    hidden = torch.randn(7, 6, requires_grad=True)
    heat = torch.linspace(0.5, 1.5, 7)
    rows, tokens = torch.tensor([0, 0, 2, 3, 6]), torch.tensor([1, 5, 19, 0, 7])

    def loss(part):
        logprobs, entropies = part
        return (logprobs * torch.arange(5)).sum() - 0.3 * (entropies * torch.arange(1, 6)).sum()

    for with_entropy in (True, False):
        found = head.score(linear, hidden, heat, rows, tokens, with_entropy)
        expected = head.pick(linear(hidden), heat, rows, tokens, with_entropy)
        for left, right in zip(found, expected, strict=True):
            assert torch.allclose(left, right, atol=1e-5)
        (mine,) = torch.autograd.grad(loss(found), hidden)
        (theirs,) = torch.autograd.grad(loss(expected), hidden)
        assert torch.allclose(mine, theirs, atol=1e-5)


def test_sliding_windows_are_kept_over_a_trie():
    window = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 0}
    base, adapter, way = adapted("qwen3", **window)
    assert way is Way.SEGMENTS
    packed = pack(tiny.forked_samples())
    assert close(
        result(base, adapter, packed, Way.SEGMENTS), result(base, adapter, packed, Way.PADDED)
    )


def test_a_model_with_softcapped_attention_is_taken_padded():
    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 32, "head_dim": 8, "vocab_size": tiny.VOCAB}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Gemma2Config(**size, **heads, initializer_range=0.25, pad_token_id=0)
    assert choose_way(Gemma2ForCausalLM(config).eval()) is Way.PADDED


def test_padded_batches_of_several_samples_give_what_single_ones_give(monkeypatch):
    base, adapter, _ = adapted("llama")
    packed = pack(tiny.forked_samples())
    whole = result(base, adapter, packed, Way.PADDED)
    monkeypatch.setattr(lp, "ROW_TOKENS", 1)
    assert close(result(base, adapter, packed, Way.PADDED), whole)


def test_a_model_that_packing_would_get_wrong_is_taken_padded_and_the_log_says_why(
    monkeypatch, caplog
):
    base = tiny.model("llama")
    real = trie_attention.by_segments

    def blind(trie, query, key, value, scale, window):
        return real(trie, query, key, value, scale * 0.5, window)

    monkeypatch.setattr(trie_attention, "by_segments", blind)
    before = base.config._attn_implementation
    with caplog.at_level("INFO", logger="strop.trainer"):
        assert choose_way(base) is Way.PADDED
    assert "padded rows, because it cannot be packed: packing differs" in caplog.text
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
