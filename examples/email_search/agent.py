"""An agent that finds the message that answers a question, in two turns.

It is an ordinary program on the OpenAI SDK. In the first turn the model writes a search query, in
the second it names the hit that it would open. The program knows no answers: it sees the text of
the question and what the search returns. `score` says afterwards what the episode was worth.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from .mailbox import Mailbox, Message, Question

SYSTEM = (
    "Search the mail. Write the name and the thing to search for, then the number of the right hit."
)
# question, query, senders of the hits, the sender and number of the right one
EXAMPLES = (
    ("How much does Omar want for the sofa?", "Omar sofa", ("Lena", "Omar"), "Omar 2"),
    ("When does Ines need the violin?", "Ines violin", ("Ines", "Tom"), "Ines 1"),
    ("Where did Ravi leave the tent?", "Ravi tent", ("Ann", "Ulf", "Ravi"), "Ravi 3"),
    ("Who helps Greta with the boiler?", "Greta boiler", ("Sven", "Greta"), "Greta 2"),
    ("What does Yusuf pay for the drum?", "Yusuf drum", ("Yusuf", "Ida"), "Yusuf 1"),
    ("Who sold Priya the rug?", "Priya rug", ("Emil", "Priya", "Ruth"), "Priya 2"),
    ("When can Marco bring the saw?", "Marco saw", ("Marco", "Jan"), "Marco 1"),
)
FOUND = 0.3  # what it is worth to have the right message among the hits, and open another
MAX_QUERY_TOKENS = 8
MAX_PICK_TOKENS = 5

Chat = list[ChatCompletionMessageParam]


@dataclass
class Episode:
    """What the agent did: its completions, its query, the hits, and the message it picked.

    `versions` holds the version that answered each completion, where the server names one
    (strop answers as `policy@version`).
    """

    question: str
    completion_ids: list[str] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    query: str = ""
    hits: list[Message] = field(default_factory=list)
    answer: str = ""
    pick: Message | None = None


def first_turn(question: str) -> Chat:
    """The chat that asks for a query: worked examples as earlier turns, then the question."""
    chat: Chat = [{"role": "system", "content": SYSTEM}]
    for asked, query, senders, pick in EXAMPLES:
        subject = query.split()[-1]
        chat += [
            {"role": "user", "content": asked},
            {"role": "assistant", "content": query},
            {"role": "user", "content": _show([(subject, sender) for sender in senders])},
            {"role": "assistant", "content": pick},
        ]
    return [*chat, {"role": "user", "content": question}]


def second_turn(chat: Chat, query: str, hits: Sequence[Message]) -> Chat:
    """The same chat, with the model's query as it wrote it and what the search returned."""
    return [
        *chat,
        {"role": "assistant", "content": query},
        {"role": "user", "content": _show([(hit.subject, hit.sender) for hit in hits])},
    ]


def parse_pick(answer: str, hits: Sequence[Message]) -> Message | None:
    """The hit whose number is the first number in the answer, if there is one."""
    found = re.search(r"\d+", answer)
    number = int(found.group()) if found else 0
    return hits[number - 1] if 1 <= number <= len(hits) else None


async def run_episode(
    client: AsyncOpenAI,
    model: str,
    question: str,
    mailbox: Mailbox,
    *,
    group: str | None = None,
    trajectory: str | None = None,
    split: str | None = None,
    temperature: float = 1.0,
) -> Episode:
    """Answer one question. `group`, `trajectory` and `split` tell strop what belongs together."""
    marks = {
        "X-Strop-Group": group,
        "X-Strop-Trajectory": trajectory,
        "X-Strop-Split": split,
    }
    headers = {name: value for name, value in marks.items() if value is not None}
    episode = Episode(question)

    async def ask(chat: Chat, max_tokens: int) -> str:
        completion = await client.chat.completions.create(
            model=model,
            messages=chat,
            max_tokens=max_tokens,
            temperature=temperature,
            extra_headers=headers,
        )
        episode.completion_ids.append(completion.id)
        version = completion.model.rpartition("@")[2]
        if version.isdecimal() and "@" in completion.model:
            episode.versions.append(int(version))
        return completion.choices[0].message.content or ""

    chat = first_turn(question)
    episode.query = await ask(chat, MAX_QUERY_TOKENS)
    episode.hits = mailbox.search(episode.query)
    if episode.hits:
        chat = second_turn(chat, episode.query, episode.hits)
        episode.answer = await ask(chat, MAX_PICK_TOKENS)
        episode.pick = parse_pick(episode.answer, episode.hits)
    return episode


def score(question: Question, episode: Episode) -> float:
    """1 if the agent picked the message that answers, 0.3 if it only found it, else 0."""
    if episode.pick is not None and episode.pick.id == question.message_id:
        return 1.0
    return FOUND if any(hit.id == question.message_id for hit in episode.hits) else 0.0


def _show(lines: Sequence[tuple[str, str]]) -> str:
    """Hits as the model sees them, one a line: subject, sender, number."""
    return "\n".join(
        f"{subject.lower()} {sender} {number}" for number, (subject, sender) in enumerate(lines, 1)
    )
