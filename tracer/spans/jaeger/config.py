"""The configuration that Jaeger is started with: loopback ports of its own, traces in memory."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass
from typing import Final

HOST: Final = "127.0.0.1"

_CONFIG: Final = """\
service:
  extensions: [jaeger_storage, jaeger_query, healthcheckv2]
  pipelines:
    traces:
      receivers: [otlp]
      processors: [batch]
      exporters: [jaeger_storage_exporter]
  telemetry:
    # Otherwise Jaeger's own metrics take port 8888, whoever else may want it.
    metrics:
      level: none
extensions:
  jaeger_storage:
    backends:
      kept:
        memory:
          max_traces: {max_traces}
  jaeger_query:
    # Otherwise every question asked here is a trace of a service `jaeger`.
    enable_tracing: false
    storage:
      traces: kept
    http:
      endpoint: {host}:{query_http}
    grpc:
      endpoint: {host}:{query_grpc}
  healthcheckv2:
    use_v2: true
    http:
      endpoint: {host}:{health}
receivers:
  otlp:
    protocols:
      grpc:
        endpoint: {host}:{otlp_grpc}
      http:
        endpoint: {host}:{otlp_http}
processors:
  batch:
    timeout: 50ms
exporters:
  jaeger_storage_exporter:
    trace_storage: kept
"""


@dataclass(frozen=True)
class Ports:
    otlp_http: int
    otlp_grpc: int
    query_http: int
    query_grpc: int
    health: int

    @classmethod
    def free(cls) -> Ports:
        """Five ports that were free a moment ago, all held at once so that they differ."""
        with contextlib.ExitStack() as held:
            numbers = []
            for _ in range(5):
                listener = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
                listener.bind((HOST, 0))
                numbers.append(int(listener.getsockname()[1]))
        return cls(*numbers)


def config_text(ports: Ports, max_traces: int) -> str:
    """The contents of Jaeger's configuration file."""
    return _CONFIG.format(host=HOST, max_traces=max_traces, **vars(ports))
