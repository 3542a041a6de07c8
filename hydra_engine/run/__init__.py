"""One run: events in, instructions out, and the orchestrator that a user holds."""

from hydra_engine.run.orchestrator import ModelOrchestrator
