"""A captured completion → the rows that store it, sharing with the turn before what it repeats."""

from dataclasses import dataclass, field, replace
from typing import Any

from gateway.store import codec
from gateway.store.records import CapturedChoice, CapturedCompletion, Tail

Row = dict[str, Any]


@dataclass(slots=True)
class EncodedCompletion:
    """Rows for the tables, and the tail that each choice leaves for the next turn."""

    trajectory: Row
    group: Row | None
    completion: Row
    choices: list[Row]
    continued: Row | None
    """Completion id and choice that this one continues."""
    tails: dict[bytes, Tail]
    """By thread key."""
    captured: CapturedCompletion | None = field(default=None, compare=False)
    """What it was made of; None where it comes back from a journal."""

    def detach(self) -> None:
        """Store it whole: the turn that it continues is not there any more."""
        if self.captured is not None:
            self.completion = encode(replace(self.captured, tail=None)).completion
            self.continued = None


def encode(captured: CapturedCompletion) -> EncodedCompletion:
    """Rows of one completion. Cost is linear in the request; a thread's storage in its text."""
    ref, tail = captured.trajectory, captured.tail
    messages_shared = _shared_messages(captured.messages, tail)
    request_digest = codec.digest_json(captured.request)
    same_request = tail is not None and tail.request_digest == request_digest
    prompt, prompt_shared, prompt_digest = captured.prompt_ids, 0, None
    if prompt is not None:
        prompt_shared = _shared_prompt(prompt, tail)
        prompt_digest = codec.digest_ids(prompt)
    messages_digest = codec.digest_json(captured.messages)
    choices = [_choice(captured, choice) for choice in captured.choices]
    tails = {
        choice.thread_key: Tail(
            completion_id=captured.id,
            choice=choice.index,
            trajectory_id=ref.id,
            messages_count=len(captured.messages),
            messages_digest=messages_digest,
            request_digest=request_digest,
            prompt_length=len(prompt or ()),
            prompt_digest=prompt_digest,
            sequence_length=len(prompt) + len(choice.token_ids)
            if prompt is not None and choice.token_ids is not None
            else 0,
            sequence_digest=row["sequence_digest"],
        )
        for choice, row in zip(captured.choices, choices, strict=True)
        if choice.thread_key is not None
    }
    completion = {
        "id": captured.id,
        "project": captured.project,
        "trajectory_id": ref.id,
        "parent_id": tail.completion_id if tail else None,
        "parent_choice": tail.choice if tail else None,
        "policy": captured.policy,
        "version": captured.version,
        "served_model": captured.served_model,
        "replica": captured.replica,
        "status": captured.status,
        "http_status": captured.http_status,
        "reason": captured.reason,
        "stream": captured.stream,
        "request": None if same_request else codec.encode_json(captured.request),
        "messages": codec.encode_json(captured.messages[messages_shared:]),
        "messages_shared": messages_shared,
        "messages_count": len(captured.messages),
        "messages_digest": messages_digest,
        "request_digest": request_digest,
        "response": codec.encode_json(captured.response) if captured.response else None,
        "prompt_ids": codec.encode_ids(prompt[prompt_shared:]) if prompt is not None else None,
        "prompt_shared": prompt_shared,
        "prompt_digest": prompt_digest,
        "prompt_tokens": captured.prompt_tokens,
        "completion_tokens": captured.completion_tokens,
        "sampling": captured.sampling,
        "client_metadata": captured.client_metadata,
        "created_at": captured.created_at,
        "first_token_at": captured.first_token_at,
        "finished_at": captured.finished_at,
        "traceparent": ref.traceparent,
    }
    return EncodedCompletion(
        trajectory=_trajectory(captured),
        group=_group(captured) if captured.trained else None,
        completion=completion,
        choices=choices,
        continued={"b_completion": tail.completion_id, "b_index": tail.choice} if tail else None,
        tails=tails,
        captured=captured,
    )


def _shared_messages(messages: list[Any], tail: Tail | None) -> int:
    if tail is None or tail.messages_count > len(messages):
        return 0
    count = tail.messages_count
    return count if codec.digest_json(messages[:count]) == tail.messages_digest else 0


def _shared_prompt(prompt: list[int], tail: Tail | None) -> int:
    # The prompt of a turn begins with the whole sequence of the turn before if its answer is
    # rendered to the tokens that were sampled, else mostly with that turn's prompt.
    if tail is None:
        return 0
    for length, digest in (
        (tail.sequence_length, tail.sequence_digest),
        (tail.prompt_length, tail.prompt_digest),
    ):
        if 0 < length <= len(prompt) and codec.digest_ids(prompt[:length]) == digest:
            return length
    return 0


def _choice(captured: CapturedCompletion, choice: CapturedChoice) -> Row:
    ids, prompt = choice.token_ids, captured.prompt_ids
    known = ids is not None and prompt is not None
    return {
        "completion_id": captured.id,
        "index": choice.index,
        "finish_reason": choice.finish_reason,
        "token_ids": codec.encode_ids(ids) if ids is not None else None,
        "logprobs": codec.encode_logprobs(choice.logprobs) if choice.logprobs is not None else None,
        "sequence_digest": codec.digest_ids([*(prompt or ()), *(ids or ())]) if known else None,
        "thread_key": choice.thread_key,
        "continued": False,
    }


def _trajectory(captured: CapturedCompletion) -> Row:
    ref = captured.trajectory
    return {
        "project": captured.project,
        "id": ref.id,
        "policy": captured.policy,
        "group_id": ref.group_id,
        "parent_id": ref.parent_id,
        "split": ref.split,
        "attribution": ref.attribution,
        "rewarded": False,
        "state": "open",
        "reason": None,
        "step_id": None,
        "created_at": captured.created_at,
        "updated_at": captured.finished_at,
    }


def _group(captured: CapturedCompletion) -> Row:
    return {
        "project": captured.project,
        "policy": captured.policy,
        "id": captured.trajectory.group_id,
        "task": captured.trajectory.task,
        "created_at": captured.created_at,
        "updated_at": captured.finished_at,
        "closed_at": None,
        "lease_owner": None,
        "lease_expires": None,
        "oldest_at": captured.created_at if captured.trajectory.split == "train" else None,
    }
