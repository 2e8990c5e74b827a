"""Metrics, logs, traces and the HTTP port that serves them: ``baton.core.telemetry`` bound to real back ends."""
