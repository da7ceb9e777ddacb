"""Adapters of a batch as products, against each row by itself with its own adapter."""

import subprocess
import sys
from itertools import groupby

import pytest

torch = pytest.importorskip("torch")

from gateway.backends.vllm_lora import add, of_one_prompt, part  # noqa: E402

SLOTS, RANK, WIDTH, OUT = 3, 4, 10, (6, 2, 2)
BATCHES = {
    "one adapter": [1] * 7,
    "adapters side by side": [0, 0, 2, 2, 2, 1],
    "adapters in turn": [0, 1, 0, 1, 1, 0, 2],
    "base rows between": [-1, 0, -1, 2, 0, -1],
    "base rows only": [-1, -1],
    "no rows": [],
}


def layer(rows: int, dtype: torch.dtype):
    """Output, input, and the adapters of a layer with three parts, as vLLM stacks them."""
    made = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=made).to(dtype)

    a = tuple(random(SLOTS, 1, RANK, WIDTH) for _ in OUT)
    b = tuple(random(SLOTS, 1, out, RANK) for out in OUT)
    return random(rows, sum(OUT)), random(rows, WIDTH), a, b


@pytest.mark.parametrize("slots", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 0.15)])
def test_each_row_gets_its_own_adapter(slots: list[int], dtype: torch.dtype, close: float):
    y, x, a, b = layer(len(slots), dtype)
    expected = y.double()
    for row, slot in enumerate(slots):
        if slot >= 0:
            parts = [
                0.5 * b[i][slot, 0].double() @ (a[i][slot, 0].double() @ x[row].double())
                for i in range(len(OUT))
            ]
            expected[row] += torch.cat(parts)
    add(part(torch.tensor(slots, dtype=torch.long)), y, x, a, b, 0.5, OUT)
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), expected, atol=close, rtol=close)


@pytest.mark.parametrize("slots", BATCHES.values(), ids=BATCHES)
def test_every_row_with_an_adapter_is_in_one_part(slots: list[int]):
    found = part(torch.tensor(slots, dtype=torch.long))
    numbers = torch.arange(len(slots))
    rows = {slot: numbers[rows].tolist() for slot, rows in found}
    assert rows == {
        slot: [row for row, _ in of_slot]
        for slot, of_slot in groupby(
            sorted(enumerate(slots), key=lambda one: one[1]), key=lambda one: one[1]
        )
        if slot >= 0
    }


def test_rows_that_lie_together_are_not_copied():
    found = part(torch.tensor([2, 2, 0, 0, 0]))
    assert found == [(2, slice(0, 2)), (0, slice(2, 5))]


def test_a_prompt_at_the_lm_head_needs_no_adapter_where_none_changes_it():
    assert of_one_prompt(torch.tensor([0, 1, 1]), torch.zeros(2, 1, 5, 4)) == []


def test_a_prompt_at_the_lm_head_has_the_one_adapter_of_the_batch():
    b = torch.ones(2, 1, 5, 4)
    assert of_one_prompt(torch.tensor([1]), b) == [(1, slice(None))]
    assert of_one_prompt(torch.tensor([1, 1]), b) == [(1, slice(None))]
    assert of_one_prompt(torch.tensor([-1]), b) == []
    with pytest.raises(NotImplementedError, match="several adapters"):
        of_one_prompt(torch.tensor([1, 0]), b)


@pytest.mark.vllm
def test_the_vllm_that_is_installed_takes_it():
    code = """
from gateway.backends import vllm_lora
vllm_lora.register()
vllm_lora.register()  # as vLLM may
import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.lora.layers import LoRAMapping
wrapper = PunicaWrapperCPU(64, 8, "cpu")
slots = [0, 0, 1, 1, 1]
ids = [7, 9]
a, b = torch.randn(2, 1, 4, 6), torch.randn(2, 1, 3, 4)
for prefill in (True, False):
    of_rows = tuple(ids[slot] for slot in slots)
    mapping = LoRAMapping(of_rows, (7, 9), is_prefill=prefill)
    wrapper.update_metadata(mapping, ids, 2, 32)
    y, x = torch.zeros(5, 3), torch.randn(5, 6)
    wrapper.add_lora_linear(y, x, (a,), (b,), 2.0, (3,))
    for row, slot in enumerate(slots):
        truth = 2.0 * b[slot, 0] @ (a[slot, 0] @ x[row])
        torch.testing.assert_close(y[row], truth, atol=1e-5, rtol=1e-5)
    y, x = torch.zeros(2, 4), torch.randn(2, 6)  # logits padded by one
    wrapper.add_lora_logits(y, x, a, b, 2.0)
    for row in (0, 1):
        truth = torch.cat([2.0 * b[row, 0] @ (a[row, 0] @ x[row]), torch.zeros(1)])
        torch.testing.assert_close(y[row], truth, atol=1e-5, rtol=1e-5)
    y, x = torch.zeros(9, 3), torch.randn(9, 6)  # a prompt of nine tokens
    wrapper.add_lora_logits(y, x, a, torch.zeros_like(b), 2.0)
    assert not y.any()
print("equal")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip().endswith("equal"), done.stderr
