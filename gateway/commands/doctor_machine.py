"""What `strop doctor` looks at beside vLLM: settings, database, disk, keys, gateway, training."""

import base64
import difflib
import importlib.util
import os
import shutil
import time
import tomllib
from collections.abc import Iterator
from typing import Any

from alembic.script import ScriptDirectory
from sqlalchemy import select, text
from sqlalchemy.exc import SQLAlchemyError

from gateway.auth import is_loopback
from gateway.commands.findings import Finding, clock, doubtful, fetch, good, note, wrong
from gateway.settings import Settings
from gateway.store import Database, keys
from gateway.store.census import take
from gateway.store.database import MIGRATIONS
from gateway.store.models import Step
from gateway.store.settings import config_file
from gateway.webhooks import secret_of

_FREE_BYTES = 5 * 2**30
_SLOW_COMMIT = 0.05
_OTHER_VARIABLES = frozenset({"config", "api_key", "url"})
"""Read elsewhere than in the settings: `STROP_CONFIG` and those of the command line."""


def unknown_settings() -> Iterator[Finding]:
    """Names in strop.toml and the environment that nothing reads: mostly typing errors."""
    known = set(Settings.model_fields)
    file = config_file()
    names: dict[str, str] = {}
    if file.exists():
        try:
            names = {name: f"{name} in {file}" for name in tomllib.loads(file.read_text())}
        except (tomllib.TOMLDecodeError, OSError) as error:
            yield wrong("settings", f"{file} cannot be read: {error}", "Correct that line.")
    elif "STROP_CONFIG" in os.environ:
        yield wrong("settings", f"there is no {file}", "Correct STROP_CONFIG.")
    for variable in sorted(os.environ):
        if variable.startswith("STROP_") and not variable.startswith("STROP_TEST_"):
            name = variable.removeprefix("STROP_").partition("__")[0].lower()
            if name not in _OTHER_VARIABLES:
                names[name] = variable
    for name, where in names.items():
        if name in known or name == "trainer" or name.startswith("trainer_"):
            continue
        near = difflib.get_close_matches(name, known, 1)
        fix = f"Did you mean {near[0]}?" if near else "Take it out; gateway/settings.py has all."
        yield doubtful("settings", f"{where} is read by nothing", fix)


def database(settings: Settings) -> Iterator[tuple[Finding, Database | None]]:
    """Whether it answers, is up to date, and commits quickly."""
    about = "database"
    try:
        opened = Database(settings.url())
        with opened.read() as connection:
            connection.execute(text("SELECT 1"))
    except (SQLAlchemyError, ValueError, OSError) as error:
        yield (
            wrong(
                about,
                f"it does not answer: {str(error).splitlines()[0]}",
                "Check database_url, and that PostgreSQL runs and lets this machine in.",
            ),
            None,
        )
        return
    kind = "SQLite" if opened.is_sqlite else "PostgreSQL"
    head = ScriptDirectory(str(MIGRATIONS)).get_current_head()
    with opened.read() as connection:
        has = opened.engine.dialect.has_table(connection, "alembic_version")
        query = text("SELECT version_num FROM alembic_version")
        now = connection.execute(query).scalar() if has else None
    if now != head:
        what = f"its schema is at {now}, this strop's at {head}" if now else "it has no tables yet"
        yield wrong(about, what, "Run `strop migrate`, or start the gateway, which does it."), None
        return
    began = time.monotonic()
    try:
        with opened.write() as connection:
            connection.execute(text("CREATE TEMPORARY TABLE strop_doctor (a INTEGER)"))
            connection.execute(text("DROP TABLE strop_doctor"))
    except SQLAlchemyError as error:
        yield (
            wrong(
                about,
                f"it cannot be written to: {str(error).splitlines()[0]}",
                "Give the user of database_url the right to write, or free the disk.",
            ),
            opened,
        )
        return
    took = time.monotonic() - began
    if took > _SLOW_COMMIT:
        yield (
            doubtful(
                about,
                f"{kind} took {took * 1000:.0f} ms for a transaction; every reply waits for one",
                "Put it on a local SSD, or nearer to the gateway.",
            ),
            opened,
        )
    else:
        yield good(about, f"{kind} answers, up to date ({head})"), opened
    if not opened.is_sqlite:
        with opened.read() as connection:
            query = text("SELECT extract(epoch FROM clock_timestamp())")
            theirs = connection.execute(query).scalar()
        found = clock(about, float(theirs) if theirs is not None else None)
        if found is not None:
            yield found, opened


def disk(settings: Settings) -> Iterator[Finding]:
    """Whether data and artifacts can be written, and have room."""
    for about, folder in (("data_dir", settings.data_dir), ("artifacts", settings.artifacts())):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe = folder / f".strop-doctor-{os.getpid()}"
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            yield wrong(about, f"{folder}: {error}", f"Make {folder} writable, or set {about}.")
            continue
        free = shutil.disk_usage(folder).free
        if free < _FREE_BYTES:
            yield doubtful(
                about,
                f"{folder} has {free / 2**30:.1f} GiB left; versions and the log grow",
                "Free some, set retention_days, or keep fewer checkpoints.",
            )
        else:
            yield good(about, f"{folder} can be written and has {free / 2**30:.0f} GiB left")


