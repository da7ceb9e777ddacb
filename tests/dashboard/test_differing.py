"""What a group's page marks: the words of an answer that the best one does not have there."""

import html
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from sqlalchemy import select, update

from gateway.dashboard import conversation
from gateway.dashboard.conversation import differing
from gateway.store import codec
from gateway.store.models import Completion
from tests.dashboard import seed
from tests.gateway.conftest import Running

words = st.lists(st.sampled_from(["a", "b", "<b>", "&", '"', "é", "", "\n"]), max_size=12)
texts = words.map(" ".join)


def parts(marked: str) -> tuple[str, list[str]]:
    """The text without its marks, and what is marked."""
    plain = re.sub("</?mark>", "", marked)
    return html.unescape(plain), [
        html.unescape(part) for part in re.findall("<mark>(.*?)</mark>", marked, re.DOTALL)
    ]


@given(texts, texts)
@example("<script>alert(1)</script>", "<mark>")
@example("", "a")
def test_nothing_is_lost_or_run_and_equal_texts_have_no_marks(text: str, other: str):
    shown = differing(text, other)
    assert re.sub("</?mark>", "", shown).count("<") == 0
    plain, marked = parts(shown)
    assert plain == text
    assert (marked == []) if text == other else True
    # What is not marked is said by the other, in the same order.
    kept = re.sub(r"<mark>.*?</mark>", "\0", shown, flags=re.DOTALL)
    rest = other
    for piece in html.unescape(kept).split("\0"):
        for word in piece.split(" "):
            at = rest.find(word)
            assert at >= 0
            rest = rest[at + len(word) :]


@pytest.mark.parametrize(
    ("text", "other", "marked"),
    [
        ("It is in /tmp now", "It is in /home now", ["/tmp"]),
        ("It is", "It is not", []),
        ("It is not", "It is", [" not"]),
        ("yes", "no", ["yes"]),
        ("yes", "", ["yes"]),
    ],
)
def test_words_that_the_other_does_not_say_there(text: str, other: str, marked: list[str]):
    assert parts(differing(text, other))[1] == marked


def test_very_long_answers_are_shown_without_marks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(conversation, "_MOST_WORDS", 5)
    assert "<mark>" in differing("a b", "a c")
    assert "<mark>" not in differing("a b c <", "a c")
    assert "<mark>" not in differing("a c", "a b c <")


async def test_the_best_answer_comes_first_and_others_are_marked_against_it(strop: Running):
    ids = await seed.three(strop)
    # Of the first trajectory the second turn is the last answer.
    says = {ids[3]: "It lies in May &co", ids[1]: "It lies in <i>June</i> &co", ids[2]: "No"}
    with strop.gateway.database.write() as connection:
        for id, text in says.items():
            query = select(Completion.response).where(Completion.id == id)
            response = codec.decode_json(connection.execute(query).scalar_one())
            response["choices"][0]["message"] = {"role": "assistant", "content": text}
            connection.execute(
                update(Completion)
                .where(Completion.id == id)
                .values(response=codec.encode_json(response))
            )
    async with strop.http.get(strop.url + "/groups/agent/invoice%20of%20May") as answer:
        page = await answer.text()
    cards = page.split('<section class="card"')[1:]
    assert [re.search(r'aria-label="Trajectory (.*?)"', card)[1] for card in cards] == [
        "run/0",
        "run/1",
        "run/2",
    ]
    assert [parts(card)[1] for card in cards] == [[], ["<i>June</i>"], ["No"]]
    assert "It lies in May &amp;co" in cards[0]
    assert "<i>" not in page
