"""Endpoints for operators: /v1/requests, /v1/cluster and the page at /console."""
