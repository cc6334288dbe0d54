"""The engines as an ingress replica sees them: discovery, routing, and one client for each EngineCore."""
