"""The OpenAPI description."""

from gateway.app import SURFACES, build


def test_every_surface_is_described_under_both_of_its_paths():
    schema = build().openapi()
    for path in SURFACES:
        for prefix in ("/v1", "/rollouts/{group}/{trajectory}/v1"):
            operation = schema["paths"][f"{prefix}/{path}"]["post"]
            assert operation["summary"]
    names = [o["operationId"] for p in schema["paths"].values() for o in p.values()]
    assert len(names) == len(set(names))
    # OpenAI's stored completions share a path with the route that makes them.
    assert {"get", "post", "delete"} <= set(schema["paths"]["/v1/chat/completions"])
