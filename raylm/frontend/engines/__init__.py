"""Engines in an ingress replica: discovery, routing, and one client for each EngineCore."""
