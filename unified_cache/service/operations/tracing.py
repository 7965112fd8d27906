"""Spans of OpenTelemetry around calls, in the trace that the client began. It needs the extra ``tracing``."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points

import grpc
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter
from opentelemetry.trace import SpanKind, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from unified_cache.errors import ConfigError
from unified_cache.service.access.callers import Observer
from unified_cache.service.access.fairness import FairScheduler
from unified_cache.service.access.gate import AdmittedCall, Authenticator, ServiceGate
from unified_cache.service.access.timeouts import CallTimeouts
from unified_cache.settings.access import Role
from unified_cache.settings.observing import TracingExporter, TracingSettings

__all__ = ["TracedGate", "open_provider"]

_TRACE_KEYS = frozenset({"traceparent", "tracestate"})
_EXPORTERS = "opentelemetry_traces_exporter"


class TracedGate(ServiceGate):
    """A gate that puts every call that it admits, or refuses, into a span."""

    def __init__(
        self,
        callers: Authenticator,
        scheduler: FairScheduler,
        timeouts: CallTimeouts,
        observer: Observer,
        tracer: Tracer,
    ) -> None:
        super().__init__(callers, scheduler, timeouts, observer)
        self._tracer = tracer
        self._propagator = TraceContextTextMapPropagator()

    @contextmanager
    def admitted(self, context: grpc.ServicerContext, needs: Role, *, method: str) -> Iterator[AdmittedCall]:
        """Admit as any gate does, in a span named after the method.

        Raises:
            Refused: as any gate does; the span says so.
        """
        metadata = ((key, value) for key, value in context.invocation_metadata() if key in _TRACE_KEYS)
        parent = self._propagator.extract({key: value for key, value in metadata if isinstance(value, str)})
        attributes = {"rpc.system": "grpc", "rpc.method": method}
        # A response stream is made by several threads' turns, so its span is never the thread's current one.
        span = self._tracer.start_span(method, parent, SpanKind.SERVER, attributes)
        try:
            with super().admitted(context, needs, method=method) as call:
                span.set_attribute("unified_cache.tenant", call.tenant)
                yield call
        except Exception as error:
            span.record_exception(error)
            span.set_status(StatusCode.ERROR)
            raise
        finally:
            span.end()


def open_provider(settings: TracingSettings) -> TracerProvider:
    """Make what exports spans in the background, at most so many of them waiting; the caller shuts it down.

    Raises:
        ConfigError: the exporter is not installed.
    """
    provider = TracerProvider(resource=Resource.create({"service.name": "unified-cache"}))
    exporter = _exporter(settings.exporter)
    provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=settings.spans_waiting_max))
    return provider


def _exporter(kind: TracingExporter) -> SpanExporter:
    if kind is TracingExporter.CONSOLE:
        return ConsoleSpanExporter(out=sys.stderr)
    for found in entry_points(group=_EXPORTERS):
        if found.name.startswith(kind.value):
            exporter: SpanExporter = found.load()()
            return exporter
    raise ConfigError(
        f"tracing.exporter {kind.value} needs an exporter of OpenTelemetry: pip install opentelemetry-exporter-otlp"
    )
