"""What a judge is shown."""

from gateway.judge import prompt
from gateway.store.judge_settings import Judge


def test_long_members_are_cut_in_their_middle():
    settings = Judge(model="m", max_chars=500)
    found = prompt.candidates(
        {n: [{"role": "assistant", "content": n * 2000 + "end"}] for n in "ab"}, settings, "g"
    )
    text = prompt.presentations(found, settings, "s")[0][1]["content"]
    assert len(text) < 3000
    assert "characters left out" in text
    assert "aend" in text
