"""`python -m trainer`: train what the gateway has logged."""

import argparse
import logging
import os
import signal
import sys
from functools import partial
from types import FrameType
from typing import Any

from gateway.store import Database, StoreSettings
from trainer.settings import TrainerSettings


def main() -> int:
    """Run the trainer; returns the process's exit code."""
    if sys.argv[1:2] == ["replay"]:
        from trainer.replay import command

        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            sys.exit("Error: one process takes a step again; start `python -m trainer replay`.")
        return command(sys.argv[2:])
    arguments = _arguments()
    settings = TrainerSettings()
    logging.basicConfig(
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        level=logging.WARNING,
    )
    logging.getLogger("strop").setLevel(settings.log_level.upper())
    store = StoreSettings()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return _one_of_several(arguments, settings, store)
    return _train(arguments, settings, store)


def _one_of_several(
    arguments: argparse.Namespace, settings: TrainerSettings, store: StoreSettings
) -> int:
    """Rank 0 works as a single process does; the others do as it says."""
    from trainer import crew as crews

    crew = crews.join(settings)
    assert crew is not None
    if crew.rank > 0:
        # Launchers send signals to all: the end is rank 0's to say.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        crews.follow(crew, settings.resident_policies)
        return 0
    try:
        return _train(arguments, settings, store, partial(crews.lead, crew))
    finally:
        crews.end(crew)


def _train(
    arguments: argparse.Namespace,
    settings: TrainerSettings,
    store: StoreSettings,
    make_learner: Any = None,
) -> int:
    database = Database(store.url())
    database.migrate()

    # Imported late: a wrong setting is reported before seconds of importing torch.
    from trainer.worker import Worker

    more = {} if make_learner is None else {"make_learner": make_learner}
    worker = Worker(
        database,
        store.artifacts(),
        settings,
        only=arguments.policy,
        until_version=arguments.until_version,
        **more,
    )

    def stop(number: int, _frame: FrameType | None) -> None:
        worker.stop()
        # Whoever asks twice does not want to wait for the pass that is running.
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    try:
        return 0 if worker.run(once=arguments.once) else 1
    finally:
        database.dispose()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m trainer",
        description="Train policies on the completions that were logged.",
        epilog="`python -m trainer replay STEP` takes a step again that was taken before.",
    )
    parser.add_argument(
        "--once",
        action="store_true",
        help="make one pass over what is ready and end; exit code 1 if a step failed",
    )
    parser.add_argument("--policy", metavar="NAME", help="train this policy only")
    parser.add_argument(
        "--until-version", type=int, metavar="N", help="end when the policies have reached this"
    )
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
