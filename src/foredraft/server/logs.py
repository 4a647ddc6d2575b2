"""Structured logs: one JSON object, or one readable line, for each event."""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any


class Lines(logging.Formatter):
    """Of a record: time, level, message, and the ``fields`` it carries."""

    def __init__(self, as_json: bool) -> None:
        super().__init__()
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = getattr(record, "fields", {})
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        trace = self.formatException(record.exc_info) if record.exc_info else None
        if self._as_json:
            head = {"time": moment, "level": record.levelname.lower(), "logger": record.name}
            more = {"trace": trace} if trace else {}
            return json.dumps(
                {**head, "message": record.getMessage(), **fields, **more}, ensure_ascii=False, default=str
            )
        told = " ".join(f"{name}={value}" for name, value in fields.items() if value is not None)
        line = f"{moment} {record.levelname.lower()} {record.getMessage()} {told}".rstrip()
        return f"{line}\n{trace}" if trace else line


def log_to_stderr(as_json: bool) -> None:
    """Send this package's events, and warnings of all others, to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Lines(as_json))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("foredraft").setLevel(logging.INFO)
