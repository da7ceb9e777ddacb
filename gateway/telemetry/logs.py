"""How strop's own log looks: plain lines, or one JSON object a line."""

import logging
import time
from typing import Literal

import orjson

_OURS = ("strop", "uvicorn", "uvicorn.error")
_TEXT = "%(asctime)sZ %(levelname)s %(name)s: %(message)s"


class JsonFormatter(logging.Formatter):
    """One object a line: time, level, logger, message, and the stack of an error."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        fields = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["error"] = self.formatException(record.exc_info)
        return orjson.dumps(fields).decode()


def configure(form: Literal["text", "json"], level: str) -> None:
    """Make the loggers of strop and of its server write to the standard error in this form."""
    formatter: logging.Formatter = JsonFormatter()
    if form == "text":
        formatter = logging.Formatter(_TEXT, "%Y-%m-%dT%H:%M:%S")
        formatter.converter = time.gmtime
    handler = logging.StreamHandler()
    handler.setFormatter(formatter)
    for name in _OURS:
        logger = logging.getLogger(name)
        logger.handlers = [handler] if name != "uvicorn.error" else []
        logger.propagate = name == "uvicorn.error"
        logger.setLevel(level.upper())
