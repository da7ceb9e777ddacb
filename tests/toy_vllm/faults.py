"""What a gateway has to survive."""

from dataclasses import dataclass

from tests.toy_vllm.replies import Reply, Step
from tests.toy_vllm.requests import ApiError


@dataclass
class Faults:
    """Ways to misbehave. The first group is about any reply, the second about the admin routes."""

    drop_token_ids: bool = False
    """Leave every token id out, as if the server did not know `return_token_ids`."""
    mismatch: bool = False
    """One token id fewer than there are logprobs, in each choice."""
    drop_ids_of_calls: bool = False
    """In streams, no ids with the chunks of a tool call, as some releases do (vllm#27482)."""
    wrong_usage: bool = False
    """`usage` counts one token more than were sampled."""
    wrong_model_name: str | None = None
    """Answer with this `model`, whatever was asked for."""
    ignore_adapters: bool = False
    """Answer from the base model under every adapter's name."""
    tokens_per_chunk: int = 1
    """How many tokens a chunk of a stream brings; more than one under load."""
    slow: float = 0.0
    """Seconds before each token."""
    die_mid_stream: int | None = None
    """Cut the connection after this many chunks."""
    error_mid_stream: int | None = None
    """After this many chunks send an error object and end, as vLLM does when its engine dies."""
    broken_json: bool = False
    """Cut the JSON body, or each chunk of a stream, in half."""
    status: int = 500
    status_times: int = 0
    """Answer so many requests with `status`; −1: all of them."""

    unhealthy: bool = False
    """`/health` answers 503."""
    load_status: int = 500
    load_times: int = 0
    """Refuse so many loads of an adapter with `load_status`; −1: all of them."""
    load_slow: float = 0.0
    """Seconds that a load takes."""

    def refuse(self) -> None:
        """Fail a request that is to fail.

        Raises:
            ApiError: with `status`.
        """
        if self.status_times:
            self.status_times -= 1
            raise ApiError("told to fail", "InternalServerError", code=self.status)

    def distort(self, reply: Reply) -> None:
        """Put the faults of the reply's content into it."""
        reply.model = self.wrong_model_name or reply.model
        reply.extra_usage = int(self.wrong_usage)
        if self.drop_token_ids:
            reply.request.return_token_ids = False
        for choice in reply.choices:
            size = self.tokens_per_chunk
            if size > 1 and not any(step.delta for step in choice.steps):
                starts = range(0, len(choice.steps), size)
                choice.steps = [Step.joined(choice.steps[at : at + size]) for at in starts]
            for step in choice.steps:
                if self.drop_ids_of_calls and reply.request.stream and step.delta:
                    step.token_ids = []
            if self.mismatch:
                choice.steps[-1].token_ids.pop()
