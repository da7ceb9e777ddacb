"""`POST /v1/embeddings`."""

import pytest
from openai import APIStatusError, NotFoundError

from gateway.store import queries
from tests.gateway.conftest import Running


async def test_embeddings_come_from_a_replica_and_are_not_logged(strop: Running):
    for model in ("agent", strop.vllm.model):
        reply = await strop.client.embeddings.create(
            model=model, input=["aaa", "eo"], encoding_format="float"
        )
        assert [item.embedding for item in reply.data] == [[3, 0, 0, 0], [0, 1, 0, 1]]
        assert reply.model == model
    with strop.gateway.database.read() as connection:
        assert queries.groups(connection, "default", now=0) == []


async def test_bad_requests_are_named(strop: Running):
    with pytest.raises(NotFoundError):
        await strop.client.embeddings.create(model="none", input="x")
    for body, param in (({"input": "x"}, "model"), ({"model": "agent"}, "input")):
        status, answer = await strop.post("/v1/embeddings", body)
        assert (status, answer["error"]["param"]) == (400, param)


async def test_no_replica_is_a_503(strop: Running):
    await strop.vllm.stop()
    with pytest.raises(APIStatusError) as caught:
        await strop.client.embeddings.create(model="agent", input="x")
    assert caught.value.status_code == 503
