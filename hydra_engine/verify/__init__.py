"""A user's own tasks compared with plain PyTorch, step by step, in ways that bring out what depends on the engine."""

from hydra_engine.verify.compare import TaskVerification, Verification, verify

__all__ = ["TaskVerification", "Verification", "verify"]
