"""Bytes that a trajectory takes in the database, per token, as it grows.

An agent's conversation of 60 KB and 32 turns is stored turn by turn, with token ids of the bundled
model's width (49,152 entries; two bytes) and one logprob a sampled token. Tokens are counted once:
those of the last turn's prompt and answer. Bytes are those of the SQLite file, indexes included,
after `VACUUM`, less what it takes empty.
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from pathlib import Path

from gateway.capture.threads import beginnings, extend
from gateway.store import Database
from gateway.store.ids import new_id
from gateway.store.records import CapturedChoice, CapturedCompletion, TrajectoryRef
from gateway.store.writer import Writer

WORDS = [f"{a}{b}" for a in "bcdfghklmnprst" for b in ("an", "el", "ir", "ot", "um", "arel", "ost")]
BYTES_PER_TOKEN = 4
"""Of text; what English and JSON take with a vocabulary of 49,152."""


def text(rng: random.Random, size: int) -> str:
    """Words that compress about as well as prose: drawn from a skewed distribution."""
    words: list[str] = []
    length = 0
    while length < size:
        word = WORDS[min(int(rng.expovariate(0.06)), len(WORDS) - 1)]
        words.append(word + rng.choice(("", "", "", "s", "ed", ",", ".")))
        length += len(words[-1]) + 1
    return " ".join(words)


def ids(rng: random.Random, size: int) -> list[int]:
    return [rng.randrange(49_152) for _ in range(size // BYTES_PER_TOKEN)]


async def trajectory(writer: Writer, name: str, turns: int, size: int, seed: int) -> int:
    """Store one trajectory of about `size` bytes of text; returns its tokens."""
    rng = random.Random(seed)
    per_turn = size // turns
    messages = [{"role": "system", "content": text(rng, 2_000)}]
    prompt = ids(rng, 2_000)
    tail = None
    for turn in range(turns):
        asked, said = per_turn * 2 // 3, per_turn // 3
        messages.append({"role": "user", "content": text(rng, asked)})
        prompt += ids(rng, asked)
        answer = ids(rng, said)
        message = {"role": "assistant", "content": text(rng, said)}
        key = extend(beginnings(messages)[1], message)
        logprobs = [-rng.expovariate(1.0) for _ in answer]
        captured = CapturedCompletion(
            id=new_id("chatcmpl-"),
            project="default",
            trajectory=TrajectoryRef(name, f"group-{seed % 8}", "continuation"),
            policy="agent",
            version=0,
            trained=True,
            messages=list(messages),
            request={"model": "agent", "temperature": 1.0, "max_tokens": 256},
            stream=False,
            created_at=time.time(),
            finished_at=time.time(),
            tail=tail,
            sampling={"temperature": 1.0, "top_p": 1.0, "top_k": -1},
            served_model="agent@0",
            replica="http://127.0.0.1:8001",
            response={
                "id": new_id("chatcmpl-"),
                "object": "chat.completion",
                "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
                "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(answer)},
            },
            prompt_ids=list(prompt),
            prompt_tokens=len(prompt),
            completion_tokens=len(answer),
            choices=[CapturedChoice(0, "stop", answer, logprobs, key)],
        )
        tail = (await writer.store(captured))[key]
        messages.append(message)
        prompt += answer
    return len(prompt)


async def measure(turns: int, size: int, trajectories: int) -> dict[str, float]:
    """Bytes per token for trajectories of so many turns."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "strop.db"
        database = Database(f"sqlite:///{path}")
        database.migrate()
        empty = _size(database, path)
        writer = Writer(database)
        writer.start()
        tokens = sum(
            await asyncio.gather(
                *(trajectory(writer, f"t{i}", turns, size, i) for i in range(trajectories))
            )
        )
        await writer.close()
        used = _size(database, path) - empty
        database.dispose()
    return {"turns": turns, "tokens": tokens, "bytes": used, "bytes_per_token": used / tokens}


def _size(database: Database, path: Path) -> int:
    with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        raw = connection.connection.driver_connection
        assert raw is not None
        raw.execute("VACUUM")
        raw.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return path.stat().st_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trajectories", type=int, default=50)
    parser.add_argument("--quick", action="store_true", help="few trajectories")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    count = 4 if options.quick else options.trajectories
    # The same amount of text a turn, so that only the number of turns changes.
    rows = [
        asyncio.run(measure(turns, 60_000 * turns // 32, count)) for turns in (4, 8, 16, 32, 64)
    ]
    for row in rows:
        print(
            f"{row['turns']:>3} turns: {row['bytes_per_token']:5.2f} bytes a token "
            f"({row['bytes']:,} bytes, {row['tokens']:,} tokens)"
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
