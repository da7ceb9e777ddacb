"""Passes that fit into memory: the budget, what happens when it was too large, what is too long."""

import pytest
import torch

from tests.trainer import tiny
from tests.trainer.test_grpo import step_trainer
from trainer import memory
from trainer.learner import Learner, TooLong
from trainer.logprobs import Way
from trainer.packing import micro_batches, pack, row_tokens, unique_tokens
from trainer.settings import TrainerSettings
from trainer.worker import Visit, Worker


@pytest.fixture
def scarce(monkeypatch):
    """Makes memory run out in a backward pass over more than so many tokens; counts how often."""
    from trainer.grpo import StepTrainer

    real = StepTrainer._compute_loss
    state = {"room": 10**9, "failures": 0}

    def compute(self, model, inputs):
        loss = real(self, model, inputs)
        if len(self._packed.trie.input_ids) > state["room"]:
            # Late, when some of the gradients have been added already.
            parts = [p for p in self.model.parameters() if p.requires_grad]
            for part, grad in zip(parts[:3], torch.autograd.grad(loss, parts[:3]), strict=True):
                part.grad = grad if part.grad is None else part.grad + grad
            state["failures"] += 1
            raise torch.OutOfMemoryError("CUDA out of memory (made up by the test)")
        return loss

    monkeypatch.setattr(StepTrainer, "_compute_loss", compute)
    return state


def episodes(log, base_model, lengths=(4, 4)):
    for number, length in enumerate(lengths):
        log.episodes(base_model, f"g{number}", [1.0, 0.0, 0.3], seed=number, length=length)


def learner_of(log, settings) -> Learner:
    return Learner(log.policy, settings, log.artifacts)


def forked(group: str, seed: int):
    return [s for s in tiny.forked_samples(seed) if s.group_id == group]


def test_a_step_that_ran_out_of_memory_is_taken_again_in_smaller_passes_and_is_the_same(
    make_log, trainer_settings, scarce
):
    log = make_log()
    samples = [*forked("g", 0), *forked("h", 0)]
    whole = learner_of(log, trainer_settings)
    expected = whole.step(samples, lambda: False)
    scarce["room"] = unique_tokens(samples) - 1
    cut = learner_of(log, trainer_settings)
    found = cut.step(samples, lambda: False)
    assert scarce["failures"] >= 1
    assert found.metrics["passes"] > expected.metrics["passes"] == 1
    assert found.metrics["token_budget"] <= scarce["room"]
    assert found.metrics["grad_norm"] == pytest.approx(expected.metrics["grad_norm"], rel=1e-4)
    assert found.metrics["loss"] == pytest.approx(expected.metrics["loss"], rel=1e-4, abs=1e-6)
    for left, right in zip(whole.model.parameters(), cut.model.parameters(), strict=True):
        assert torch.allclose(left, right, atol=2e-6)


def test_a_sample_that_does_not_fit_by_itself_is_said_to_be_too_long(
    make_log, trainer_settings, scarce
):
    learner = learner_of(make_log(), trainer_settings)
    before = [p.clone() for p in learner.model.parameters()]
    samples = forked("g", 0)
    scarce["room"] = max(len(s.token_ids) for s in samples) - 1
    with pytest.raises(TooLong) as raised:
        learner.step(samples, lambda: False)
    assert raised.value.limit <= scarce["room"]
    assert all(torch.equal(a, b) for a, b in zip(before, learner.model.parameters(), strict=True))


def test_a_trajectory_that_did_not_fit_is_left_out_and_the_others_are_trained_on(
    make_log, base_model, trainer_settings, scarce
):
    log = make_log(group_size=3)
    log.episodes(base_model, "g", [1.0, 0.0], seed=1, length=4)
    prompt = list(range(3, 90))
    log.add("g", "long", [tiny.Turn(prompt, [[5, 6, 7]])], reward=0.5)
    scarce["room"] = 60
    worker = Worker(log.database, log.artifacts, trainer_settings)
    visits = [worker.visit(log.policy) for _ in range(2)]
    assert visits == [Visit.FAILED, Visit.STEPPED]
    states = log.states()
    assert states["long"][1] == "too_long"
    assert [states[name][0] for name in ("g-0", "g-1")] == ["used", "used"]


def test_what_is_longer_than_a_budget_that_was_set_is_left_out_at_once(
    make_log, base_model, trainer_settings
):
    log = make_log(group_size=3)
    log.episodes(base_model, "g", [1.0, 0.0], seed=1, length=4)
    log.add("g", "long", [tiny.Turn(list(range(3, 90)), [[5, 6, 7]])], reward=0.5)
    settings = trainer_settings.model_copy(update={"token_budget": 40})
    worker = Worker(log.database, log.artifacts, settings)
    assert worker.visit(log.policy) is Visit.STEPPED
    assert log.states()["long"][1] == "too_long"


def test_a_long_group_is_cut_between_the_threads_of_its_trajectories():
    samples = tiny.forked_samples()
    longest = max(len(s.token_ids) for s in samples)
    cuts = micro_batches(samples, longest)
    assert all(unique_tokens(cut) <= longest for cut in cuts)
    assert sum(map(len, cuts)) == len(samples)


def test_padded_rows_are_counted_with_what_they_repeat():
    samples = tiny.forked_samples()
    total = row_tokens(samples)
    assert total > unique_tokens(samples)
    assert len(micro_batches(samples, total - 1, row_tokens)) > 1
    assert len(micro_batches(samples, total - 1)) == 1


def test_a_larger_model_and_less_memory_make_a_smaller_budget(monkeypatch):
    small, large = tiny.model(), tiny.model("qwen3")
    large.config.num_hidden_layers = 40

    def budget(model, free, way=Way.SEGMENTS, checkpointing=False):
        monkeypatch.setattr(memory, "free_bytes", lambda device: free)
        return memory.token_budget(model, way, checkpointing=checkpointing)

    free = 1 << 27
    assert budget(large, free) < budget(small, free)
    assert budget(small, free // 2) < budget(small, free)
    assert budget(large, free, checkpointing=True) > 4 * budget(large, free)
    assert budget(small, free, Way.PADDED) < budget(small, free)
    assert budget(large, 1) == memory.SMALLEST


def test_free_memory_is_bounded_by_a_containers_limit(monkeypatch, tmp_path):
    (tmp_path / "memory.max").write_text("5000000\n")
    (tmp_path / "memory.current").write_text("2000000\n")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    assert memory.free_bytes(torch.device("cpu")) == 3_000_000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.free_bytes(torch.device("cpu")) > 3_000_000


def test_the_budget_is_an_upper_bound_of_what_a_pass_keeps(tmp_path):
    # Counted by what autograd saves, each storage once.
    trainer = step_trainer(tmp_path)
    base = trainer.model.get_base_model()
    packed = pack(tiny.forked_samples())
    kept: dict[int, int] = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    from trainer.logprobs import trained_logprobs

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logprobs, _ = trained_logprobs(base, packed, Way.SEGMENTS)
    weights = {p.untyped_storage().data_ptr() for p in base.parameters()}
    saved = sum(size for where, size in kept.items() if where not in weights)
    assert logprobs.requires_grad
    tokens = len(packed.trie.input_ids)
    assert saved / tokens <= 2 * memory.token_bytes(base, Way.SEGMENTS, checkpointing=False)


def test_a_budget_is_found_where_none_is_set(make_log):
    found = learner_of(make_log(), TrainerSettings(device="cpu")).token_budget
    assert memory.SMALLEST <= found <= memory.LARGEST
