"""strop's trainer and TRL's GRPOTrainer on the same logged groups, side by side.

    python -m benchmarks.trainer [--json FILE] [--quick] [--model FOLDER] [--steps N]

Both take the same optimiser step: the same base model in float32, the same LoRA, the same episodes
and rewards, and in the end the same gradient, which is checked. TRL runs with its own defaults,
gradient checkpointing among them, and gets one row for each answer; what strop does around the
step is counted too: claiming the group, probing, saving the version, recording it. Each side is a
process of its own. The share outside is what is neither forward, backward nor optimiser; the probe
that tells a version from its parent is two short forwards, so that share is given without them and
with them. Peak memory is the process's resident set at its largest within a step; "added"
is what of it came on top of what was resident before the step, the model above all.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

MODEL = Path(".strop/models/smollm2-135m")
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Case:
    """Episodes of one group that begin with `shared` tokens and alternate answers and replies."""

    name: str
    shared: int
    episodes: int
    turns: int
    answer: int
    between: int
    scale_rewards: str
    steps: int
    model: str
    """A folder, or empty for a tiny model that is made up."""


def cases(model: str, steps: int, quick: bool) -> list[Case]:
    # With a row for each turn TRL's standard deviation would be over turns, not over episodes.
    if quick:
        return [
            Case("flat", 64, 4, 1, 8, 0, "group", steps, model),
            Case("agents", 64, 4, 4, 8, 8, "none", steps, model),
        ]
    return [
        Case("flat", 512, 8, 1, 64, 0, "group", steps, model),
        Case("agents", 512, 8, 6, 64, 64, "none", 1, model),
    ]


def measure(case: Case, folder: Path) -> dict[str, Any]:
    """Run both sides of a case, and compare what came of it."""
    folder.mkdir()
    (folder / "case.json").write_text(json.dumps(asdict(case)))
    env = {
        "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
        "HF_HUB_OFFLINE": "1",
        # Its rollout function is "experimental", which it would say each time.
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "PYTHONWARNINGS": "ignore",
        **os.environ,
    }
    for side in ("log", "strop", "trl"):
        command = [sys.executable, "-m", "benchmarks.trainer_sides", side, str(folder)]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    trl, strop = (json.loads((folder / f"{side}.json").read_text()) for side in ("trl", "strop"))
    difference = gradient_difference(folder)
    if difference > TOLERANCE:
        raise SystemExit(f"{case.name}: the gradients differ by {difference:.2g}: no comparison")
    return {
        "name": case.name,
        "trl": trl,
        "strop": strop,
        "gradient_difference": difference,
        "time_ratio": trl["median_seconds"] / strop["median_seconds"],
        "peak_memory_ratio": trl["peak_bytes"] / strop["peak_bytes"],
        "added_memory_ratio": (trl["peak_bytes"] - trl["rest_bytes"])
        / max(1, strop["peak_bytes"] - strop["rest_bytes"]),
        "outside": statistics.median(strop["outside"]),
        "outside_with_probe": statistics.median(strop["outside_with_probe"]),
    }


def gradient_difference(folder: Path) -> float:
    """Norm of the difference of the two gradients, relative to TRL's."""
    trl, strop = (torch.load(folder / f"{side}.pt") for side in ("trl", "strop"))
    assert trl.keys() == strop.keys()
    wanted, found = (torch.cat([part[n].flatten() for n in trl]) for part in (trl, strop))
    return float((found - wanted).norm() / wanted.norm())


def show(found: dict[str, Any]) -> None:
    """One line for each side, and one of ratios."""
    for side in ("trl", "strop"):
        numbers = found[side]
        print(
            f"{found['name']:<7} {side:<6} {numbers['median_seconds']:8.2f} s"
            f"   peak {numbers['peak_bytes'] / 2**20:6.0f} MiB"
            f"   added {(numbers['peak_bytes'] - numbers['rest_bytes']) / 2**20:6.0f} MiB"
        )
    print(
        f"{found['name']:<7} TRL ÷ strop: time {found['time_ratio']:.2f}, peak memory "
        f"{found['peak_memory_ratio']:.2f}, added memory {found['added_memory_ratio']:.2f}; "
        f"outside forward, backward, optimiser {100 * found['outside']:.1f} %, "
        f"with the probe's forwards {100 * found['outside_with_probe']:.1f} %; "
        f"gradients differ by {found['gradient_difference']:.1e}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Steps of strop's trainer and of TRL's.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--quick", action="store_true", help="a tiny model and short episodes")
    parser.add_argument("--model", type=Path, default=MODEL, help="folder of the base model")
    parser.add_argument("--steps", type=int, default=3, help="steps of the flat case")
    parser.add_argument("--only", choices=("flat", "agents"))
    options = parser.parse_args()
    model = ""
    if not options.quick:
        from trainer.base_model import unpack

        model = str(unpack(options.model))
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        for case in cases(model, options.steps, options.quick):
            if options.only in (None, case.name):
                results.append(measure(case, Path(scratch) / case.name))
                show(results[-1])
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
