"""Compact binary forms."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.store import codec


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_ids_come_back_as_they_were(ids):
    assert codec.decode_ids(codec.encode_ids(ids)) == ids


def test_ids_take_the_width_that_the_largest_needs():
    assert len(codec.encode_ids([255] * 10)) == 11
    assert len(codec.encode_ids([49_151] * 10)) == 21
    assert len(codec.encode_ids([151_000] * 10)) == 31


@pytest.mark.parametrize("wrong", [-1, 2**32])
def test_ids_that_are_no_ids_are_refused(wrong):
    with pytest.raises(ValueError, match="token ids"):
        codec.encode_ids([1, wrong])


@given(st.lists(st.floats(width=32, allow_nan=False)))
def test_logprobs_keep_float32(values):
    assert codec.decode_logprobs(codec.encode_logprobs(values)) == values


def test_a_masked_logprob_survives():
    values = codec.decode_logprobs(codec.encode_logprobs([-math.inf, -9999.0, 0.0]))
    assert values == [-math.inf, -9999.0, 0.0]


def test_json_is_deflated_only_where_that_helps():
    small, large = {"a": 1}, {"a": "word " * 200}
    assert codec.decode_json(codec.encode_json(small)) == small
    assert codec.decode_json(codec.encode_json(large)) == large
    assert len(codec.encode_json(large)) < 100