def keys_and_address(settings: Settings, database: Database | None) -> Iterator[Finding]:
    """Whether somebody can ask who should not, or cannot who should."""
    if database is None:
        return
    with database.read() as connection:
        exist = keys.any_exist(connection) or bool(settings.admin_key)
        secret = os.environ.get("STROP_API_KEY")
        mine = keys.find(connection, keys.digest(secret)) if secret else None
    open_door = not is_loopback(settings.host)
    if open_door and not exist:
        yield wrong(
            "keys",
            f"strop would listen on {settings.host} without any key, and refuses to",
            "Make one with `strop keys create`, or set host to 127.0.0.1.",
        )
    elif not exist:
        yield good("keys", "there are none: strop answers this machine only, without one")
    elif secret is None:
        yield note(
            "keys",
            "keys are needed, and STROP_API_KEY is not set: the command line cannot ask",
            "export STROP_API_KEY=sk-strop-…, from `strop keys create`.",
        )
    elif mine is None and secret != settings.admin_key:
        yield wrong(
            "keys",
            "STROP_API_KEY is not known, or was revoked",
            "Take one that `strop keys list` shows as valid, or make a new one.",
        )
    else:
        scopes = ", ".join(sorted(mine.scopes)) if mine else "everything"
        yield good("keys", f"STROP_API_KEY is valid, for {scopes}")


def gateway(settings: Settings, answers: dict[str, Any]) -> Iterator[Finding]:
    """Whether it runs, and is ready. What it says of its replicas is left in `answers`."""
    host = "127.0.0.1" if settings.host in ("0.0.0.0", "::") else settings.host
    url = os.environ.get("STROP_URL", f"http://{host}:{settings.port}")
    answer = fetch(url + "/readyz")
    if answer.status == 0:
        yield note("gateway", f"nothing answers at {url}: {answer.body}", "`strop up` starts it.")
        return
    if not isinstance(answer.body, dict) or "problems" not in answer.body:
        yield wrong(
            "gateway",
            f"what answers at {url} is not strop",
            "Stop it, or set STROP_PORT to another port.",
        )
        return
    answers["readyz"] = answer.body
    if answer.body["ready"]:
        yield good("gateway", f"{url} is ready")
    for problem in answer.body["problems"]:
        yield wrong("gateway", problem, "What is found about vLLM below says more.")
    for name, failure in answer.body["failed_versions"].items():
        yield doubtful(
            "gateway",
            f"{name} failed its probe: {failure.get('error')}",
            "vLLM must compute in the trainer's dtype, with the same base model.",
        )
    found = clock("gateway", answer.date)
    if found is not None:
        yield found


def training(database: Database | None) -> Iterator[Finding]:
    """Whether groups that are ready are being trained on."""
    if database is None:
        return
    with database.read() as connection:
        counts = take(connection)
        newest = connection.execute(
            select(Step.state, Step.error, Step.policy).order_by(Step.id.desc()).limit(1)
        ).one_or_none()
    ready = {key[1]: n for key, n in counts.groups.items() if key[2] == "ready"}
    if newest is not None and newest[0] == "failed":
        yield doubtful(
            "training",
            f"the newest step of {newest[2]} failed: {newest[1]}",
            f"`strop step list {newest[2]}` shows the others.",
        )
    now = time.time()
    for (project, policy), since in counts.oldest_ready.items():
        last = counts.last_step.get((project, policy), 0.0)
        if now - max(since, last) > 3600:
            yield doubtful(
                "training",
                f"{policy} has had ready groups for {(now - since) / 3600:.1f} h and took no step",
                "Run `strop train`, or `strop up`, and see its log.",
            )
    if importlib.util.find_spec("trl") is None:
        yield note("training", "no trainer is installed here", "pip install strop[trainer]")
    elif not ready:
        yield good("training", "nothing that is ready waits")
    else:
        yield good("training", ", ".join(f"{n} groups of {p} are ready" for p, n in ready.items()))


def webhooks(settings: Settings) -> Iterator[Finding]:
    """Whether each has its secret."""
    for name, webhook in settings.webhooks.items():
        try:
            secret_of(name, webhook)
        except ValueError as error:
            yield wrong("webhooks", str(error), f"export {webhook.secret_env}=…")
        else:
            yield good("webhooks", f"{name} has its secret")


def langfuse(settings: Settings) -> Iterator[Finding]:
    """Whether it answers, and takes the keys."""
    for name, project in settings.langfuse.projects.items():
        pair = f"{project.public_key}:{project.secret_key}".encode()
        headers = {"authorization": "Basic " + base64.b64encode(pair).decode()}
        answer = fetch(f"{project.base_url}/api/public/projects", headers=headers)
        if answer.status == 0:
            yield wrong(
                "Langfuse",
                f"{project.base_url} does not answer: {answer.body}",
                "Correct base_url.",
            )
        elif answer.status in (401, 403):
            yield wrong(
                "Langfuse",
                f"{project.base_url} does not take the keys of {name}",
                "Make new ones in Langfuse, under Settings, API keys.",
            )
        elif answer.status == 200:
            yield good("Langfuse", f"{project.base_url} takes the keys of {name}")
        else:
            yield doubtful(
                "Langfuse",
                f"{project.base_url} answered {answer.status}: {answer.says()}",
                "Check that base_url is Langfuse's, without a path.",
            )
        found = clock("Langfuse", answer.date)
        if found is not None:
            yield found
