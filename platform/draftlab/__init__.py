"""draftlab: train, sweep and evaluate DFlash draft models."""

__version__ = "0.1.0"
