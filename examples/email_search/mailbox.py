"""A made-up mailbox, a full-text search over it, and questions that one message answers.

Everything comes from a seed and the standard library. The mailbox is a SQLite FTS5 table. Like the
search of most mail programs it joins words with AND: a message is found if it holds every word of
the query, so a needless word finds nothing and too few words find too much. Hits come newest first,
so their order says nothing about which of them is the right one.

Questions are split by sender and by topic: the names and the topics of held-out questions occur in
no training question.
"""

from __future__ import annotations

import random
import re
import sqlite3
from dataclasses import dataclass

# fmt: off
SENDERS = (
    "Alice", "Bruno", "Carla", "Daniel", "Elena", "Felix", "Grace", "Hugo", "Irene", "Jacob",
    "Karen", "Louis", "Maria", "Nathan", "Olivia", "Peter", "Rachel", "Simon", "Teresa", "Victor",
    "Wendy", "Albert", "Diana", "Edward", "Fiona", "Gordon", "Helen", "Isaac", "Julia", "Kevin",
    "Laura", "Martin", "Nora", "Oscar", "Paula", "Robert",
)
TOPICS = (
    "fence", "piano", "sink", "engine", "boat", "wine", "bicycle", "roof", "car", "camera",
    "oven", "skis", "coffee", "mirror", "dog", "permit", "cake", "chair", "guitar", "bed",
    "trailer", "clock", "shelf", "racket", "stove", "carpet", "ladder", "honey", "tires", "desk",
    "printer", "cabin", "kettle", "apples", "canoe", "lamp",
)
# fmt: on

# kind of answer: (how questions ask for it, how the message says it)
KINDS: dict[str, tuple[tuple[str, ...], str]] = {
    "price": (
        ("How much does {sender} want for the {topic}?", "What does {sender} pay for the {topic}?"),
        "It comes to {answer} altogether.",
    ),
    "day": (
        ("When does {sender} need the {topic}?", "When can {sender} bring the {topic}?"),
        "Let us say {answer}, in the morning.",
    ),
    "place": (
        ("Where did {sender} leave the {topic}?", "Where does {sender} keep the {topic}?"),
        "You will find it at {answer}.",
    ),
    "person": (
        ("Who helps {sender} with the {topic}?", "Who sold {sender} the {topic}?"),
        "The one to talk to is {answer}.",
    ),
}
ECHOES = (
    "Have you heard from {sender}? I am waiting for news.",
    "I think {sender} knows more than I do.",
    "{sender} was going to write to you, so I leave it there.",
)


@dataclass(frozen=True)
class Message:
    """One message of the mailbox; `day` counts up from the oldest."""

    id: int
    day: int
    sender: str
    subject: str
    body: str


@dataclass(frozen=True)
class Question:
    """A question, and the one message that answers it."""

    id: str
    text: str
    message_id: int
    answer: str


class Mailbox:
    """Messages in an FTS5 table, with training and held-out questions about them."""

    def __init__(self, messages: list[Message], train: list[Question], held_out: list[Question]):
        self.messages = {message.id: message for message in messages}
        self.train = train
        self.held_out = held_out
        self._db = sqlite3.connect(":memory:", check_same_thread=False)
        self._db.execute(
            "CREATE VIRTUAL TABLE mail USING fts5(sender, subject, body, day UNINDEXED)"
        )
        self._db.executemany(
            "INSERT INTO mail(rowid, sender, subject, body, day) VALUES (?, ?, ?, ?, ?)",
            [(m.id, m.sender, m.subject, m.body, m.day) for m in messages],
        )

    def search(self, query: str, limit: int = 3) -> list[Message]:
        """Return the newest messages that hold every word of the query."""
        words = re.findall(r"\w+", re.sub(r"['’]s\b", "", query))
        if not words:
            return []
        rows = self._db.execute(
            "SELECT rowid FROM mail WHERE mail MATCH ? ORDER BY day DESC LIMIT ?",
            (" ".join(f'"{word}"' for word in words), limit),
        )
        return [self.messages[row[0]] for row in rows]


def _answer(rng: random.Random, kind: str) -> str:
    if kind == "price":
        return f"${rng.randrange(20, 900)}"
    if kind == "day":
        month = rng.choice(("March", "April", "May", "June"))
        return f"{month} {rng.randrange(1, 29)}"
    if kind == "place":
        return f"{rng.randrange(1, 90)} {rng.choice(('Mill', 'Church', 'Station', 'Bridge'))} Road"
    title = rng.choice(("Mr", "Mrs", "Dr"))
    return f"{title} {rng.choice(('Okafor', 'Lindqvist', 'Tanaka', 'Moreau'))}"


def make_mailbox(seed: int = 0, held_out_share: float = 0.45) -> Mailbox:
    """Make a mailbox and its questions; the same seed makes the same ones.

    Every sender writes about five topics of its own side of the split, which questions ask about,
    and about three of the other side, which none does. One or two other people mention the sender
    of each message that is asked about, under the same subject, before or after it.
    """
    rng = random.Random(seed)
    senders, topics = list(SENDERS), list(TOPICS)
    rng.shuffle(senders)
    rng.shuffle(topics)
    sides = []  # (held out, senders, topics, topics of the other side)
    cut_s, cut_t = round(len(senders) * held_out_share), round(len(topics) * held_out_share)
    sides.append((True, senders[:cut_s], topics[:cut_t], topics[cut_t:]))
    sides.append((False, senders[cut_s:], topics[cut_t:], topics[:cut_t]))
    asked_topics: dict[str, list[str]] = {}
    other_topics: dict[str, list[str]] = {}
    for _, names, own, other in sides:
        for name in names:
            asked_topics[name] = rng.sample(own, 5)
            other_topics[name] = rng.sample(other, 3)

    drafts: list[tuple[str, str, str]] = []
    asked: list[tuple[int, bool, str, str]] = []  # draft, held out, question, answer
    for held_out, names, _, _ in sides:
        for sender in names:
            for topic in asked_topics[sender] + other_topics[sender]:
                kind = rng.choice(list(KINDS))
                ways, says = KINDS[kind]
                answer = _answer(rng, kind)
                drafts.append((sender, topic, says.format(answer=answer)))
                if topic in other_topics[sender]:
                    continue
                text = rng.choice(ways).format(sender=sender, topic=topic)
                asked.append((len(drafts) - 1, held_out, text, answer))
                silent = [n for n in senders if topic not in asked_topics[n] + other_topics[n]]
                for name in rng.sample(silent, rng.choice((1, 2))):
                    echo = rng.choice(ECHOES).format(sender=sender)
                    drafts.append((name, topic, echo))

    days = list(range(len(drafts)))
    rng.shuffle(days)
    messages = [
        Message(i + 1, days[i], sender, topic.capitalize(), body)
        for i, (sender, topic, body) in enumerate(drafts)
    ]
    train: list[Question] = []
    held: list[Question] = []
    for draft, held_out, text, answer in asked:
        name = f"{'held-out' if held_out else 'train'}-{seed}-{draft + 1}"
        (held if held_out else train).append(Question(name, text, draft + 1, answer))
    rng.shuffle(train)
    rng.shuffle(held)
    return Mailbox(messages, train, held)
