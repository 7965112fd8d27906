"""Live page: a static page that reads ``/metrics`` of the process that serves it, and the listener of both."""

__all__ = ()
