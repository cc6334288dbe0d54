"""OpenTelemetry: spans of ended requests, made from their timelines and sent by OTLP."""
