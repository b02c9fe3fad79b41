"""Stores: who holds parameters and gradients, and when they are gathered and reduced."""
