"""The lines to the engines: discovery, routing, and one client for each EngineCore."""
