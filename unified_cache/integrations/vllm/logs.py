"""Log lines of this package in an engine that shows only its own."""

import logging

PACKAGE = __name__.partition(".")[0]


def show_logs_with(engine: logging.Logger) -> None:
    """Send this package's log lines to the engine's handlers.

    Changes nothing where the lines have handlers already, by choice of the operator. Calling it again is free.
    """
    ours = logging.getLogger(PACKAGE)
    own = [handler for handler in ours.handlers if not isinstance(handler, logging.NullHandler)]
    if own or (ours.parent is not None and ours.parent.hasHandlers()):
        return
    for handler in engine.handlers:
        ours.addHandler(handler)
    if ours.level == logging.NOTSET:
        ours.setLevel(engine.getEffectiveLevel())
